"""The pool against a written-out loop, in all of its forms: every prefix, whole window, running."""

import math

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from lmtrain.nn import prefix_mean as scan
from lmtrain.nn.blocks import FeedForward
from lmtrain.nn.pooling import AttentionPooling, PoolQuery, PoolResidual, slope_parameters
from lmtrain.nn.prefix_mean import prefix_mean
from tests.nn.measuring import largest_tensor

QUERIES: tuple[PoolQuery, ...] = ("seed", "recency")


def pooling(query: PoolQuery, residual: PoolResidual = "state", dropout: float = 0.0) -> AttentionPooling:
    torch.manual_seed(1)
    pool = AttentionPooling(8, 2, FeedForward(8, 16), query=query, residual=residual, attention_dropout=dropout)
    with torch.no_grad():
        pool.seed.normal_()
    return pool


def mean_loop(score: Tensor, value: Tensor, slope: Tensor) -> Tensor:
    out = torch.zeros_like(value)
    for t in range(score.shape[-1]):
        age = t - torch.arange(t + 1)
        weights = (score[..., : t + 1] - slope[:, None] * age).softmax(-1)
        out[:, :, t] = (weights.unsqueeze(-1) * value[:, :, : t + 1]).sum(-2)
    return out


@pytest.mark.parametrize(
    ("length", "dtype", "tolerance"),
    [*((length, torch.float64, 1e-12) for length in (1, 2, 11, 31, 32, 33, 300)), (100, torch.float32, 1e-5)],
)
def test_prefix_mean_equals_loop_with_gradients_in_chunks_of_any_size(
    length: int, dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    shapes = ((2, 3, length), (2, 3, length, 4), (2, 3, length, 4))
    score, value, outer = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    slope = torch.tensor([0.0, 0.02, 4.0], dtype=torch.float64, requires_grad=True)
    inputs = (score, value, slope)
    expected = mean_loop(*inputs)
    wanted = [expected, *torch.autograd.grad((expected * outer).sum(), inputs)]
    for chunk in (2, 4, 32, 64):
        monkeypatch.setattr(scan, "CHUNK", chunk)
        out, _ = prefix_mean(score.to(dtype), value.to(dtype), slope.to(dtype))
        found = [out.double(), *torch.autograd.grad((out * outer).sum(), inputs)]
        torch.testing.assert_close(found, wanted, atol=tolerance, rtol=10 * tolerance)


@pytest.mark.parametrize("length", [40, 1100, 2048])
def test_a_prefix_mean_does_not_change_with_later_inputs(length: int) -> None:
    torch.manual_seed(0)
    score, value, slope = torch.randn(1, 2, length), torch.randn(1, 2, length, 3), torch.tensor([0.0, 0.02])
    before, _ = prefix_mean(score, value, slope)
    for t in (0, 31, 32, length // 2, length - 2):
        later = torch.arange(length) > t
        changed = score + 9 * later, value + later.unsqueeze(-1)
        after, _ = prefix_mean(*changed, slope)
        assert torch.equal(after[:, :, : t + 1], before[:, :, : t + 1])
        assert not torch.equal(after[:, :, t + 1], before[:, :, t + 1])


def test_all_prefixes_cost_time_and_memory_in_proportion_to_the_length() -> None:
    costs = []
    for length in (2**12, 2**15):
        score, value, slope = torch.randn(1, 1, length), torch.randn(1, 1, length, 2), torch.zeros(1)
        with FlopCounterMode(display=False) as counter, largest_tensor() as sizes:
            prefix_mean(score, value, slope)
        costs.append((counter.get_total_flops(), sizes.largest))
    assert costs[1][0] == pytest.approx(8 * costs[0][0], rel=0.01)
    assert costs[1][1] == 8 * costs[0][1]


@pytest.mark.parametrize("size", [1.0, 1e4])
def test_prefix_mean_is_finite_and_exact_where_a_global_maximum_overflows(size: float) -> None:
    torch.manual_seed(0)
    score, value = torch.randn(1, 2, 4096) * size, torch.randn(1, 2, 4096, 4)
    score[:, 0, 0] = 4 * size  # a peak that a later maximum must forget
    score[:, 1, 0] = -4 * size  # the only one that the first mean has
    slope = torch.tensor([4.0, 0.01], requires_grad=True)
    score.requires_grad_()
    out, _ = prefix_mean(score, value, slope)
    assert out.isfinite().all()
    for gradient in torch.autograd.grad(out.square().sum(), (score, slope)):
        assert gradient.isfinite().all()
    for t in (0, 31, 32, 500, 4095):  # in float64 from the same float32 scores
        age = t - torch.arange(t + 1)
        exact = (score.detach().double()[..., : t + 1] - slope.detach().double()[:, None] * age).softmax(-1)
        expected = (exact.unsqueeze(-1) * value.double()[:, :, : t + 1]).sum(-2)
        # A score of 4e4 is itself known to 2e-3 in float32 once anything is taken from it.
        tolerance = 2e-6 if size == 1 else 1e-2
        torch.testing.assert_close(out[:, :, t].double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("query", QUERIES)
@pytest.mark.parametrize("residual", ["seed", "state"])
def test_pool_equals_its_definition_written_out(query: PoolQuery, residual: PoolResidual) -> None:
    pool = pooling(query, residual).double()
    torch.manual_seed(0)
    x = torch.randn(2, 37, 8, dtype=torch.float64)
    out = pool(x)
    states = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    assert (pool.slope is None) == (query == "seed")
    slope = [0.0, 0.0] if pool.slope is None else [math.log1p(math.exp(raw)) for raw in pool.slope.tolist()]
    for b in range(2):
        for t in (0, 1, 31, 32, 36):
            heads = []
            for h in range(2):
                part = slice(4 * h, 4 * h + 4)
                q = pool.seed[part]
                keys = [pool.key.weight[part] @ states[b, i] for i in range(t + 1)]
                scores = torch.stack([q @ k / 2 - slope[h] * (t - i) for i, k in enumerate(keys)])
                values = torch.stack([pool.value.weight[part] @ states[b, i] for i in range(t + 1)])
                heads.append(scores.softmax(0) @ values)
            r = x[b, t] if residual == "state" else pool.seed
            h_ = r + pool.output.weight @ torch.cat(heads)
            expected = h_ + pool.feed_forward(h_ / (h_.square().mean() + 1e-6).sqrt())
            torch.testing.assert_close(out[b, t], expected)
    torch.testing.assert_close(pool.window(x), out[:, -1:])
    torch.testing.assert_close(pool.weights(x).sum(-1), torch.ones(2, 2, dtype=torch.float64))


@torch.no_grad()
@pytest.mark.parametrize("query", QUERIES)
def test_running_form_equals_prefix_form(query: PoolQuery) -> None:
    pool = pooling(query)
    torch.manual_seed(0)
    x, lengths = torch.randn(3, 50, 8), torch.tensor([0, 5, 9])
    expected = pool(x)
    state = pool.prefill(x[:, :9], lengths)
    for n in range(40):
        new = torch.arange(3).unsqueeze(-1), (lengths + n).unsqueeze(-1)
        torch.testing.assert_close(pool.step(x[new], state), expected[new], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("heads", [1, 4, 8])
def test_slopes_start_log_spaced(heads: int) -> None:
    slopes = torch.nn.functional.softplus(slope_parameters(heads)).tolist()
    expected = [4 * (0.02 / 4) ** (h / (heads - 1)) for h in range(heads)] if heads > 1 else [math.sqrt(0.08)]
    assert slopes == pytest.approx(expected, rel=1e-4)


def test_scores_are_float32_under_autocast() -> None:
    pool, x = pooling("recency"), torch.randn(2, 6, 8)
    expected = pool._project(x)[0]
    with torch.autocast("cpu", torch.bfloat16):
        scores, values = pool._project(x)
    assert values.dtype == torch.bfloat16
    torch.testing.assert_close(scores, expected)


def test_dropout_keeps_or_drops_a_key_with_all_its_features() -> None:
    """With a mask for each feature, the features of equal values would no longer be equal."""
    pool = pooling("seed", dropout=0.5)
    with torch.no_grad():
        pool.seed.zero_()  # so that a head's weights differ from another's by dropout only
        pool.value.weight.copy_(torch.ones(8, 8) * torch.tensor([1.0] * 4 + [2.0] * 4).unsqueeze(-1))
        pool.output.weight.copy_(torch.eye(8))
        pool.feed_forward.output.weight.zero_()
    x = torch.randn(3, 6, 8)
    heads = (pool(x) - x).unflatten(-1, (2, 4))
    torch.testing.assert_close(heads, heads[..., :1].expand_as(heads), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(2 * heads[..., 0, 0], heads[..., 1, 0])  # each head drops others


@pytest.mark.parametrize("query", QUERIES)
def test_pool_dropout_of_weights_has_the_right_mean(query: PoolQuery) -> None:
    pool = pooling(query, dropout=0.5)
    x = torch.randn(1, 6, 8).expand(3000, -1, -1)
    assert not torch.equal(pool(x[:1]), pool(x[:1]))
    assert not torch.equal(pool.window(x[:1]), pool.window(x[:1]))
    pool.feed_forward.output.weight.data.zero_()  # so that the output is linear in the weights
    mean = pool(x).mean(0)
    pool.eval()
    torch.testing.assert_close(mean, pool(x[:1])[0], atol=0.1, rtol=0.1)


def test_dropout_is_on_the_results_and_not_on_the_residual_stream() -> None:
    pool, x = AttentionPooling(8, 2, FeedForward(8, 16), dropout=1.0), torch.randn(2, 5, 8)
    assert torch.equal(pool(x), x)
