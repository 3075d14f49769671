"""The encoder-decoder: teacher forcing against steps and searches, and its losses against loops."""

import functools
import itertools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import nn

from lmtrain import nn as nn_package
from lmtrain.generation.beam import beam_search
from lmtrain.generation.options import Options
from lmtrain.generation.sampling import sample
from lmtrain.nn.blocks import NormPosition
from lmtrain.nn.cross_attention import CrossAttention
from lmtrain.nn.non_autoregressive import NonAutoregressive
from lmtrain.nn.norms import NormKind, RMSNorm
from lmtrain.nn.positions import sinusoidal
from lmtrain.nn.seq2seq import Seq2Seq, guided_attention_loss, mix, shift
from tests.nn.translation import BEGIN, CONFIG, END, INPUTS, KINDS, LENGTHS, SOURCE, TARGET, TARGET_LENGTHS, VALID, make


@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize(
    ("attention", "position"),
    [
        *((kind, "pre") for kind in KINDS),
        (CrossAttention, "post"),
        (functools.partial(CrossAttention, head_dim=6, value_head_dim=[3, 5]), "pre"),
    ],
)
def test_steps_equal_teacher_forcing(
    attention: Callable[..., CrossAttention], copy: bool, position: NormPosition
) -> None:
    model = make(replace(CONFIG, copy=copy, cross_attention=attention, norm_position=position))
    expected, _ = model(SOURCE, INPUTS, VALID)
    log_probs, state = model.start(SOURCE, VALID)
    torch.testing.assert_close(log_probs, expected[:, 0], atol=1e-5, rtol=0)
    for t in range(1, INPUTS.shape[1]):
        log_probs, state = model.step(state, INPUTS[:, t])
        torch.testing.assert_close(log_probs, expected[:, t], atol=1e-5, rtol=0)


@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize("attention", KINDS)
def test_searches_choose_and_score_words_as_teacher_forcing_does(attention: type[CrossAttention], copy: bool) -> None:
    """Rows that have ended are dropped between steps; those of a beam are also repeated."""
    model = make(replace(CONFIG, copy=copy, cross_attention=attention))
    model.prediction.vocabulary.weight.data.mul_(3)

    def ends(ids: Sequence[int]) -> bool:
        return ids[-1] == END

    greedy = sample(*model.start(SOURCE, VALID), model.step, Options(max_tokens=6), is_end=ends, blocked=[BEGIN])
    beams = Options(max_tokens=6, beams=3, results=3)
    found = beam_search(*model.start(SOURCE, VALID), model.step, beams, is_end=ends, blocked=[BEGIN])
    for row, (first, hypotheses) in enumerate(zip(greedy, found, strict=True)):
        for hypothesis in (first, *hypotheses):
            text = torch.tensor([[BEGIN, *hypothesis.ids]])
            log_probs = model(SOURCE[row : row + 1], text[:, :-1], VALID[row : row + 1])[0][0]
            scores = log_probs.gather(-1, text[0, 1:].unsqueeze(-1)).flatten()
            torch.testing.assert_close(torch.tensor(hypothesis.token_log_probs), scores, atol=1e-4, rtol=0)
            if hypothesis is first:
                log_probs[:, BEGIN] = -torch.inf
                assert log_probs.argmax(-1).tolist() == list(first.ids)
        assert len({hypothesis.ids for hypothesis in hypotheses}) == 3


@pytest.mark.parametrize("copy", [False, True])
def test_padding_has_no_influence(copy: bool) -> None:
    model = make(replace(CONFIG, copy=copy))
    expected, _ = model(SOURCE, INPUTS, VALID)
    torch.testing.assert_close(model(SOURCE.masked_fill(~VALID, 3), INPUTS, VALID)[0], expected)
    for row, length in enumerate(LENGTHS):
        alone, _ = model(SOURCE[row : row + 1, :length], INPUTS[row : row + 1])
        torch.testing.assert_close(alone, expected[row : row + 1], atol=1e-5, rtol=0)


def test_weights_fit_a_model_of_another_length() -> None:
    model, longer = make(), make(replace(CONFIG, max_length=30), seed=1)
    longer.load_state_dict(model.state_dict())
    assert torch.equal(longer(SOURCE, INPUTS, VALID)[0], model(SOURCE, INPUTS, VALID)[0])


def test_predictions_are_float32_also_from_bf16_weights() -> None:
    assert make().bfloat16()(SOURCE, INPUTS, VALID)[0].dtype == torch.float32


