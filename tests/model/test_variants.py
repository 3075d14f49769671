"""The language model with every kind of attention, with post-norm and with the copy mechanism."""

import itertools
import math

import pytest
import torch

from tests.model.models import (
    CAUSAL,
    NORMS,
    PLAIN,
    SIZES,
    VARIANTS,
    VOCABULARY,
    WINDOWED_PLAIN,
    WINDOWED_VARIANTS,
    assert_trains,
    build,
    hidden,
    targets_of,
    tokens,
)


@pytest.mark.parametrize("fields", [*VARIANTS, *PLAIN, *({"norm": norm} for norm in NORMS)], ids=str)
def test_no_influence_of_the_future(fields: dict[str, object]) -> None:
    model, text = build(**fields, context=40), tokens(2, 40)
    before = model.predict(text)
    for t in (0, 2, 14, 31, 38):
        changed = text.clone()
        changed[:, t + 1 :] = (changed[:, t + 1 :] + 5) % VOCABULARY
        after = model.predict(changed)
        torch.testing.assert_close(before[:, : t + 1], after[:, : t + 1], atol=1e-6, rtol=0)
        assert (before[:, t + 1] - after[:, t + 1]).abs().max() > 1e-3


@pytest.mark.parametrize("fields", [*WINDOWED_VARIANTS, *WINDOWED_PLAIN], ids=str)
def test_windowed_variants_attend_to_the_whole_window(fields: dict[str, object]) -> None:
    model, text = build(**fields), tokens(1, 12)
    before = model.predict(text)
    for t in range(12):
        changed = text.clone()
        changed[0, t] = (changed[0, t] + 5) % VOCABULARY
        assert not torch.equal(before, model.predict(changed))


@pytest.mark.parametrize("fields", [*VARIANTS, *WINDOWED_VARIANTS], ids=str)
def test_every_variant_trains_all_of_its_parameters(fields: dict[str, object]) -> None:
    model, text = build(**fields), tokens(2, 12)
    assert model.state_dict().keys() == dict(model.named_parameters(remove_duplicate=False)).keys()  # no buffers
    nats = assert_trains(model, text)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(assert_trains(model, text), nats, atol=0.1, rtol=0.05)


@pytest.mark.parametrize(("mode", "kind"), [*itertools.product(("causal", "windowed"), CAUSAL[1:])])
def test_every_kind_is_another_function(mode: str, kind: str) -> None:
    full, other = build(mode=mode, **SIZES), build(mode=mode, attention=kind, **SIZES)
    other.load_state_dict(full.state_dict(), strict=False)
    assert (hidden(full, tokens(1, 12)) - hidden(other, tokens(1, 12))).abs().max() > 1e-3


def test_traced_as_one_graph_equals_eager() -> None:
    model = build(
        **SIZES, attention=["local", "linear", "compressed", "strided+global"], layers=4, copy=True, context=40
    )
    text = tokens(2, 40)
    compiled = torch.compile(model, dynamic=False, fullgraph=True, backend="aot_eager")
    found, expected = compiled(text, text), model(text, text)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    gradients = [torch.autograd.grad(nats.sum(), list(model.parameters())) for nats in (found, expected)]
    torch.testing.assert_close(*gradients, atol=1e-4, rtol=1e-4)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(compiled(text, text), model(text, text), atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize(("mode", "width"), [("causal", None), ("windowed", None), ("causal", 6)])
def test_copy_equals_its_definition_written_out(mode: str, width: int | None) -> None:
    model = build(mode=mode, copy=True, embed_dim=width)
    assert model.copying is not None
    with torch.no_grad():
        model.copying.gate.weight.normal_()
    text = tokens(1, 9) % 5  # words come back
    encoded = model._encode(text)
    pooled = model._pool(encoded)
    vocabulary = model._log_probs(model._project(pooled)).exp()
    found = model.predict(text).exp()
    for place, t in enumerate(range(9) if mode == "causal" else [8]):
        query = pooled[0, place] / (pooled[0, place].square().mean() + 1e-6).sqrt()
        normed = [encoded[0, i] / (encoded[0, i].square().mean() + 1e-6).sqrt() for i in range(t + 1)]
        before = [torch.zeros_like(query), *normed[:-1]]
        keys = [torch.cat((state, last)) for state, last in zip(normed, before, strict=True)]
        q = model.copying.pointer.query.weight @ query
        scores = torch.stack([q @ (model.copying.pointer.key.weight @ key) / math.sqrt(8) for key in keys])
        gate = (model.copying.gate.weight[0] @ query + model.copying.gate.bias[0]).sigmoid()
        expected = (1 - gate) * vocabulary[0, place]
        for i, weight in enumerate(scores.softmax(0)):
            expected[text[0, i]] += gate * weight
        torch.testing.assert_close(found[0, place], expected)
    targets = targets_of(model, tokens(1, 9))
    nats = -model.predict(text).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(model(text, targets), nats)


@pytest.mark.gpu
@pytest.mark.parametrize("fields", [*VARIANTS, *WINDOWED_VARIANTS, *PLAIN], ids=str)
def test_cuda_equals_cpu(fields: dict[str, object]) -> None:
    model = build(**{**fields, "dim": 32, "context": 64})
    text = tokens(2, 64)
    targets = targets_of(model, text)
    expected = model(text, targets)
    gradients = torch.autograd.grad(expected.sum(), list(model.parameters()))
    model.cuda()
    found = model(text.cuda(), targets.cuda())
    torch.testing.assert_close(found.cpu(), expected, atol=1e-4, rtol=1e-4)
    on_cuda = torch.autograd.grad(found.sum(), list(model.parameters()))
    for ours, theirs in zip(on_cuda, gradients, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, atol=1e-3, rtol=1e-3)
    with torch.autocast("cuda", torch.bfloat16):
        nats = model(text.cuda(), targets.cuda()).cpu()
    assert (nats - expected).abs().max() < 0.05 * math.log(VOCABULARY)


def test_induced_attention_has_the_activation_of_the_configuration() -> None:
    one, other = (
        build(mode="windowed", attention="induced", position="none", activation=activation)
        for activation in ("relu", "gelu")
    )
    other.load_state_dict(one.state_dict())
    other.pool = one.pool
    assert not torch.equal(one.predict(tokens(1, 12)), other.predict(tokens(1, 12)))


def test_induced_attention_has_the_norms_and_the_width_of_the_configuration() -> None:
    blocks = build(mode="windowed", attention="induced", position="none", qk_norm=True, ff_dim=20).encoder.blocks
    shapes = {name: tuple(weight.shape) for name, weight in blocks.named_parameters()}
    for part in ("gather", "spread"):
        assert shapes[f"0.{part}.block.feed_forward.hidden.weight"] == (20, 8)
        assert all(shapes[f"0.{part}.block.attention.{norm}_norm.weight"] == (4,) for norm in ("query", "key"))
