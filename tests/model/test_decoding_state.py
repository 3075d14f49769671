"""Decoding step by step against reading the same window in one piece."""

import functools
import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from lmtrain.model.decoding_state import DecodingState
from lmtrain.model.language_model import LanguageModel
from tests.model.models import (
    OWN_CACHE,
    PLAIN,
    QUERIES,
    SIZES,
    VARIANTS,
    VOCABULARY,
    WINDOWED_PLAIN,
    WINDOWED_VARIANTS,
    build,
    tokens,
)


def predict(model: LanguageModel, window: list[int]) -> Tensor:
    """log p of the next token, with nothing cached."""
    return model.predict(torch.tensor([window]))[0, -1]


def advance(model: LanguageModel, window: list[int], token: int) -> list[int]:
    """The documented rule of the context, on one row."""
    context = model.config.context
    if model.causal and len(window) == context:
        return [*window, token][-max(1, context // 2) :]
    return [*window, token][-context:]


def reencoded(model: LanguageModel, text: Tensor, pads: Sequence[int]) -> Tensor:
    """(T - 4, B, V): log p after the first five tokens of each row and after each further one, with nothing cached.

    Rows begin after their pads. Windows of one length are computed together.
    """
    windows = []
    for row, pad in zip(text.tolist(), pads, strict=True):
        rest = itertools.accumulate(row[5:], functools.partial(advance, model), initial=row[pad:5])
        windows.append(list(rest))
    wanted = [window for step in zip(*windows, strict=True) for window in step]
    found = torch.empty(len(wanted), VOCABULARY)
    for length in {len(window) for window in wanted}:
        rows = [row for row, window in enumerate(wanted) if len(window) == length]
        found[rows] = model.predict(torch.tensor([wanted[row] for row in rows]))[:, -1].detach()
    return found.view(-1, len(pads), VOCABULARY)


GLOBAL: list[dict[str, object]] = [{**SIZES, "attention": ["global", kind]} for kind in OWN_CACHE]
"""Whose global tokens are part of a state's length."""


@pytest.mark.parametrize("pads", [(0, 2, 4), (0, 0, 0)], ids=["ragged", "uniform"])
@pytest.mark.parametrize("fields", [*VARIANTS, *PLAIN, *WINDOWED_VARIANTS, *WINDOWED_PLAIN, *GLOBAL], ids=str)
def test_steps_equal_reencoding_the_window_over_three_contexts(
    fields: dict[str, object], pads: tuple[int, ...]
) -> None:
    model, text = build(**fields), tokens(3, 45)
    log_probs, state = model.start(text[:, :5], torch.arange(5) >= torch.tensor(pads).unsqueeze(-1))
    order = torch.arange(3)
    for t, expected in enumerate(reencoded(model, text, pads)[:-1], start=5):
        torch.testing.assert_close(log_probs, expected[order], atol=1e-5, rtol=1e-5)
        if t == 20:  # the state of the whole stack is reordered
            order = torch.tensor([2, 0, 1])
            state = state.select(order)
        log_probs, state = model.step(state, text[order, t])


@pytest.mark.parametrize("token_shift", [False, True])
@pytest.mark.parametrize(("mode", "context"), [*itertools.product(("causal", "windowed"), (1, 2, 3))])
def test_contexts_of_one_to_three_tokens_are_decoded_as_predicted(mode: str, context: int, token_shift: bool) -> None:
    model, text = build(mode=mode, context=context, token_shift=token_shift), tokens(1, 10)
    log_probs, state = model.start(text[:, :1], max_tokens=9)
    window = text[0, :1].tolist()
    for t in range(1, 10):
        torch.testing.assert_close(log_probs[0], predict(model, window), atol=1e-5, rtol=1e-5)
        log_probs, state = model.step(state, text[:, t])
        window = advance(model, window, int(text[0, t]))


@pytest.mark.parametrize("mode", ["causal", "windowed"])
def test_long_prompts_keep_their_end(mode: str) -> None:
    model, text = build(mode=mode), tokens(2, 30)
    log_probs, _ = model.start(text)
    torch.testing.assert_close(log_probs[1], predict(model, text[1, -12:].tolist()), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("mode", "query"), [*itertools.product(("causal", "windowed"), QUERIES)])
def test_select_reorders_repeats_and_drops_rows(mode: str, query: str) -> None:
    model, text = build(mode=mode, pool_query=query), tokens(3, 60)
    _, state = model.start(text[:, :4], torch.arange(4) >= torch.tensor([[0], [1], [3]]))
    histories = [text[0, :4].tolist(), text[1, 1:4].tolist(), text[2, 3:4].tolist()]
    for t, order in enumerate(([2, 0, 0, 1], [1, 1, 3, 0], [3, 3], [1, 0, 0]) * 6, start=4):
        state = state.select(torch.tensor(order))
        new = (torch.arange(len(order)) * 7 + t) % VOCABULARY
        log_probs, state = model.step(state, new)
        histories = [advance(model, histories[row], int(new[i])) for i, row in enumerate(order)]
        expected = torch.stack([predict(model, history) for history in histories])
        torch.testing.assert_close(log_probs, expected, atol=1e-5, rtol=1e-5)


def test_selecting_only_the_shorter_rows_of_a_full_cache() -> None:
    model, text = build(), tokens(2, 13)
    _, state = model.start(text[:, :12], torch.arange(12) >= torch.tensor([[0], [6]]))
    log_probs, state = model.step(state.select(torch.tensor([1])), text[1:, 12])
    torch.testing.assert_close(log_probs[0], predict(model, text[1, 6:].tolist()), atol=1e-5, rtol=1e-5)
    assert isinstance(state, DecodingState)
    assert state.kv_len == 7


@pytest.mark.parametrize(("max_tokens", "capacity"), [(4, 9), (8, 12), (None, 12)])
def test_memory_is_for_the_tokens_that_may_be_read(max_tokens: int | None, capacity: int) -> None:
    model, text = build(), tokens(2, 9)
    log_probs, state = model.start(text[:, :5], max_tokens=max_tokens)
    for t in range(5, 9):
        log_probs, state = model.step(state, text[:, t])
    torch.testing.assert_close(log_probs, model.predict(text)[:, -1], atol=1e-5, rtol=1e-5)
    assert isinstance(state, DecodingState)
    assert state.capacity == capacity


def test_decoding_is_normalized_and_records_no_graph() -> None:
    model = build()
    log_probs, state = model.start(tokens(2, 3))
    log_probs, state = model.step(state, tokens(2))
    assert log_probs.dtype == torch.float32
    assert not log_probs.requires_grad
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(2))


def test_decoding_in_float64_has_its_precision() -> None:
    model, text = build(copy=True, output="adaptive", token_shift=True).double(), tokens(2, 9)
    log_probs, state = model.start(text[:, :5])
    for t in range(5, 9):
        torch.testing.assert_close(log_probs, model.predict(text[:, :t])[:, -1], atol=1e-12, rtol=1e-12)
        log_probs, state = model.step(state, text[:, t])


def test_decoding_under_autocast_is_close() -> None:
    model, text = build(dim=32), tokens(2, 30)
    _, exact = model.start(text[:, :5])
    with torch.autocast("cpu", torch.bfloat16):
        _, state = model.start(text[:, :5])
    for t in range(5, 30):
        expected, exact = model.step(exact, text[:, t])
        with torch.autocast("cpu", torch.bfloat16):
            log_probs, state = model.step(state, text[:, t])
        torch.testing.assert_close(log_probs, expected, atol=0.06, rtol=0.02)


@pytest.mark.parametrize(("mode", "query"), [*itertools.product(("causal", "windowed"), QUERIES)])
def test_pool_weights_sum_to_one_and_follow_recency(mode: str, query: str) -> None:
    model = build(mode=mode, pool_query=query)
    weights = model.pool_weights(tokens(1, 10))
    assert weights.shape == (2, 10)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2))
    assert (weights >= 0).all()
    if query == "recency":  # the first head starts with a slope of 4 nats
        assert weights[0, -1] > 0.9
