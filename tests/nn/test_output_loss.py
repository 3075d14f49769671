"""The loss, whole and in chunks, against F.cross_entropy: values, gradients, precision, memory, whole models."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lmtrain.config.schema import ModelConfig
from lmtrain.model.build import build_model
from lmtrain.model.language_model import LanguageModel
from lmtrain.nn.chunked_loss import _backward_chunks, _forward_chunks, linear_cross_entropy
from lmtrain.nn.output_loss import MAX_LOGIT_BYTES, Chunk, aligned, rows_at_once, target_nats
from tests.nn.measuring import assert_near, largest_tensor

VOCABULARY = 230
Case = tuple[Tensor, Tensor, Tensor, Tensor]
"""hidden, weight, bias, targets"""


def case(rows: int, width: int, classes: int, scale: float = 1.0) -> Case:
    generator = torch.Generator().manual_seed(rows)
    hidden = torch.randn(rows, width, generator=generator, dtype=torch.float64)
    weight = torch.randn(classes, width, generator=generator, dtype=torch.float64) * scale
    bias = torch.randn(classes, generator=generator, dtype=torch.float64)
    return hidden, weight, bias, torch.randint(classes, (rows,), generator=generator)


def plain(hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Tensor:
    """All logits at once, the bias added in float32, as `LanguageModel` does."""
    logits = F.linear(hidden, weight)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits + bias, targets, reduction="none")


def results(loss: Any, inputs: Case, dtype: torch.dtype, *args: int | None, factor: float = 1.0) -> list[Tensor]:
    """Nats, and the gradients of hidden, weight and bias, each row of the loss weighted differently."""
    *leaves, targets = (x.to(dtype).requires_grad_() if x.is_floating_point() else x for x in inputs)
    nats = loss(*leaves, targets, *args)
    weights = torch.linspace(-1, 2, len(targets), dtype=nats.dtype) * factor
    return [nats.detach(), *torch.autograd.grad((nats * weights).sum(), leaves)]


CHUNKS: list[tuple[int, int | None]] = [(0, 2), (1, 1), (6, 6), (6, 100), (6, 2), (7, 3), (8, 7), (5, 1)]
WHOLE: list[tuple[int, int | None]] = [(0, None), (1, None), (6, None)]


def our_loss(hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, at_once: int | None) -> Tensor:
    """In chunks, even where one holds all, or whole."""
    if at_once is None:
        return target_nats(hidden, weight, bias, targets, None)
    return linear_cross_entropy(hidden, weight, bias, targets, at_once)


@pytest.mark.parametrize(("rows", "at_once"), [*CHUNKS, *WHOLE])
def test_further_classes_of_an_aligned_weight_change_nothing(rows: int, at_once: int | None) -> None:
    def padded(hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Tensor:
        weight, bias = aligned(weight, bias)
        assert len(weight) == len(bias) == 16
        return our_loss(hidden, weight, bias, targets, at_once)

    inputs = case(rows, 5, 11)
    for found, expected in zip(
        results(padded, inputs, torch.float64), results(our_loss, inputs, torch.float64, at_once), strict=True
    ):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("rows", "at_once"), [*CHUNKS, *WHOLE])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-6)])
def test_equal_to_the_plain_loss(rows: int, at_once: int | None, dtype: torch.dtype, tolerance: float) -> None:
    inputs = case(rows, 5, 11)
    assert_near(results(our_loss, inputs, dtype, at_once), results(plain, inputs, dtype), tolerance)
    hidden, weight, bias, targets = inputs
    inputs = hidden, weight, bias, torch.full_like(targets, 4)
    assert_near(results(our_loss, inputs, dtype, at_once), results(plain, inputs, dtype), tolerance)


def test_a_second_derivative_is_an_error() -> None:
    """And not a wrong number."""
    hidden, weight, bias, targets = case(6, 5, 11)
    nats = target_nats(hidden.requires_grad_(), weight.requires_grad_(), bias, targets, None)
    (gradient,) = torch.autograd.grad(nats.square().sum(), weight, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("at_once", [4, None])
def test_logits_of_ten_thousand_are_exact(at_once: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.eye(6, dtype=torch.float64)
    weight = torch.randint(-1, 2, (12, 6), generator=generator) * 1e4
    weight[1], weight[0] = 1e4, 1e4 - 1  # two that share all probability, and differ by one in 10,000
    inputs = hidden, weight, torch.zeros(12, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1, 0])
    found = results(our_loss, inputs, torch.float32, at_once)
    assert all(tensor.isfinite().all() for tensor in found)
    assert_near([tensor.double() for tensor in found], results(plain, inputs, torch.float64), 1e-6)


def test_fp16_has_the_gradients_of_more_equal_classes_than_its_largest_number() -> None:
    inputs = torch.zeros(2, 1), torch.zeros(70_000, 1), torch.zeros(70_000), torch.tensor([0, 1])
    with torch.autocast("cpu", torch.float16):
        found = results(our_loss, inputs, torch.float32, None)
    assert_near(found, results(plain, inputs, torch.float32), 1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("at_once", [3, 16, 64, None])
def test_under_autocast_as_near_to_the_truth_as_the_plain_loss(dtype: torch.dtype, at_once: int | None) -> None:
    inputs = case(64, 32, 300, scale=0.3)
    scaling = {"factor": 2.0**10 if dtype == torch.float16 else 1.0}
    truth = results(plain, inputs, torch.float64, **scaling)
    with torch.autocast("cpu", dtype):
        found = results(our_loss, inputs, torch.float32, at_once, **scaling)
        others = results(plain, inputs, torch.float32, **scaling)
    slack = [0.0, 0.0, 0.0, 2**-8 if at_once is None else 0.0]  # a product makes the bias's gradient of the whole loss
    for ours, theirs, true, more in zip(found, others, truth, slack, strict=True):
        assert ours.dtype == theirs.dtype == torch.float32
        assert (theirs - true).norm() > 1e-5 * true.norm()  # autocast is on
        assert (ours - true).norm() <= 1.1 * (theirs - true).norm() + more * true.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_more_logits_than_those_of_a_chunk_exist(dtype: torch.dtype) -> None:
    hidden, weight, bias = (tensor.float() for tensor in case(64, 8, 50)[:3])
    targets = case(64, 8, 50)[3]
    with largest_tensor() as sizes:  # which is not called inside the operators made of these two
        nats = _forward_chunks(hidden, weight, bias, targets, [], 11, dtype)
        _backward_chunks(torch.ones_like(nats), hidden, weight, bias, targets, [], 11, dtype)
    assert sizes.largest == 11 * 50
    with largest_tensor() as sizes:
        results(plain, case(64, 8, 50), torch.float32)
    assert sizes.largest == 64 * 50


def model(**fields: object) -> LanguageModel:
    torch.manual_seed(0)
    values = {"context": 12, "dim": 8, "layers": 1, "heads": 2, "ff_dim": 16} | fields
    return build_model(ModelConfig.model_validate(values), VOCABULARY)


def trained(model: LanguageModel, chunk: Chunk, call: Any = None) -> list[Tensor]:
    """Nats and the gradients of all parameters."""
    model.loss_chunk = chunk
    generator = torch.Generator().manual_seed(1)
    inputs, targets = torch.randint(VOCABULARY, (2, 3, 12), generator=generator)
    targets = targets[:, -model.config.targets :]
    nats = (model if call is None else call)(inputs, targets)
    return [nats.detach(), *torch.autograd.grad(nats.sum(), list(model.parameters()), materialize_grads=True)]


@pytest.mark.parametrize("mode", ["causal", "windowed"])
@pytest.mark.parametrize("fields", [{}, {"copy": True}, {"tie_embeddings": False, "embed_dim": 6}], ids=str)
def test_a_model_has_the_same_loss_and_gradients(mode: str, fields: dict[str, object]) -> None:
    plain_model = model(mode=mode, **fields)
    with largest_tensor() as sizes:
        found = trained(plain_model, 2)
    assert sizes.largest < 36 * VOCABULARY or mode == "windowed"
    assert_near(found, trained(plain_model, None), 1e-5)
    with torch.no_grad():
        plain_model.loss_chunk = 2
        text = torch.arange(12).view(2, 6)
        targets = text[:, -plain_model.config.targets :]
        expected = -plain_model.predict(text).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        torch.testing.assert_close(plain_model(text, targets), expected)


def test_a_compiled_model_with_chunks_is_one_graph_and_equal() -> None:
    plain_model = model(layers=0)
    compiled = torch.compile(plain_model, dynamic=False, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        assert_near(trained(plain_model, 10, compiled), trained(plain_model, 10), 2e-2)


@pytest.mark.parametrize(
    ("chunk", "rows", "wanted"),
    [
        (None, 10**6, 10**6),
        (7, 8, 7),
        (7, 7, 7),
        (7, 6, 6),
        ("auto", MAX_LOGIT_BYTES // 400, MAX_LOGIT_BYTES // 400),
        ("auto", MAX_LOGIT_BYTES // 400 + 1, -(-MAX_LOGIT_BYTES // 6400)),
    ],
)
def test_the_rows_at_once_keep_the_logits_within_a_limit(chunk: Chunk, rows: int, wanted: int) -> None:
    assert rows_at_once(chunk, rows, 100) == wanted
    assert rows_at_once("auto", 4096, 10**6) == 512
