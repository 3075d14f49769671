"""Set blocks against loops, what permutation and padding do to them, and what they cost."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmtrain.nn.attention import join_heads, split_heads
from lmtrain.nn.blocks import FeedForward, ResidualOptions
from lmtrain.nn.cross_attention import CrossAttention, CrossAttentionBlock
from lmtrain.nn.sets import ISAB, MAB, PMA, SAB, LearnedQueryAttention, PlainBlock
from tests.nn.measuring import flops
from tests.nn.patterns import loop

DIM, HEADS = 8, 2


def plain() -> nn.Module:
    return PlainBlock(CrossAttention(DIM, HEADS))


def post_norm() -> nn.Module:
    """The paper's own."""
    options: ResidualOptions = {"norm_kind": "layer", "norm_position": "post"}
    return CrossAttentionBlock(DIM, CrossAttention(DIM, HEADS), FeedForward(DIM, activation="relu"), **options)


def pre_norm() -> nn.Module:
    return CrossAttentionBlock(DIM, CrossAttention(DIM, HEADS), FeedForward(DIM, 12), norm_kind="scale")


every_block = pytest.mark.parametrize("block", [plain, post_norm, pre_norm])


def isab(block: Callable[[], nn.Module] = plain) -> ISAB:
    return ISAB(DIM, 3, block(), block())


def heads_loop(query: Tensor, key: Tensor, value: Tensor, heads: int, scale: float | None = None) -> Tensor:
    """Projected queries (Tq, D), keys and values (T, D) -> joined heads (Tq, D)."""
    every_pair = torch.ones(len(query), len(key), dtype=torch.bool)
    query, key, value = (split_heads(x.unsqueeze(0), heads) for x in (query, key, value))
    return join_heads(loop(query, key, value, every_pair, scale=scale)).squeeze(0)


def attention_loop(layer: CrossAttention, query: Tensor, values: Tensor) -> Tensor:
    """Joined heads before the output projection: (Tq, D), (T, W) -> (Tq, D)."""
    projected = query @ layer.query.weight.T, values @ layer.key.weight.T, values @ layer.value.weight.T
    return heads_loop(*projected, layer.heads)


def plain_loop(layer: MAB, query: Tensor, values: Tensor) -> Tensor:
    attention = layer.block.attention
    assert isinstance(attention, CrossAttention)
    joined = attention_loop(attention, query, values)
    return joined + (joined @ attention.output.weight.T).clamp(min=0)


def post_norm_loop(layer: MAB, query: Tensor, values: Tensor) -> Tensor:
    """Layer norm after the sum, as in the paper."""
    attention, feed_forward = layer.block.attention, layer.block.feed_forward
    assert isinstance(attention, CrossAttention)
    assert isinstance(feed_forward, FeedForward)
    h = F.layer_norm(query + attention_loop(attention, query, values) @ attention.output.weight.T, (DIM,))
    return F.layer_norm(h + feed_forward(h), (DIM,))


def pre_norm_loop(layer: MAB, query: Tensor, values: Tensor) -> Tensor:
    """x + A(norm(x), norm(y)), then + F(norm(.)), the norm being that to length sqrt(D)."""
    attention, feed_forward = layer.block.attention, layer.block.feed_forward
    assert isinstance(attention, CrossAttention)
    assert isinstance(feed_forward, FeedForward)
    scaled, values = (F.normalize(x, dim=-1) * math.sqrt(DIM) for x in (query, values))
    h = query + attention_loop(attention, scaled, values) @ attention.output.weight.T
    hidden: Tensor = feed_forward(F.normalize(h, dim=-1) * math.sqrt(DIM))
    return h + hidden


def test_sab_and_isab_are_mab_of_the_set() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 5, DIM, dtype=torch.float64)
    sab, induced = SAB(plain()).double(), isab().double()
    torch.testing.assert_close(sab(x), torch.stack([plain_loop(sab.block, row, row) for row in x]))
    points = [plain_loop(induced.gather, induced.inducing.detach(), row) for row in x]
    expected = [plain_loop(induced.spread, row, point) for row, point in zip(x, points, strict=True)]
    torch.testing.assert_close(induced(x), torch.stack(expected))