def test_the_embedding_adds_sinusoids_and_has_an_end() -> None:
    model = make()
    expected = model.embedding.words.weight[INPUTS[:1, :3]] + sinusoidal(torch.arange(3), 16)
    torch.testing.assert_close(model.embedding(INPUTS[:1, :3]), expected)
    with pytest.raises(ValueError, match="max_length=9"):
        model(torch.zeros(1, 10, dtype=torch.long), INPUTS)


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("position", ["pre", "post"])
def test_encoder_and_decoder_end_with_a_norm(position: NormPosition, kind: NormKind) -> None:
    model = make(replace(CONFIG, norm_position=position, norm_kind=kind))
    memory, valid = model.encoder(SOURCE, VALID)
    torch.testing.assert_close(memory.square().mean(-1), torch.ones(3, 6), atol=1e-4, rtol=0)
    states, _ = model.decoder(model.embedding(INPUTS), memory, valid)
    torch.testing.assert_close(states.square().mean(-1), torch.ones(3, 7), atol=1e-4, rtol=0)
    if kind == "layer":
        torch.testing.assert_close(states.mean(-1), torch.zeros(3, 7), atol=1e-4, rtol=0)
    norms = [module for module in model.modules() if isinstance(module, (nn.RMSNorm, nn.LayerNorm))]
    assert {type(module) for module in norms} == {nn.LayerNorm if kind == "layer" else RMSNorm}
    assert len(norms) == 4 + 6 + 2 * (position == "pre")


@pytest.mark.parametrize(("copy", "bf16"), [(False, False), (True, True)])
@pytest.mark.parametrize("attention", KINDS)
@pytest.mark.parametrize("kind", ["seq2seq", "predicted", "fixed"])
def test_gradients_reach_every_parameter(
    kind: Literal["seq2seq", "predicted", "fixed"], attention: type[CrossAttention], copy: bool, bf16: bool
) -> None:
    torch.manual_seed(0)
    config = replace(CONFIG, copy=copy, cross_attention=attention)
    lengths = torch.tensor(TARGET_LENGTHS)
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        model: Seq2Seq | NonAutoregressive
        if kind == "seq2seq":
            model = Seq2Seq(config)
            loss = model.loss(SOURCE, TARGET, VALID, lengths, sampling=0.5, guided=1.0)
        else:
            model = NonAutoregressive(config, kind)
            loss = model.loss(SOURCE, TARGET, VALID, lengths)
    assert loss.dtype == torch.float32
    loss.backward()  # type: ignore[no-untyped-call]
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name


def test_the_copy_distribution_equals_a_loop() -> None:
    head = make(replace(CONFIG, copy=True)).prediction
    assert head.pointer is not None
    assert head.gate is not None
    states, memory = torch.randn(3, 2, 16), torch.randn(3, 6, 16)
    log_probs = head(states, memory, SOURCE, VALID)
    for b, t in itertools.product(range(3), range(2)):
        gate = head.gate(states[b, t]).sigmoid().item()
        expected = (1 - gate) * head.vocabulary(states[b, t]).softmax(-1)
        query = head.pointer.query(states[b, t])
        shares = [math.exp((query @ head.pointer.key(memory[b, i])).item() / 4) for i in range(LENGTHS[b])]  # sqrt(16)
        for i, share in enumerate(shares):
            expected[SOURCE[b, i]] += gate * share / sum(shares)
        torch.testing.assert_close(log_probs[b, t].exp(), expected)
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(3, 2))


def test_shift_puts_begin_before_and_end_behind() -> None:
    target = torch.tensor([[1, 2, 3], [4, 0, 0], [2, 2, 2]])
    inputs, labels, real = shift(target, torch.tensor([3, 1, 0]), CONFIG)
    assert inputs.tolist() == [[BEGIN, 1, 2, 3], [BEGIN, 4, END, END], [BEGIN, END, END, END]]
    assert labels.tolist() == [[1, 2, 3, END], [4, END, END, END], [END] * 4]
    assert real.tolist() == [[True] * 4, [True, True, False, False], [True, False, False, False]]


def mean_loss(model: Seq2Seq, rows: list[list[int]]) -> float:
    """The mean over all labels, END included, when these are the decoder's inputs after BEGIN."""
    nats = []
    for b, length in enumerate(TARGET_LENGTHS):
        log_probs = model(SOURCE[b : b + 1, : LENGTHS[b]], torch.tensor([[BEGIN, *rows[b][:length]]]))[0][0]
        nats += [-log_probs[t, label].item() for t, label in enumerate([*TARGET[b, :length].tolist(), END])]
    return math.fsum(nats) / len(nats)


@pytest.mark.parametrize("copy", [False, True])
def test_loss_equals_a_loop(copy: bool) -> None:
    model = make(replace(CONFIG, copy=copy))
    loss = model.loss(SOURCE, TARGET, VALID, torch.tensor(TARGET_LENGTHS))
    assert loss.item() == pytest.approx(mean_loss(model, TARGET.tolist()), abs=1e-5)
    assert torch.equal(loss, model.loss(SOURCE, TARGET, VALID, torch.tensor(TARGET_LENGTHS), sampling=0.0))
    first = model(SOURCE, INPUTS[:, :1], VALID)[0][:, 0, END]  # a target without words is its END
    torch.testing.assert_close(model.loss(SOURCE, TARGET[:, :0], VALID), -first.mean())
    whole = model.loss(SOURCE, TARGET, VALID)
    torch.testing.assert_close(whole, model.loss(SOURCE, TARGET, VALID, torch.tensor([4, 4, 4])))


