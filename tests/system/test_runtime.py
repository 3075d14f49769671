"""The machine: seeds, precision, signals, memory."""

import importlib.util
import shutil
import signal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.torch_version import TorchVersion

from lmtrain.errors import LmtrainError
from lmtrain.system import runtime

NUMBER = st.integers(0, 2**31 - 1)


@given(NUMBER, NUMBER, st.integers(0, 1000))
def test_step_seeds_differ_wherever_one_of_their_parts_does(seed: int, step: int, micro: int) -> None:
    own = runtime.step_seed(seed, step, micro)
    others = {
        runtime.step_seed(seed + 1, step, micro),
        runtime.step_seed(seed, step + 1, micro),
        runtime.step_seed(seed, step, micro + 1),
    }
    assert 0 <= own < 2**63
    assert len(others | {own}) == 4


def test_step_seeds_do_not_change_between_versions() -> None:
    assert [runtime.step_seed(1, step, micro) for step, micro in ((0, 0), (0, 1), (1, 0))] == [
        6396520470166291297,
        3903436636966207257,
        3150992677718134148,
    ]


def test_precision_follows_the_hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    for flags, expected in (({"avx512_bf16"}, "bf16"), ({"avx2", "f16c"}, "fp32")):
        monkeypatch.setattr(runtime, "_cpu_flags", lambda flags=flags: frozenset(flags))
        assert runtime.choose_precision("auto", cpu) == expected
        assert runtime.choose_precision("fp32", cpu) == "fp32"
    for capability, expected in (((7, 5), "fp16"), ((8, 0), "bf16"), ((9, 0), "bf16")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, have=capability: have)
        assert runtime.choose_precision("auto", cuda) == expected


def test_a_missing_device_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert runtime.choose_device("auto").type == "cpu"
    with pytest.raises(LmtrainError, match="use cpu or auto in place of cuda"):
        runtime.choose_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert [runtime.choose_device(name).type for name in ("auto", "cuda", "cpu")] == ["cuda", "cuda", "cpu"]


def test_what_is_lacking_to_compile_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    found: set[str] = {"g++"}
    triton: list[object] = []
    monkeypatch.setattr(shutil, "which", lambda name: name if name in found else None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: next(iter(triton), None))
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.12.1+cpu"))
    assert str(runtime.lacks_to_compile(cpu)).startswith("PyTorch 2.13 (what 2.12.1+cpu compiles")
    assert runtime.lacks_to_compile(cuda) == "C compiler"
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.13.0"))
    assert (runtime.lacks_to_compile(cpu), runtime.lacks_to_compile(cuda)) == (None, "C compiler")
    found = {"clang"}
    assert (runtime.lacks_to_compile(cpu), runtime.lacks_to_compile(cuda)) == ("C++ compiler", "Triton")
    triton.append(object())
    assert runtime.lacks_to_compile(cuda) is None
    monkeypatch.setenv("CC", "mycc")
    found = {"mycc"}
    assert runtime.lacks_to_compile(cuda) is None


def test_signals_are_noted_once_and_a_second_ctrl_c_interrupts() -> None:
    former = signal.getsignal(signal.SIGINT)
    with runtime.interrupts() as asked:
        names = [asked.name]
        signal.raise_signal(signal.SIGTERM)
        names.append(asked.name)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert names == [None, "SIGTERM"]
    assert signal.getsignal(signal.SIGINT) is former


def test_the_peak_is_that_of_a_matrix_product() -> None:
    assert 1e8 < runtime.peak_flops(torch.device("cpu"), "fp32") < 1e14


def test_memory_grows_with_what_is_held() -> None:
    before = runtime.memory_bytes(torch.device("cpu"))
    held = torch.ones(300 << 20, dtype=torch.uint8)
    assert runtime.memory_bytes(torch.device("cpu")) >= max(before, held.numel())


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."),
    ],
)
def test_the_end_of_memory_is_a_sentence_with_the_remedy(error: BaseException) -> None:
    with pytest.raises(LmtrainError, match="out of memory: buy more"), runtime.enough_memory("buy more"):
        raise error
    with pytest.raises(RuntimeError, match="something else"), runtime.enough_memory("buy more"):
        raise RuntimeError("something else")


def test_a_real_allocation_that_fails_on_the_cpu() -> None:
    with pytest.raises(LmtrainError, match="out of memory"), runtime.enough_memory("buy more"):
        torch.empty(1 << 60, dtype=torch.uint8)
