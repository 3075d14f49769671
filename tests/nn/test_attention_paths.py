"""The ways to compute attention under a pattern, in blocks, compiled, on CUDA: values and gradients of the dense one.

Shapes: B rows, H heads, T positions, D features per head.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lmtrain.nn import dot_product
from lmtrain.nn.attention import padding_mask
from lmtrain.nn.dot_product import BLOCK, attend, attention_weights
from lmtrain.nn.patterns import Pattern
from tests.nn.patterns import LONG, alibi, every_pattern, every_sparse_pattern, random_qkv


def assert_same(result: Tensor, expected: Tensor, leaves: list[Tensor], tolerance: float = 1e-10) -> None:
    """Equal values, and equal gradients of the same weighted sum."""
    torch.testing.assert_close(result, expected, atol=tolerance, rtol=tolerance)
    weight = torch.linspace(-1, 1, result.numel(), dtype=result.dtype, device=result.device).view_as(result)
    gradients, others = (torch.autograd.grad(x, leaves, weight) for x in (result, expected))
    torch.testing.assert_close(gradients, others, atol=tolerance, rtol=tolerance)


@every_sparse_pattern
@pytest.mark.parametrize("biased", [False, True])
def test_long_rows_equal_dense(pattern: Pattern, biased: bool) -> None:
    leaves = query, key, value = random_qkv(LONG)
    mask = alibi(LONG) if biased else None
    # The reference: the pattern as a mask only, which the dense path takes as it is.
    allowed = pattern.mask(LONG)
    dense = allowed if mask is None else mask.masked_fill(~allowed, float("-inf"))
    expected = attend(query, key, value, dense, scale=0.9)
    assert_same(attend(query, key, value, mask, pattern=pattern, scale=0.9), expected, leaves)


@pytest.mark.parametrize("window", [1, BLOCK, BLOCK + 1, BLOCK + 2, LONG // 2])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [dot_product.LONG + 1, 5 * BLOCK, LONG])
def test_local_attention_in_blocks_equals_dense(window: int, causal: bool, length: int) -> None:
    leaves = query, key, value = random_qkv(length, rows=2)
    pattern = Pattern(causal=causal, window=window)
    expected = attend(query, key, value, pattern.mask(length))
    assert_same(attend(query, key, value, pattern=pattern), expected, leaves)


@torch.no_grad()
def test_one_query_without_gradients_equals_its_formula() -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 2, count, 8) for count in (1, 300, 300))
    mask, bias = (torch.arange(300) < torch.tensor([[7], [290]]))[:, None, None], alibi(300)[:, -1:].float()
    weights = (query @ key.mT / 8**0.5).masked_fill(~mask, float("-inf")).softmax(-1)
    torch.testing.assert_close(attend(query, key, value, mask), weights @ value)
    expected = (query @ key.mT / 8**0.5 + bias).softmax(-1) @ value
    with torch.autocast("cpu", torch.bfloat16):  # which would round the bias
        torch.testing.assert_close(attend(query, key, value, bias), expected)


@torch.no_grad()
def test_the_bias_of_one_query_may_have_the_type_of_the_query() -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 2, count, 8).bfloat16() for count in (1, 30, 30))
    bias = alibi(30)[:, -1:].bfloat16()
    expected = attend(query.float(), key.float(), value.float(), bias.float())
    torch.testing.assert_close(attend(query, key, value, bias), expected.bfloat16())


@pytest.mark.parametrize("length", [100, LONG])
def test_dropout_keeps_the_mean(length: int) -> None:
    query, key, value = (torch.zeros(1, 1, length, 1), torch.zeros(1, 1, length, 1), torch.ones(1, 1, length, 1))
    torch.manual_seed(0)
    kept = attend(query, key, value, pattern=Pattern(window=30), dropout=0.3)
    assert kept.mean().item() == pytest.approx(1, abs=0.03)
    assert kept.std() > 0.05


@pytest.mark.parametrize("kind", ["pattern", "padding"])
def test_masks_in_bf16_products_equal_softmax_in_float32(kind: str) -> None:
    """On a CPU the product of queries and keys adds the mask."""
    torch.manual_seed(0)
    query, key = (torch.randn(2, 3, 40, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    mask = torch.ones(40, 40, dtype=torch.bool).tril()
    if kind == "padding":
        mask = mask.T & (torch.arange(40) >= torch.tensor([0, 7]).view(2, 1, 1, 1))
    weights = attention_weights(query, key, mask, None)
    scores = query.float() @ key.float().transpose(-2, -1) / 8
    expected = (scores.exp() * mask) / (scores.exp() * mask).sum(-1, keepdim=True)
    assert not weights[~mask.expand_as(weights)].any()
    torch.testing.assert_close(weights.float(), expected, atol=0.01, rtol=0.02)
    upstream = torch.randn_like(expected)
    ours = torch.autograd.grad(weights, [query, key], upstream.bfloat16())
    for gradient, exact in zip(ours, torch.autograd.grad(expected, [query, key], upstream), strict=True):
        torch.testing.assert_close(gradient.float(), exact.float(), atol=0.03, rtol=0.03)


@pytest.mark.parametrize("length", [1, 40, LONG])
@pytest.mark.parametrize(
    ("dtype", "autocast"), [(torch.float32, True), (torch.bfloat16, False), (torch.float16, False)]
)
def test_queries_without_a_key_are_finite_in_low_precision(dtype: torch.dtype, autocast: bool, length: int) -> None:
    """The long ones are those of the last block of local attention, past the end."""
    query, value = (torch.ones(1, 1, length, 8, dtype=dtype, requires_grad=True) for _ in range(2))
    mask = None if length == LONG else torch.zeros(length, length, dtype=torch.bool)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        result = attend(query, -30 * query, value, mask, pattern=Pattern(window=1 if mask is None else None))
        with torch.no_grad():
            assert attend(query, -30 * query, value, mask).isfinite().all()
    assert result.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(result.sum(), (query, value)))


@pytest.mark.parametrize("pattern", [Pattern(causal=True, window=100), Pattern(stride=150, global_tokens=3)], ids=str)
def test_traced_as_one_graph_equals_eager(pattern: Pattern) -> None:
    leaves = random_qkv(LONG)
    compiled = torch.compile(attend, dynamic=False, fullgraph=True, backend="aot_eager")
    assert_same(compiled(*leaves, pattern=pattern), attend(*leaves, pattern=pattern), leaves)


@pytest.mark.filterwarnings("ignore:.*CUDA is not available:UserWarning")
def test_a_bias_keeps_its_type_and_scores_their_scale_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen on fake tensors: bf16 would give position 257 the bias of position 256."""
    seen: list[tuple[list[torch.dtype], bool, float]] = []
    real = F.scaled_dot_product_attention

    def noted(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, dropout: float, *, scale: float) -> Tensor:
        seen.append(([x.dtype for x in (query, key, value, mask)], torch.is_autocast_enabled("cuda"), scale))
        return real(query, key, value, mask, dropout, scale=scale)

    monkeypatch.setattr(F, "scaled_dot_product_attention", noted)
    with FakeTensorMode():
        query, key, value = (torch.empty(1, 2, 300, 16, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        bias = torch.empty(2, 300, 300, device="cuda")
        assert attend(query, key, value, bias, scale=0.9).dtype == torch.bfloat16
    assert seen == [([torch.float32] * 4, False, 0.9)]


def on_cuda() -> list[Tensor]:
    return [x.detach().float().cuda().requires_grad_() for x in random_qkv(LONG, dim=16)]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")
@every_sparse_pattern
def test_cuda_patterns_equal_dense(pattern: Pattern) -> None:
    leaves = query, key, value = on_cuda()
    dense = attend(query.cpu(), key.cpu(), value.cpu(), pattern.mask(LONG)).cuda()
    assert_same(attend(query, key, value, pattern=pattern), dense, leaves, 1e-2)


@pytest.mark.gpu
@every_pattern
@pytest.mark.parametrize("kind", ["float", "padding"])
def test_cuda_masks_equal_the_cpu(pattern: Pattern, kind: str) -> None:
    leaves = query, key, value = on_cuda()
    mask = alibi(LONG).float() if kind == "float" else padding_mask((torch.arange(LONG) % 2 == 0)[None])
    expected = attend(query.cpu(), key.cpu(), value.cpu(), mask, pattern=pattern, scale=0.9).cuda()
    assert_same(attend(query, key, value, mask.cuda(), pattern=pattern, scale=0.9), expected, leaves, 1e-2)
