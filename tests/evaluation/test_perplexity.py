"""Perplexity by sums: every token once, with the promised context, whatever the batch."""

import dataclasses
import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lmtrain.config.schema import ModelConfig
from lmtrain.evaluation.perplexity import Score, readable
from lmtrain.model.build import build_model
from lmtrain.model.language_model import LanguageModel
from tests.evaluation.scoring import score_of, split_of


@given(
    count=st.integers(1, 60),
    context=st.integers(1, 20),
    share=st.floats(0.01, 1.0),
    batch_size=st.integers(1, 9),
    limit=st.none() | st.integers(1, 70),
)
def test_every_token_is_scored_once_with_the_promised_context(
    count: int, context: int, share: float, batch_size: int, limit: int | None
) -> None:
    stride = max(1, int(context * share))
    found: list[tuple[int, int]] = []

    def forward(inputs: Tensor, targets: Tensor) -> Tensor:
        """Token i of the stream is i, so a target tells its position and its row tells its context."""
        assert torch.equal(inputs[:, 1 - targets.shape[1] :], targets[:, :-1]) or targets.shape[1] == 1
        assert torch.equal(targets[:, -1], inputs[:, -1] + 1)
        contexts = torch.arange(inputs.shape[1] - targets.shape[1] + 1, inputs.shape[1] + 1).expand_as(targets)
        found.extend(zip(targets.flatten().tolist(), contexts.flatten().tolist(), strict=True))
        return torch.full(targets.shape, math.log(3.0))

    split = split_of(np.arange(1, count + 1))
    score = score_of(forward, split, context=context, stride=stride, batch_size=batch_size, limit=limit)
    scored = min(limit or count, count)
    assert score.tokens == scored
    assert score.token_perplexity == pytest.approx(3.0)
    assert (score.words, score.bytes) == pytest.approx((split.words * scored / count, 5 * scored))
    assert score.estimated == (scored < count)
    assert [target for target, _ in found] == list(range(1, scored + 1))
    assert all(min(target, context - stride + 1) <= have <= context for target, have in found)


def plain_loop(model: LanguageModel, ids: np.ndarray, context: int, stride: int) -> float:
    """Nats of a stream by one forward pass per token."""
    stream = [0, *ids.tolist()]
    total, reached, start = 0.0, 0, 0
    while reached < len(ids):
        end = min(start + context, len(ids))
        begin = max(0, end - context)
        for target in range(max(begin, reached), end):
            log_probs = model.predict(torch.tensor([stream[begin : target + 1]])).view(-1, model.vocab_size)
            total -= float(log_probs[-1, stream[target + 1]])
        reached, start = end, end - context + stride if end < len(ids) else end
    return total


def test_nats_are_summed_in_float64() -> None:
    """In float32, 2**24 + 1 is 2**24."""
    split = split_of(np.array([1, 2]))
    score = score_of(lambda *_: torch.tensor([[2.0**24, 1.0]]), split, context=2, stride=2)
    assert score.nats == 2**24 + 1


@pytest.mark.parametrize(("mode", "stride"), [("causal", 2), ("causal", 6), ("windowed", 1)])
@torch.no_grad()
def test_nats_equal_a_plain_loop(mode: str, stride: int) -> None:
    torch.manual_seed(0)
    model = build_model(ModelConfig(mode=mode, context=6, dim=8, layers=1, heads=2), 11).eval()
    ids = np.random.default_rng(0).integers(0, 11, 29)
    for batch_size in (1, 3, 64):
        score = score_of(model, split_of(ids), mode=mode, context=6, stride=stride, batch_size=batch_size)
        assert score.nats == pytest.approx(plain_loop(model, ids, 6, stride), rel=1e-5)
        assert score.tokens == 29


