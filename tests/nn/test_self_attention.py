"""What every self-attention layer promises: nothing from the future, steps equal to one pass, bf16, dropout, masks.

Shapes: B rows, T positions, H heads.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from lmtrain.nn import patterns
from lmtrain.nn.attention import SelfAttention
from lmtrain.nn.blocks import EncoderBlock, FeedForward
from lmtrain.nn.dot_product import BLOCK
from lmtrain.nn.key_reduction import LinformerAttention
from lmtrain.nn.kv_cache import CachePosition, KeyValueCache, Rows
from lmtrain.nn.linear_attention import LinearAttention
from lmtrain.nn.positions import alibi_slopes, rotate, rotation
from tests.nn.measuring import flops
from tests.nn.patterns import LONG, PATTERNS, alibi, compressed

Make = Callable[[], Any]


MASKED: dict[str, Make] = {
    str(pattern): lambda pattern=pattern: SelfAttention(8, 2, pattern=pattern, qk_norm=True)  # type: ignore[misc]
    for pattern in PATTERNS
}
CAUSAL: dict[str, Make] = {
    **{name: make for (name, make), pattern in zip(MASKED.items(), PATTERNS, strict=True) if pattern.causal},
    "unscaled": lambda: SelfAttention(8, 2, pattern=patterns.CAUSAL, scale=1.0),
    **{f"compressed {n}": lambda n=n: compressed(n, patterns.CAUSAL) for n in (1, 3, 4)},  # type: ignore[misc]
    "compressed unscaled": lambda: compressed(3, patterns.CAUSAL, scale=1.0),
    "linear": lambda: LinearAttention(SelfAttention(8, 2, pattern=patterns.CAUSAL, qk_norm=True)),
}
LAYERS: dict[str, Make] = {
    **MASKED,
    **CAUSAL,
    "compressed both ways": lambda: compressed(4, patterns.FULL),
    "linear both ways": lambda: LinearAttention(SelfAttention(8, 2, qk_norm=True)),
    "linformer": lambda: LinformerAttention(SelfAttention(8, 2, qk_norm=True), context=LONG, projected=5),
}


@pytest.mark.parametrize("length", [14, LONG])
@pytest.mark.parametrize("kind", CAUSAL)
def test_a_token_changes_nothing_before_it(kind: str, length: int) -> None:
    torch.manual_seed(0)
    layer, x, by = CAUSAL[kind](), torch.randn(1, length, 8), rotation(torch.arange(length), 4)
    before = layer(x, rotation=by)
    for t in range(length - 1) if length < BLOCK else (2, BLOCK - 1, BLOCK, 2 * BLOCK - 1, length - 2):
        changed = x.clone()
        changed[:, t + 1] += 1
        after = layer(changed, rotation=by)
        assert torch.equal(after[:, : t + 1], before[:, : t + 1])
        assert not torch.equal(after[:, t + 1], before[:, t + 1])


@pytest.mark.parametrize(
    ("lengths", "precision"),
    [((0, 1, 3, 4, 7, 8), torch.float32), ((0, 1, 3, 4, 7, 8), torch.bfloat16), ((0,) * 6, torch.float32)],
    ids=["ragged", "bf16", "empty"],
)
@pytest.mark.parametrize("kind", [*CAUSAL, *(f"{name} + ALiBi" for name in CAUSAL if name in MASKED)])
@torch.no_grad()
def test_prefill_and_steps_equal_one_pass(kind: str, lengths: tuple[int, ...], precision: torch.dtype) -> None:
    """For rows of different lengths, padded with noise, and reordered on the way."""
    torch.manual_seed(0)
    name, plus, _ = kind.partition(" + ")
    block = EncoderBlock(8, CAUSAL[name](), FeedForward(8, 16)).eval()
    x, count, most, order = torch.randn(6, 18, 8), torch.tensor(lengths), max(lengths), torch.arange(6)
    positions = torch.arange(18)
    padding = positions[:most] >= count.unsqueeze(-1)
    padded = torch.where(padding.unsqueeze(-1), torch.randn(6, most, 8) * 100, x[:, :most])
    whole, start, slopes = {"rotation": rotation(positions, 4)}, {"rotation": rotation(positions[:most], 4)}, None
    if plus:
        bias, slopes = alibi(18).float(), alibi_slopes(2)
        whole["mask"], start["mask"] = bias, bias[:, :most, :most]
    expected = block(x, **whole)
    with torch.autocast("cpu", precision, enabled=precision != torch.float32):
        tolerance = 1e-5 if precision == torch.float32 else 0.1
        out, cache = block.prefill(padded, count, **start)
        cache.extend(12 - most)
        assert out.shape == (6, most, 8)
        torch.testing.assert_close(out[-1].float(), expected[-1, :most], atol=tolerance, rtol=tolerance)
        for i in range(10):
            if i == 3:
                order = torch.tensor([5, 3, 0, 1, 1])
                cache.select(Rows(order, len(count)))
                count = count[order]
                cache.extend(6)
            position = count + i
            by = rotation(position[:, None, None], 4)
            at = CachePosition(position, int(position.max()) + 1, rotation=by, slopes=slopes)
            out = block.step(x[order, position].unsqueeze(1), cache, at)
            torch.testing.assert_close(
                out.squeeze(1).float(), expected[order, position], atol=tolerance, rtol=tolerance
            )


@pytest.mark.parametrize(("kind", "masking"), [*product(LAYERS, ["none"]), *product(MASKED, ["float", "bool"])])
def test_bf16_autocast_is_close(kind: str, masking: str) -> None:
    torch.manual_seed(0)
    layer, x, by = LAYERS[kind](), torch.randn(1, LONG, 8), rotation(torch.arange(LONG), 4)
    masks = {"none": {}, "float": {"mask": alibi(LONG).float()}, "bool": {"mask": torch.rand(LONG, LONG) < 0.8}}
    expected = layer(x, **masks[masking], rotation=by)
    with torch.autocast("cpu", torch.bfloat16):
        result = layer(x, **masks[masking], rotation=by)
        result.float().square().mean().backward()
    torch.testing.assert_close(result.float(), expected, atol=0.05, rtol=0.03)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())


@pytest.mark.parametrize(
    "make",
    [
        lambda: SelfAttention(8, 2, dropout=0.3),
        lambda: compressed(4, patterns.FULL, dropout=0.3),
        lambda: compressed(4, patterns.CAUSAL, dropout=0.3),
        lambda: LinformerAttention(SelfAttention(8, 2, dropout=0.3), context=16, projected=5),
    ],
    ids=["full", "compressed", "causal compressed", "linformer"],
)
def test_dropout_keeps_the_mean_and_is_off_in_eval(make: Make) -> None:
    torch.manual_seed(0)
    layer, x = make(), torch.randn(1, 16, 8)
    assert not torch.equal(layer(x), layer(x))
    mean = layer(x.expand(4000, -1, -1)).mean(0, keepdim=True)
    layer.eval()
    torch.testing.assert_close(mean, layer(x), atol=0.05, rtol=0)


def test_queries_and_keys_are_normalized_and_rotated() -> None:
    torch.manual_seed(0)
    layer, x, by = SelfAttention(8, 2, qk_norm=True), torch.randn(1, 5, 8), rotation(torch.arange(5), 4)
    query, key, value = ((x @ part.weight.T).view(1, 5, 2, 4) for part in (layer.query, layer.key, layer.value))
    query, key = (2 * part / part.norm(dim=-1, keepdim=True) for part in (query, key))
    found = layer.project(x, by)
    expected = (rotate(query.transpose(1, 2), by), rotate(key.transpose(1, 2), by), value.transpose(1, 2))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_rows_that_move_copy_only_where_they_differ() -> None:
    cache = KeyValueCache(torch.arange(8.0).view(2, 1, 4, 1), torch.arange(8.0).view(2, 1, 4, 1))
    cache.select(Rows(torch.tensor([0, 0]), 2), same=2, unused=1)
    assert cache.key.flatten().tolist() == [0, 1, 2, 3, 4, 5, 2, 7]


def quadratic_cost(layer: nn.Module, shortest: int = 64) -> int:
    """What operations grow by beyond those in proportion to the length, from the shortest to four times that."""
    once, twice, four_times = (flops(layer, factor * shortest, 8) for factor in (1, 2, 4))
    return four_times - twice - 2 * (twice - once)


@pytest.mark.parametrize("causal", [False, True])
def test_the_cost_grows_as_documented(causal: bool) -> None:
    pattern = patterns.Pattern(causal=causal)
    full = quadratic_cost(SelfAttention(8, 2, pattern=pattern))
    assert full == 6 * 64**2 * 4 * 8  # 4 W for each pair: its score, its share
    local = SelfAttention(8, 2, pattern=replace(pattern, window=9))
    for masked in (replace(pattern, stride=4), replace(pattern, global_tokens=3)):
        assert quadratic_cost(SelfAttention(8, 2, pattern=masked)) == full
    assert (quadratic_cost(local), quadratic_cost(local, shortest=512)) == (full, 0)
    assert quadratic_cost(compressed(4, pattern)) == full / 4
    assert quadratic_cost(LinearAttention(SelfAttention(8, 2, pattern=pattern))) == 0
    if not causal:
        assert quadratic_cost(LinformerAttention(SelfAttention(8, 2), context=256, projected=4)) == 0
