"""Deep stacks at initialization: the size of activations and gradients, from the first block to the 120th."""

from typing import get_args

import pytest
import torch
from torch import Tensor, nn

from lmtrain.config.schema import ModelConfig
from lmtrain.model.build import build_model
from lmtrain.model.language_model import LanguageModel
from lmtrain.nn.blocks import NormPosition
from lmtrain.nn.norms import NormKind

DEPTH = 120


def sizes(model: LanguageModel) -> tuple[list[float], list[float]]:
    """Return for every block the root mean square of its result, and the norm of the loss's gradient in its weights."""
    results: list[float] = []

    def note(block: nn.Module, inputs: tuple[Tensor, ...], result: Tensor) -> None:
        results.append(result.square().mean().sqrt().item())

    blocks = list(model.encoder.blocks)
    for block in blocks:
        block.register_forward_hook(note)
    text = torch.randint(50, (4, 17))
    loss = model(text[:, :-1], text[:, 1:]).mean()
    weights = [parameter for block in blocks for parameter in block.parameters()]
    norms = torch.stack([gradient.norm() for gradient in torch.autograd.grad(loss, weights)])
    return results, norms.view(len(blocks), -1).norm(dim=1).tolist()


@pytest.mark.parametrize("kind", get_args(NormKind))
@pytest.mark.parametrize("position", get_args(NormPosition))
def test_activations_and_gradients_keep_their_size_through_120_blocks(kind: NormKind, position: NormPosition) -> None:
    torch.manual_seed(0)
    config = ModelConfig(layers=DEPTH, dim=64, heads=4, context=16, norm=kind, norm_position=position)
    activations, gradients = sizes(build_model(config, 50))
    assert len(activations) == len(gradients) == DEPTH
    if position == "post":
        assert activations == pytest.approx([1.0] * DEPTH, abs=1e-3)
    else:
        assert activations[0] == pytest.approx(0.5, abs=0.05)  # the scaled embedding's, which the blocks add to
        assert activations == pytest.approx(sorted(activations), rel=0.01)
        assert activations[-1] < 1.2
    assert 0.5 < gradients[0] / gradients[-1] < 3
    assert max(gradients) / min(gradients) < 4