def test_figures_under_their_own_names() -> None:
    score = Score(nats=200.0, tokens=100, words=50, bytes=400, context=8, stride=2)
    assert score.summary() == {
        "word_perplexity": pytest.approx(math.exp(4)),
        "token_perplexity": pytest.approx(math.exp(2)),
        "bits_per_byte": pytest.approx(0.5 / math.log(2)),
        "loss": 2.0, "nats": 200.0, "tokens": 100, "words": 50, "bytes": 400, "context": 8, "stride": 2,
        "unknown_share": 0.0, "estimated": False, "floor": None,
    }  # fmt: skip
    replaced = dataclasses.replace(score, unknown_share=0.25)  # the bytes of unknown words were not predicted
    assert replaced.figures() == {key: value for key, value in score.figures().items() if key != "bits_per_byte"}
    assert replaced.summary() == score.summary() | {"bits_per_byte": None, "unknown_share": 0.25}
    huge = Score(1e9, 1, 1, 1, 1, 1)
    assert huge.word_perplexity == math.inf
    assert (huge.summary()["word_perplexity"], huge.summary()["nats"]) == (None, 1e9)
    assert json.dumps(Score(math.inf, 1, 1, 1, 1, 1).summary(), allow_nan=False)


WORDS = Score(nats=800.0, tokens=400, words=400, bytes=1600, context=8, stride=2)
PIECES = dataclasses.replace(WORDS, words=200)
PARTLY = dataclasses.replace(PIECES, estimated=True)
UNKNOWN = dataclasses.replace(WORDS, unknown_share=0.25)
RARELY_UNKNOWN = dataclasses.replace(WORDS, unknown_share=0.00002)
BITS, TOKENS = "bits per byte 0.7213 over 1,600 bytes", "token perplexity 7.389 over 400 tokens"
SAME = "word perplexity 7.389 over 400 words and line ends"
LONGER = "word perplexity 54.598 over 200 words and line ends"
QUARTER, RARE = " (unknown words: 25%)", " (unknown words: 0.002%)"
WORD_COUNT, BYTE_COUNT = " (word count estimated)", " (byte count estimated)"


@pytest.mark.parametrize(
    ("score", "floor", "lines"),
    [
        (WORDS, None, [SAME, BITS]),
        (WORDS, 2.0, [f"{SAME} (floor 2.000)", BITS]),
        (UNKNOWN, None, [SAME + QUARTER]),
        (RARELY_UNKNOWN, None, [SAME + RARE]),
        (PIECES, None, [BITS, TOKENS, LONGER]),
        (PIECES, math.exp(2), [f"{BITS} (floor 0.3607)", TOKENS, LONGER]),
        (PARTLY, None, [BITS + BYTE_COUNT, TOKENS, LONGER + WORD_COUNT]),
    ],
)
def test_the_figure_that_suits_the_tokens_comes_first(score: Score, floor: float | None, lines: list[str]) -> None:
    """Each with its own qualifications; a token perplexity only where tokens are not words."""
    score = dataclasses.replace(score, floor=floor)
    assert [" ".join(line.split()) for line in score.lines()] == lines
    assert len({line.index(" over ") for line in score.lines()}) == 1
    assert score.headline == lines[0]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (85.314, "85.31"), (1234.5, "1,234"), (3.44e12, "3.4e+12"), (math.inf, "inf"),
    ],
)  # fmt: skip
def test_a_figure_of_any_size_is_readable(value: float, text: str) -> None:
    assert readable(value, 2) == text


def test_a_part_of_a_split_has_no_floor_and_the_share_of_unknown_words_of_the_whole() -> None:
    """And each token is reported once, for a progress bar."""
    split, advanced = dataclasses.replace(split_of(np.arange(1, 9)), floor=2.0, replaced=2), list[int]()

    def forward(inputs: Tensor, targets: Tensor) -> Tensor:
        return torch.ones(targets.shape)

    options: dict[str, Any] = {"context": 4, "stride": 2, "advance": advanced.append}
    whole, part = (score_of(forward, split, limit=limit, **options) for limit in (None, 7))
    assert (whole.floor, part.floor) == (2.0, None)
    assert whole.unknown_share == part.unknown_share == 0.25
    assert sum(advanced) == 8 + 7
