"""Our blocks against torch's own, with the same weights: outputs and every gradient.

Shapes: B rows, H heads, T positions (Tm of a memory), D the width.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmtrain.nn.attention import SelfAttention, padding_mask
from lmtrain.nn.blocks import Activation, EncoderBlock, FeedForward, NormPosition, ResidualOptions, relu
from lmtrain.nn.cross_attention import CrossAttention, DecoderBlock
from lmtrain.nn.patterns import CAUSAL, FULL
from tests.helpers import compiles

B, T, TM, D, H = 3, 7, 5, 16, 4
TOLERANCE = 1e-10
"""Everything is computed in float64."""

Read = Callable[[Tensor], Tensor]


def gradient_of(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def below(name: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{name}.{key}": tensor for key, tensor in tensors.items()}


def of_module(module: nn.Module, read: Read) -> dict[str, Tensor]:
    return {key: read(parameter) for key, parameter in module.named_parameters()}


def of_attention(theirs: nn.MultiheadAttention, read: Read) -> dict[str, Tensor]:
    """Torch's tensors under our names; torch keeps the projections in one."""
    weights = of_module(theirs, read)["in_proj_weight"].chunk(3)
    found = {f"{name}.weight": weight for name, weight in zip(("query", "key", "value"), weights, strict=True)}
    return found | below("output", of_module(theirs.out_proj, read))


PARTS = {
    "encoder": {
        "attention": "self_attn",
        "attention_residual.norm": "norm1",
        "feed_forward.hidden": "linear1",
        "feed_forward.output": "linear2",
        "feed_forward_residual.norm": "norm2",
    },
    "decoder": {
        "self_attention": "self_attn",
        "self_residual.norm": "norm1",
        "cross_attention": "multihead_attn",
        "cross_residual.norm": "norm2",
        "feed_forward.hidden": "linear1",
        "feed_forward.output": "linear2",
        "feed_forward_residual.norm": "norm3",
    },
}
"""Our names of a block's parts, and torch's."""


def of_block(kind: str, theirs: nn.Module, read: Read) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for our_name, their_name in PARTS[kind].items():
        part = theirs.get_submodule(their_name)
        tensors = of_attention(part, read) if isinstance(part, nn.MultiheadAttention) else of_module(part, read)
        found |= below(our_name, tensors)
    return found


def randomize(module: nn.Module) -> None:
    """Torch starts gains at 1, where a wrong one would not show."""
    module.double()
    for name, parameter in module.named_parameters():
        around = 1.0 if "norm" in name and name.endswith("weight") else 0.0
        nn.init.normal_(parameter, mean=around, std=0.25)


def load(ours: nn.Module, tensors: dict[str, Tensor]) -> None:
    """A LayerNorm of torch without bias equals ours with a bias of zero; nothing else may be missing."""
    missing, unexpected = ours.double().load_state_dict(tensors, strict=False)
    assert not unexpected
    assert all(name.endswith("norm.bias") for name in missing)


def assert_same(
    ours: nn.Module,
    names: Callable[[Read], dict[str, Tensor]],
    call_ours: Callable[..., Any],
    call_theirs: Callable[..., Tensor],
    *inputs: Tensor,
) -> None:
    """Both modules on these inputs: the same outputs, and the same gradients of all inputs and weights."""
    load(ours, names(torch.detach))
    results, slopes = [], []
    for call in (call_ours, call_theirs):
        leaves = [x.clone().requires_grad_() for x in inputs]
        found = call(*leaves)
        result = found[0] if isinstance(found, tuple) else found  # attention to a memory returns its weights, too
        torch.autograd.backward(result, torch.linspace(-1, 1, result.numel()).double().view_as(result))
        results.append(result)
        slopes.append([gradient_of(leaf) for leaf in leaves])
    torch.testing.assert_close(*results, atol=TOLERANCE, rtol=TOLERANCE)
    torch.testing.assert_close(*slopes, atol=TOLERANCE, rtol=TOLERANCE)
    expected = names(gradient_of)
    actual = {name: gradient_of(p) for name, p in ours.named_parameters() if name in expected}
    assert len(actual) == len(expected)
    torch.testing.assert_close(actual, expected, atol=TOLERANCE, rtol=TOLERANCE)


def ragged(length: int) -> Tensor:
    """Rows of different lengths: (B, T) bool, True = real."""
    return torch.arange(length) < torch.tensor([length, length - 2, 1]).unsqueeze(-1)


@pytest.mark.parametrize(("norm_position", "activation"), [("pre", "gelu"), ("post", "relu")])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("kind", PARTS)
def test_a_block_equals_that_of_torch(
    kind: str, causal: bool, norm_position: NormPosition, activation: Activation
) -> None:
    torch.manual_seed(0)
    make_theirs = nn.TransformerEncoderLayer if kind == "encoder" else nn.TransformerDecoderLayer
    theirs = make_theirs(D, H, 3 * D, 0.0, activation, batch_first=True, norm_first=norm_position == "pre", bias=False)
    randomize(theirs)
    self_attention = SelfAttention(D, H, pattern=CAUSAL if causal else FULL)
    feed_forward = FeedForward(D, 3 * D, activation)
    options: ResidualOptions = {"norm_kind": "layer", "norm_position": norm_position}
    valid, valid_memory = ragged(T), ragged(TM)
    future = torch.ones(T, T, dtype=torch.bool).triu(1) if causal else None
    ours: nn.Module
    inputs, their_masks = [torch.randn(B, T, D).double()], {}
    our_masks = {"mask": padding_mask(valid)}
    if kind == "encoder":
        ours = EncoderBlock(D, self_attention, feed_forward, **options)
        their_masks = {"src_mask": future, "src_key_padding_mask": ~valid}
    else:
        ours = DecoderBlock(D, self_attention, CrossAttention(D, H), feed_forward, **options)
        our_masks["memory_mask"] = padding_mask(valid_memory)
        their_masks = {"tgt_mask": future, "tgt_key_padding_mask": ~valid, "memory_key_padding_mask": ~valid_memory}
        inputs.append(torch.randn(B, TM, D).double())
    assert_same(
        ours,
        lambda read: of_block(kind, theirs, read),
        lambda *tensors: ours(*tensors, **our_masks),
        lambda *tensors: theirs(*tensors, **their_masks),
        *inputs,
    )


@compiles
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_relu_of_a_compiled_graph_equals_that_of_torch(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.cat((torch.randn(200), torch.zeros(10), torch.tensor([1e-30, -1e-30, 1e30, -1e30]))).to(dtype)
    upstream = torch.randn(len(x)).to(dtype)
    x.requires_grad_()
    ours, theirs = torch.compile(relu, dynamic=False)(x), F.relu(x)
    assert torch.equal(ours, theirs)
    assert torch.equal(*(torch.autograd.grad(y, x, upstream)[0] for y in (ours, theirs)))
