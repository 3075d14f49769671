"""The whole model: one set of weights in two modes, padding, training, dropouts, initial state."""

import itertools
import math
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lmtrain.model.build import FINAL_GAIN, set_output_bias
from lmtrain.nn.blocks import Activation
from tests.model.models import NORMS, POSITIONS, QUERIES, VOCABULARY, assert_trains, build, hidden, tokens


@pytest.mark.parametrize(("query", "residual"), [*itertools.product(QUERIES, ("seed", "state"))])
def test_both_modes_share_their_weights_and_agree_where_they_must(query: str, residual: str) -> None:
    fields = {"pool_query": query, "pool_residual": residual, "position": "none"}
    causal, windowed = build(layers=0, **fields), build(layers=0, mode="windowed", **fields)
    windowed.load_state_dict(causal.state_dict())
    text = tokens(3, 10)
    torch.testing.assert_close(hidden(windowed, text), hidden(causal, text)[:, -1:], atol=1e-5, rtol=1e-5)
    causal, windowed = build(**fields), build(mode="windowed", **fields)
    windowed.load_state_dict(causal.state_dict())
    torch.testing.assert_close(hidden(windowed, text[:, :1]), hidden(causal, text[:, :1]), atol=1e-5, rtol=1e-5)
    assert (hidden(windowed, text) - hidden(causal, text)[:, -1:]).abs().max() > 1e-3


@pytest.mark.parametrize("mode", ["causal", "windowed"])
def test_combinations_run_forward_and_backward(mode: str) -> None:
    choices = {"position": POSITIONS, "pool_query": QUERIES, "pool_residual": ("seed", "state"), "norm": NORMS}
    dropouts = ("dropout", "attention_dropout", "input_dropout", "output_dropout")
    activations = itertools.cycle(get_args(Activation))
    others = itertools.cycle(itertools.product((False, True), (False, True), (None, 6), (0, 1), (0.0, 0.3)))
    for values in itertools.product(*choices.values()):
        flag, tied, width, layers, rate = next(others)
        fields: dict[str, Any] = dict(zip(choices, values, strict=True)) | dict.fromkeys(dropouts, rate)
        fields |= {"qk_norm": flag, "tie_embeddings": tied, "embed_dim": width, "layers": layers}
        assert_trains(build(mode=mode, activation=next(activations), **fields), tokens(2, 4))


@pytest.mark.parametrize("tied", [False, True])
def test_tied_weights_share_storage(tied: bool) -> None:
    model = build(tie_embeddings=tied, embed_dim=4)
    assert (model.output.weight is model.embedding.weight) is tied
    assert ("output.weight" in dict(model.named_parameters())) is not tied
    assert model.output(torch.zeros(3, 4)).shape == (3, VOCABULARY)


def test_first_prediction_is_close_to_the_unigram_distribution() -> None:
    model, counts = build(dim=64), torch.arange(VOCABULARY) ** 3
    set_output_bias(model, counts)
    unigram = (counts + 1) / (counts + 1).sum()
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(model._log_probs(torch.zeros(64, dtype=torch.bfloat16)).exp(), unigram)
    predicted = model.predict(tokens(4, 12)).exp()
    divergence = (unigram * (unigram / predicted).log()).sum(-1)
    # A token's own word, whose vector is part of the state, has the largest logit: up to the final gain.
    assert divergence.max() < 1.5
    torch.testing.assert_close(predicted.mean((0, 1)), unigram, atol=0.05, rtol=1.0)


def test_start_of_the_residual_stream_is_of_unit_order_at_any_depth() -> None:
    for layers, width in ((1, None), (12, None), (4, 16)):
        model = build(dim=64, layers=layers, embed_dim=width, position="none")
        encoded = model._encode(tokens(4, 12))
        assert 0.3 < encoded.square().mean().sqrt() < 2
        assert model.output(hidden(model, tokens(4, 12))).abs().max() < 2 * FINAL_GAIN


