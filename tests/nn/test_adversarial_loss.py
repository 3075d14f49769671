"""The adversarial softmax against rows that are really moved, its gradients, and where it is not used."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lmtrain.nn.output_loss import adversarial_nats
from tests.model.test_language_model import build, tokens


def moved(hidden: Tensor, weight: Tensor, targets: Tensor, share: float) -> Tensor:
    """-log p of each target, its row of the weight moved straight against the state."""
    nats = []
    for h, target in zip(hidden, targets, strict=True):
        row = weight[target]
        away = (row - share * row.norm() * h / h.norm()) if row @ h > 0 else row
        changed = torch.cat((weight[:target], away.unsqueeze(0), weight[target + 1 :]))
        nats.append(-(changed @ h).log_softmax(0)[target])
    return torch.stack(nats)


@pytest.mark.parametrize("scale", [0.3, 3.0])
def test_loss_and_gradients_are_those_of_moved_rows(scale: float) -> None:
    draw = torch.Generator().manual_seed(1)
    hidden, weight = (torch.randn(n, 6, generator=draw, dtype=torch.float64) * scale for n in (40, 9))
    targets = torch.randint(9, (40,), generator=draw)
    hidden.requires_grad_(), weight.requires_grad_()
    nats = F.cross_entropy(hidden @ weight.T, targets, reduction="none")
    found = adversarial_nats(nats, hidden, weight[targets], 0.2)
    expected = moved(hidden, weight, targets, 0.2)
    sure = nats.detach() < 1e-5
    torch.testing.assert_close(found[~sure], expected[~sure])
    toward = ((weight[targets] * hidden).sum(-1) > 0).detach()
    assert (found > nats)[toward].all()
    torch.testing.assert_close(found[~toward], nats[~toward])
    assert 5 < toward.sum() < 35
    for gradient, wanted in zip(
        torch.autograd.grad(found[~sure].sum(), (hidden, weight)),
        torch.autograd.grad(expected[~sure].sum(), (hidden, weight)),
        strict=True,
    ):
        torch.testing.assert_close(gradient, wanted)


def test_certain_and_hopeless_targets_have_finite_losses_and_gradients() -> None:
    nats = torch.tensor([0.0, 1e-9, 50.0, 500.0], requires_grad=True)
    ones = torch.ones(4, 2)
    loss = adversarial_nats(nats, ones, ones, 0.1)
    torch.testing.assert_close(loss[2:], nats[2:] + 0.2)
    assert (loss[:2] < 1e-5).all()
    (gradient,) = torch.autograd.grad(loss.sum(), nats)
    assert gradient.isfinite().all()


@pytest.mark.parametrize("fields", [{}, {"mode": "windowed", "tie_embeddings": False, "embed_dim": 5}], ids=str)
@pytest.mark.parametrize("chunk", [None, 3])
def test_a_model_uses_it_in_training_alone(fields: dict[str, object], chunk: int | None) -> None:
    model, text = build(**fields), tokens(2, 7)
    targets = tokens(2, 7) if model.causal else tokens(2)
    model.loss_chunk = chunk
    before, silent = model(text, targets), model.train()(text, targets)
    model.adversarial = 0.1
    assert torch.equal(model.eval()(text, targets), before)
    harder = model.train()(text, targets)
    assert torch.equal(silent, before)
    assert (harder >= silent - 1e-6).all()
    hidden = model.encode(text).flatten(0, -2)
    wanted = -model.logits(hidden).log_softmax(-1)[torch.arange(len(hidden)), targets.flatten()]
    rows = model.output_weight[targets.flatten()]
    torch.testing.assert_close(harder.flatten(), adversarial_nats(wanted, hidden, rows, 0.1))
    for gradient in torch.autograd.grad(harder.sum(), list(model.parameters())):
        assert gradient.isfinite().all()
