"""torch.compile: when it is used, that it changes nothing but speed, and what happens if it fails."""

import re
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lmtrain.config.schema import Config
from lmtrain.data.tokens import TokenStore
from lmtrain.errors import LmtrainError
from lmtrain.model.language_model import LanguageModel
from lmtrain.training.compilation import _can_be_captured, _is_long, blank_batch
from lmtrain.training.schedule import Budget, sample_order
from tests.helpers import CPU, choices, compiles
from tests.training.helpers import change, start, take_step, without_dropout

LOCAL = {"model__context": 320, "model__attention": "local", "model__attention_window": 64}
"""Windows of the attention that are read without what is outside them."""


@compiles
def test_the_compiled_model_trains_like_the_plain_one(tiny: Config, notes: list[str]) -> None:
    losses = []
    for wanted in (False, "auto", True):
        state = start(change(without_dropout(tiny), train__compile=wanted))
        losses.append([float(take_step(state, 1e-2)[0]) for _ in range(3)])
    assert len(notes) == 1, "auto must not compile so short a run"
    assert losses[0] == losses[1]
    assert losses[2] == pytest.approx(losses[0], rel=1e-4)


@pytest.mark.parametrize("mode", choices("model.mode"))
def test_a_blank_batch_of_one_row_is_compiled_as_a_real_one(tiny: Config, store: TokenStore, mode: str) -> None:
    config = change(tiny, model__mode=mode)
    batch = sample_order(config, store).batch(store.split("train").ids, 0, 1)
    for blank, real in zip(blank_batch(config.model, 1, CPU), batch, strict=True):
        assert (blank.shape, blank.stride(), blank.dtype) == (real.shape, real.stride(), real.dtype)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("precision", "fields"),
    [
        ("fp32", {}),
        ("bf16", {}),
        ("fp16", {}),
        ("bf16", {"train__loss_chunk": 16}),
        ("bf16", {"model__copy": True, "model__token_shift": True, **LOCAL}),
    ],
    ids=str,
)
def test_a_captured_step_trains_like_the_plain_one(tiny: Config, precision: str, fields: dict[str, Any]) -> None:
    losses = []
    counters = torch._dynamo.utils.counters
    counters.clear()
    for wanted in (False, True):
        on_cuda = {"train__device": "cuda", "train__precision": precision, "train__micro_batch": None}
        state = start(change(without_dropout(tiny), **on_cuda, **fields, train__compile=wanted))
        losses.append([float(take_step(state, 1e-3)[0]) for _ in range(5)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4 if precision == "fp32" else 1e-2)
    assert not counters["inductor"]["cudagraph_skips"], "the passes ran, but no graph was captured"


@pytest.mark.parametrize(
    ("fields", "allowed"),
    [
        ({}, True),
        ({"model__dropout": 0.1}, True),
        ({"model__attention_dropout": 0.1}, False),
        ({"model__attention": ["full", "local"], "model__layers": 2}, False),
        ({"model__position": "alibi"}, False),
    ],
)
def test_only_plain_attention_without_dropout_is_compiled_with_that_of_cudnn(
    tiny: Config, fields: dict[str, Any], allowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = list[bool]()
    keys = set[str]()

    def compiled(model: LanguageModel, **_options: Any) -> Callable[[Tensor, Tensor], Tensor]:
        def forward(inputs: Tensor, targets: Tensor) -> Tensor:
            found.append(torch.backends.cuda.cudnn_sdp_enabled())  # type: ignore[no-untyped-call]
            keys.add(torch.compiler.config.cache_key_tag)
            result: Tensor = model(inputs, targets)
            return result

        return forward

    monkeypatch.setattr(torch, "compile", compiled)
    monkeypatch.setattr("lmtrain.training.compilation.missing_to_compile", lambda device: None)
    torch.backends.cuda.enable_cudnn_sdp(False)
    state = start(change(without_dropout(tiny), train__compile=True, **fields))
    assert found == [allowed]
    # Otherwise what was compiled with the other kernels, for the same code, could come out of the compiler's cache.
    assert keys == {f"cudnn attention: {allowed}"}
    take_step(state, 1e-3)
    assert set(found[1:]) == {False}


@pytest.mark.parametrize(
    ("fields", "device", "expected"),
    [
        ({}, "cuda", True),
        ({}, "cpu", False),
        ({"train__micro_batch": 2}, "cuda", False),
        ({"train__activation_checkpointing": True}, "cuda", False),
        ({"model__output": "adaptive"}, "cuda", False),
    ],
)
def test_what_a_cuda_graph_may_capture(tiny: Config, fields: dict[str, Any], device: str, expected: bool) -> None:
    config = change(tiny, **{"train__micro_batch": 4, **fields})
    assert _can_be_captured(config, torch.device(device)) == expected


def test_only_a_run_of_three_minutes_is_compiled(tiny: Config) -> None:
    """By 6 operations for each of 21,269 parameters and 64 tokens of a step, at 3e11 a second."""
    model = start(tiny).model
    budgets = [Budget(6_500_000, None), Budget(6_700_000, None), Budget(None, 180.0), Budget(None, 181.0)]
    budgets += [Budget(6_700_000, 180.0), Budget(6_500_000, 181.0), Budget(6_700_000, 181.0)]
    found = [_is_long(model, tiny, budget, CPU) for budget in budgets]
    assert found == [False, True, False, True, False, False, True]


def failing(error: Exception, late: bool = False) -> Callable[..., Any]:
    """A `torch.compile` that fails in the first forward pass or, if `late`, in the first backward pass."""

    def fail(*_: object) -> Tensor:
        raise error

    def compiled(model: Callable[..., Tensor], **_: object) -> Callable[..., Tensor]:
        def forward(*inputs: Tensor) -> Tensor:
            nats = model(*inputs)
            nats.register_hook(fail)  # type: ignore[no-untyped-call]
            return nats

        return forward if late else fail

    return compiled


@pytest.fixture
def long_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` compiles every run."""
    monkeypatch.setattr("lmtrain.training.compilation.PAYS_AFTER_SECONDS", 0.0)
    monkeypatch.setattr("lmtrain.training.compilation.missing_to_compile", lambda device: None)


@pytest.mark.usefixtures("long_run")
@pytest.mark.parametrize(
    ("error", "reason", "late"),
    [
        (RuntimeError("no compiler\nmore"), "no compiler", False),
        (RuntimeError("backend='inductor' raised:\nCalledProcessError: gcc\n"), "CalledProcessError: gcc", True),
        (subprocess.CalledProcessError(1, "gcc"), "Command 'gcc' returned non-zero exit status 1.", False),
        (AssertionError(), "AssertionError", True),
    ],
)
def test_a_compiler_that_fails_is_a_note_or_with_compile_true_an_error(
    tiny: Config, monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str, late: bool, notes: list[str]
) -> None:
    monkeypatch.setattr(torch, "compile", failing(error, late))
    state = start(tiny)
    assert isinstance(state.forward, LanguageModel)
    assert notes[1:] == [f"not compiling the model, which only costs speed: torch.compile failed ({reason})"]
    assert all(parameter.grad is None for parameter in state.model.parameters())
    with pytest.raises(LmtrainError, match=rf"{re.escape(reason)}.*set train\.compile=false"):
        start(change(tiny, train__compile=True))


def test_a_missing_compiler_is_a_note_or_with_compile_true_an_error(
    tiny: Config, monkeypatch: pytest.MonkeyPatch, long_run: None, notes: list[str]
) -> None:
    monkeypatch.setattr("lmtrain.training.compilation.missing_to_compile", lambda device: "a C++ compiler")
    assert isinstance(start(tiny).forward, LanguageModel)
    assert notes == ["not compiling the model, which only costs speed: compiling needs a C++ compiler"]
    with pytest.raises(LmtrainError, match=r"train\.compile=true, but .* a C\+\+ compiler: set train\.compile=false"):
        start(change(tiny, train__compile=True))
