"""Packed weights against the same arithmetic written out, and whole models against autocast."""

import pytest
import torch
from torch import Tensor, nn

from lmtrain.model.build import FINAL_GAIN
from lmtrain.model.decoding_state import DecodingState
from lmtrain.model.language_model import LanguageModel
from lmtrain.model.packing import (
    PREPACKED,
    PREPACKED_BF16,
    FusedSelfAttention,
    PackedLinear,
    PackedNorm,
    pack_for_decoding,
)
from lmtrain.nn.attention import SelfAttention
from lmtrain.nn.key_reduction import Compression
from lmtrain.nn.positions import rotate, rotation
from tests.model.models import VARIANTS, WINDOWED_VARIANTS, build, tokens


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("prepacked", [False, True])
def test_narrow_equals_autocast(
    bias: bool, dtype: torch.dtype, prepacked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepacked = prepacked and PREPACKED_BF16
    monkeypatch.setattr("lmtrain.model.packing.PREPACKED_BF16", prepacked)
    torch.manual_seed(0)
    layer, x = nn.Linear(96, 40, bias=bias), torch.randn(2, 5, 96)
    packed = PackedLinear(layer.weight, layer.bias if bias else None, dtype)
    assert packed.prepacked == (prepacked and dtype == torch.bfloat16)
    with torch.autocast("cpu", dtype):
        expected = layer(x)
    result = packed(x)
    assert result.dtype == x.dtype
    products = x.to(dtype).double() @ layer.weight.to(dtype).double().T
    exact = products + packed.bias.double() if packed.bias is not None else products
    torch.testing.assert_close(result.double(), exact, atol=4e-3, rtol=1e-2)
    torch.testing.assert_close(result, expected.float(), atol=4e-3, rtol=1e-2)


@pytest.mark.parametrize("shape", [(96,), (1, 96), (1, 1, 96), (5, 96), (2, 3, 96)])
@pytest.mark.parametrize("bias", [False, True])
def test_prepacked_float32_equals_the_plain_product(
    shape: tuple[int, ...], bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmtrain.model.packing.PREPACKED_FP32", PREPACKED)
    torch.manual_seed(0)
    layer, x = nn.Linear(96, 40, bias=bias), torch.randn(shape)
    packed = PackedLinear(layer.weight, layer.bias if bias else None, torch.float32)
    torch.testing.assert_close(packed(x), layer(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize("shape", [(40,), (3, 40)])
def test_packed_norm_is_its_formula(shape: tuple[int, ...], scale: float) -> None:
    torch.manual_seed(0)
    gain, x = torch.randn(shape), torch.randn(2, 3, 40) * scale
    expected = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * gain.double()
    torch.testing.assert_close(PackedNorm(gain)(x), expected.float(), atol=1e-6, rtol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("qk_norm", [True, False])
@pytest.mark.parametrize("rotated", [True, False])
def test_fused_queries_and_keys_have_the_same_products(qk_norm: bool, rotated: bool) -> None:
    torch.manual_seed(0)
    layer, x, by = SelfAttention(24, 3, qk_norm=qk_norm), torch.randn(2, 5, 24), rotation(torch.arange(5), 8)
    if qk_norm:
        for gain in (*layer.query_norm.parameters(), *layer.key_norm.parameters()):
            nn.init.normal_(gain)
    query, key, value = (part(x).view(2, 5, 3, 8) for part in (layer.query, layer.key, layer.value))
    query, key, value = (part.transpose(1, 2) for part in (layer.query_norm(query), layer.key_norm(key), value))
    if rotated:
        query, key = rotate(query, by), rotate(key, by)
    found = FusedSelfAttention(layer, torch.float32).project(x, by if rotated else None)
    torch.testing.assert_close(found[0] @ found[1].mT, query @ key.mT, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found[2], value, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_the_cache_of_narrow_weights_is_narrow() -> None:
    model = build(dim=32)
    pack_for_decoding(model, "bf16")
    _, state = model.start(tokens(2, 7))
    assert isinstance(state, DecodingState)
    assert {tensor.dtype for cache in state.caches for tensor in (cache.key, cache.value)} == {torch.bfloat16}


def follow(model: LanguageModel, text: Tensor) -> Tensor:
    """log p of every next token (T, B, V), step by step."""
    log_probs, state = model.start(text[:, :3])
    found = [log_probs]
    for t in range(3, text.shape[1]):
        log_probs, state = model.step(state, text[:, t])
        found.append(log_probs.clone())
    return torch.stack(found)


OTHERS: list[dict[str, object]] = [{"pool_query": "seed"}, {"tie_embeddings": False}, {"embed_dim": 8}]


@pytest.mark.parametrize(
    ("fields", "weights"),
    [*((fields, "bf16") for fields in (*VARIANTS, *WINDOWED_VARIANTS, *OTHERS)), (VARIANTS[0], "fp16")],
    ids=str,
)
def test_a_packed_model_is_close_to_the_plain_one(fields: dict[str, object], weights: str) -> None:
    model, text = build(dim=32, **{k: v for k, v in fields.items() if k != "dim"}), tokens(2, 30)
    expected = follow(model, text)
    pack_for_decoding(model, weights)
    found = follow(model, text)
    assert found.dtype == torch.float32
    assert not torch.equal(found, expected)
    torch.testing.assert_close(found, expected, atol=0.06 * FINAL_GAIN, rtol=0.05)


@pytest.mark.parametrize("fields", [*VARIANTS, *WINDOWED_VARIANTS, *OTHERS], ids=str)
def test_float32_stays_exact(fields: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmtrain.model.packing.PREPACKED_FP32", PREPACKED)
    monkeypatch.setattr("lmtrain.model.packing.MIN_PREPACKED", 100)
    model, text = build(**{"copy": True, "dropout": 0.1, **fields, "dim": 32}), tokens(2, 30)
    for layer in model.modules():
        if isinstance(layer, Compression):  # the identity at first, which hides the order of its features
            nn.init.normal_(layer.weight, std=0.2)
    expected = follow(model, text)
    pack_for_decoding(model, "fp32")
    assert sum(isinstance(module, PackedLinear) for module in model.modules()) > 10
    torch.testing.assert_close(follow(model, text), expected, atol=1e-5, rtol=1e-5)


def test_every_matrix_is_packed_and_small_ones_of_float32_stay() -> None:
    model = build(copy=True, qk_norm=True, output="adaptive")
    pack_for_decoding(model, "fp32")
    assert not any(isinstance(module, PackedLinear) for module in model.modules())
    model = build(copy=True, qk_norm=True, output="adaptive")
    pack_for_decoding(model, "bf16")
    assert [name for name, module in model.named_modules() if isinstance(module, nn.Linear)] == ["pool.key"]