@pytest.mark.parametrize(
    ("block", "loop"), [(plain, plain_loop), (post_norm, post_norm_loop), (pre_norm, pre_norm_loop)]
)
def test_pma_is_mab_of_its_seeds_and_the_set(
    block: Callable[[], nn.Module], loop: Callable[[MAB, Tensor, Tensor], Tensor]
) -> None:
    torch.manual_seed(0)
    x, layer = torch.randn(2, 5, DIM, dtype=torch.float64), PMA(DIM, 3, block()).double()
    torch.testing.assert_close(layer(x), torch.stack([loop(layer.block, layer.seeds.detach(), row) for row in x]))


def test_learned_queries_take_the_place_of_projected_ones() -> None:
    torch.manual_seed(0)
    layer = LearnedQueryAttention(3, DIM, HEADS).double()
    x = torch.randn(2, 4, DIM, dtype=torch.float64)
    joined = [heads_loop(layer.queries.detach(), layer.key(row), layer.value(row), HEADS, scale=1.0) for row in x]
    torch.testing.assert_close(layer(x), torch.stack(joined) @ layer.output.weight.T)


@every_block
def test_encoders_are_equivariant_and_pools_invariant(block: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    x, order = torch.randn(2, 7, DIM), torch.randperm(7)
    for encoder in (SAB(block()), isab(block)):
        torch.testing.assert_close(encoder(x[:, order]), encoder(x)[:, order])
        assert not torch.allclose(encoder(x[:, order]), encoder(x), atol=1e-3)
    for pool in (PMA(DIM, 2, block()), LearnedQueryAttention(2, DIM, HEADS)):
        torch.testing.assert_close(pool(x[:, order]), pool(x))


@every_block
def test_padding_has_no_influence(block: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 7, DIM)
    valid = torch.arange(7) < torch.tensor([[4], [7]])
    for layer in (SAB(block()), isab(block), PMA(DIM, 2, block()), LearnedQueryAttention(2, DIM, HEADS)):
        padded, alone = layer(x, valid=valid), layer(x[:1, :4])
        torch.testing.assert_close(padded[:1, : alone.shape[1]], alone)
        torch.testing.assert_close(padded[1:], layer(x[1:]))
        with torch.autocast("cpu", torch.bfloat16):
            low = layer(x, valid=valid)
        torch.testing.assert_close(low.float(), padded, atol=0.05, rtol=0.05)


@every_block
def test_cost_of_isab_is_linear_and_of_sab_quadratic(block: Callable[[], nn.Module]) -> None:
    once, twice, four_times = (flops(isab(block), n, DIM) for n in (16, 32, 64))
    assert four_times - twice == 2 * (twice - once) > 0
    once, twice, four_times = (flops(SAB(block()), n, DIM) for n in (16, 32, 64))
    assert four_times - twice - 2 * (twice - once) == 6 * 16**2 * 4 * DIM  # 4 D for each pair: its score, its share


@pytest.mark.parametrize("dim", [16, 256])
def test_learned_points_start_different_and_on_the_scale_of_the_elements(dim: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 20, dim)
    attention = CrossAttention(dim, 4)
    block = PlainBlock(attention)
    isab, pma, queries = ISAB(dim, 16, block, block), PMA(dim, 16, block), LearnedQueryAttention(16, dim, 4)

    def scores(query: Tensor) -> float:
        """The spread over the elements of the scores that these queries (.., D) give."""
        weights = attention(query.expand(8, -1, -1), x)[1]
        return weights.log().std(-1).mean().item()

    for points in (isab.inducing, pma.seeds):
        assert scores(points) == pytest.approx(scores(x), rel=0.15)
        weights = attention(points.expand(8, -1, -1), x)[1]
        assert weights.std(-2).mean() > 0.1 * weights.mean()  # the points differ in what they attend to
    pooled = queries(x)
    assert pooled.std(1).mean() > 0.1 * pooled.std()