def test_input_and_output_dropout_are_locked_and_off_in_eval() -> None:
    model = build(input_dropout=0.5, output_dropout=0.5, position="none", dim=32).train()
    x = model._embed(tokens(3, 12))
    assert torch.equal((x == 0), (x[:, :1] == 0).expand_as(x))
    y = hidden(model, tokens(3, 12))
    assert torch.equal((y == 0), (y[:, :1] == 0).expand_as(y))
    assert 0.3 < (y == 0).float().mean() < 0.7
    model.eval()
    assert (hidden(model, tokens(3, 12)) != 0).all()


def test_short_windows_are_aligned_to_the_right() -> None:
    model, text = build(mode="windowed", position="learned"), tokens(1, 4)
    assert model.position is not None
    before = hidden(model, text)
    with torch.no_grad():
        model.position.weight[:8] += 1
    assert torch.equal(hidden(model, text), before)
    with torch.no_grad():
        model.position.weight[11] += torch.arange(8)
    assert not torch.equal(hidden(model, text), before)


def test_more_than_the_context_is_rejected() -> None:
    with pytest.raises(ValueError, match="13 tokens in a row: the model takes 1 to 12"):
        build().predict(tokens(1, 13))


@pytest.mark.parametrize("mode", ["causal", "windowed"])
@pytest.mark.parametrize(
    ("field", "masks"),
    [
        ("input_dropout", 1),
        ("output_dropout", 1),
        ("dropout", 3 * 2 + 2),  # after attention and feed-forward of three blocks, and twice in the pool
        ("attention_dropout", 3 + 1),
    ],
)
def test_each_dropout_is_applied_in_all_its_places(
    mode: str, field: str, masks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates: list[float] = []

    def counted(x: Tensor, rate: float) -> Tensor:
        rates.append(rate)
        return x

    monkeypatch.setattr(F, "dropout", counted)
    model = build(mode=mode, layers=3, **{field: 0.25})
    hidden(model.train(), tokens(2, 4))
    assert rates == [0.25] * masks
    hidden(model.eval(), tokens(2, 4))
    assert len(rates) == masks


def test_activation_checkpointing_computes_every_block_again() -> None:
    calls: list[int] = []
    model = build().train()
    model.encoder.activation_checkpointing = True
    for block in model.encoder.blocks:
        block.register_forward_pre_hook(lambda *_: calls.append(1))
    model(tokens(2, 12), tokens(2, 12)).sum().backward()
    assert len(calls) == 4


@pytest.mark.parametrize(
    ("fields", "name", "std"),
    [
        ({"attention": "global", "attention_globals": 64}, "encoder.global_tokens", 0.5),  # as the scaled embedding
        ({"context": 64, "position": "learned"}, "position.weight", 0.5),
        ({"tie_embeddings": False}, "output.weight", 1 / 64),  # as the embedding
    ],
)
def test_weights_start_at_the_scale_of_the_embedding(fields: dict[str, object], name: str, std: float) -> None:
    assert build(dim=64, **fields).get_parameter(name).std().item() == pytest.approx(std, rel=0.1)


@pytest.mark.parametrize("kind", ["compressed", "linformer", "induced"])
@pytest.mark.parametrize("rate", ["dropout", "attention_dropout"])
def test_both_dropouts_reach_every_kind_of_block(kind: str, rate: str) -> None:
    model = build(mode="windowed", position="none", attention=kind, layers=1, **{rate: 0.5})
    model.encoder.train()
    assert not torch.equal(model.predict(tokens(1, 12)), model.predict(tokens(1, 12)))


def test_the_pointer_starts_with_an_eighth_of_the_prediction() -> None:
    copying = build(copy=True).copying
    assert copying is not None
    assert copying.gate(torch.randn(5, 8)).sigmoid().tolist() == [[pytest.approx(1 / (1 + math.exp(2)))]] * 5