def test_scheduled_sampling_reads_what_the_first_pass_predicted() -> None:
    """At probability one input t is what was sampled from the prediction at t - 1, and the labels stay true."""
    model = make()
    lengths = torch.tensor(TARGET_LENGTHS)
    torch.manual_seed(3)
    loss = model.loss(SOURCE, TARGET, VALID, lengths, sampling=1.0)
    torch.manual_seed(3)
    inputs, _, _ = shift(TARGET, lengths, CONFIG)
    sampled = torch.multinomial(model(SOURCE, inputs, VALID)[0].exp().flatten(0, 1), 1).view_as(inputs)
    rows = [[int(sampled[b, t - 1]) for t in range(1, 5)] for b in range(3)]
    assert loss.item() == pytest.approx(mean_loss(model, rows), abs=1e-5)
    assert abs(mean_loss(model, rows) - mean_loss(model, TARGET.tolist())) > 1e-3


def test_guided_attention_is_added_to_the_loss() -> None:
    model = make()
    lengths = torch.tensor(TARGET_LENGTHS)
    plain = model.loss(SOURCE, TARGET, VALID, lengths)
    inputs, _, _ = shift(TARGET, lengths, CONFIG)
    guide = guided_attention_loss(model(SOURCE, inputs, VALID)[1], lengths + 1, torch.tensor(LENGTHS))
    torch.testing.assert_close(model.loss(SOURCE, TARGET, VALID, lengths, guided=3.0), plain + 3 * guide)
    layer = model.decoder.blocks[0].cross_attention
    difference = model.loss(SOURCE, TARGET, VALID, lengths, guided=3.0) - model.loss(SOURCE, TARGET, VALID, lengths)
    (gradient,) = torch.autograd.grad(difference, layer.query.weight)
    assert gradient.abs().max() > 1e-4


def test_guided_attention_loss_equals_a_loop_and_prefers_the_diagonal() -> None:
    torch.manual_seed(0)
    weights = torch.rand(2, 3, 5, 4)
    total, count = 0.0, 0
    for b, (queries, keys) in enumerate(((5, 2), (3, 4))):
        for h, n, t in itertools.product(range(3), range(queries), range(keys)):
            off = n / queries - t / keys
            total += weights[b, h, n, t].item() * (1 - math.exp(-(off**2) / (2 * 0.3**2)))
            count += 1
    lengths = torch.tensor([5, 3]), torch.tensor([2, 4])
    loss = guided_attention_loss(weights, *lengths, width=0.3)
    assert loss.item() == pytest.approx(total / count, abs=1e-6)
    torch.testing.assert_close(guided_attention_loss(weights.expand(4, 2, 3, 5, 4), *lengths, width=0.3), loss)
    diagonal, six = torch.eye(6)[None, None], torch.tensor([6])
    assert guided_attention_loss(diagonal, six, six).item() == pytest.approx(0, abs=1e-7)
    assert guided_attention_loss(diagonal.flip(-1), six, six) > 0.1


@pytest.mark.parametrize(("queries", "keys"), [(0, 4), (3, 0), (0, 0)])
def test_guided_attention_leaves_empty_rows_out(queries: int, keys: int) -> None:
    weights = torch.rand(2, 1, 3, 4, requires_grad=True)
    targets, sources = torch.tensor([3, queries]), torch.tensor([4, keys])
    loss = guided_attention_loss(weights, targets, sources)
    torch.testing.assert_close(loss, guided_attention_loss(weights[:1], targets[:1], sources[:1]))
    (gradient,) = torch.autograd.grad(loss, weights)
    assert gradient[0].any()
    assert not gradient[1].any()


def test_the_feed_forward_layers_have_their_width() -> None:
    model = make(replace(CONFIG, ff_dim=40))
    shapes = {tuple(value.shape) for name, value in model.named_parameters() if "feed_forward." in name}
    assert {40, 16} == {size for shape in shapes for size in shape}


def test_the_examples_of_the_page_run() -> None:
    page = Path(nn_package.__path__[0], "README.md").read_text()
    names: dict[str, Any] = {
        "x": torch.randn(2, 5, 512),
        "source": SOURCE,
        "source_valid": VALID,
        "target": TARGET,
        "target_lengths": torch.tensor(TARGET_LENGTHS),
    }
    exec("".join(re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)), names)
    assert names["y"].shape == names["x"].shape
    assert len(names["texts"]) == len(SOURCE)


def test_scheduled_sampling_replaces_each_place_independently_at_the_rate() -> None:
    torch.manual_seed(0)
    gold = torch.zeros(200, 201, dtype=torch.long)
    for probability in (0.5, 0.1):
        replaced = mix(gold, gold + 1, probability)
        assert not replaced[:, 0].any()
        sampled = replaced[:, 1:].float()  # 40,000 places: a standard error of at most 0.0025
        assert sampled.mean().item() == pytest.approx(probability, abs=0.01)
        both = (sampled[:, 1:] * sampled[:, :-1]).mean().item()
        assert both == pytest.approx(probability**2, abs=0.01)
        assert (sampled[1:] * sampled[:-1]).mean().item() == pytest.approx(probability**2, abs=0.01)
