"""Device and precision, what compiling needs, signals, memory, the measured peak, the log."""

import errno
import importlib.util
import io
import itertools
import logging
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from torch.torch_version import TorchVersion

from lmtrain.errors import LmtrainError
from lmtrain.system import device as devices
from lmtrain.system import distributed
from lmtrain.system.device import choose_device, choose_precision, missing_to_compile
from lmtrain.system.machine import explain_out_of_memory, peak_flops
from lmtrain.system.messages import log, log_level
from lmtrain.system.process_group import ProcessGroup
from lmtrain.system.signals import catch_stop_signals
from tests.helpers import CPU


def test_precision_follows_the_hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    for flags, expected in (("fpu avx512_bf16", "bf16"), ("avx2 f16c", "fp32")):
        monkeypatch.setattr(devices, "cpu_info", lambda *names, flags=flags: flags)
        assert choose_precision("auto", CPU) == expected
        assert choose_precision("fp32", CPU) == "fp32"
    for capability, expected in (((7, 5), "fp16"), ((8, 0), "bf16"), ((9, 0), "bf16")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, have=capability: have)
        assert choose_precision("auto", cuda) == expected


def test_a_missing_device_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto").type == "cpu"
    with pytest.raises(LmtrainError, match="use cpu or auto in place of cuda"):
        choose_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    torch.backends.cuda.enable_cudnn_sdp(True)
    assert [choose_device(name).type for name in ("auto", "cuda", "cpu")] == ["cuda", "cuda", "cpu"]
    assert not torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]


def test_what_compiling_lacks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    found: set[str] = {"g++"}
    (tmp_path / "include").mkdir()
    (tmp_path / "include/Python.h").touch()
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / name))
    triton: list[object] = []
    monkeypatch.setattr(shutil, "which", lambda name: name if name in found else None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: next(iter(triton), None))
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.12.1+cpu"))
    assert str(missing_to_compile(CPU)).startswith("PyTorch 2.13 or newer for a CPU (this is 2.12.1+cpu")
    assert missing_to_compile(cuda) == "a C compiler"
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.13.0"))
    assert (missing_to_compile(CPU), missing_to_compile(cuda)) == (None, "a C compiler")
    with monkeypatch.context() as patch:
        patch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
        assert str(missing_to_compile(CPU)).startswith("Python's headers")
        found = {"clang"}
        assert str(missing_to_compile(cuda)).startswith("Python's headers")
    assert missing_to_compile(CPU) == "g++, or another C++ compiler that CXX names"
    assert missing_to_compile(cuda) == "Triton"
    triton.append(object())
    assert missing_to_compile(cuda) is None
    monkeypatch.setenv("CC", "mycc")
    found = {"mycc"}
    assert missing_to_compile(cuda) is None


def test_the_first_signal_is_recorded_and_a_second_ctrl_c_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "_exit", Mock(side_effect=KeyboardInterrupt))
    previous = signal.getsignal(signal.SIGINT)
    with catch_stop_signals(ProcessGroup()) as stop:
        stop.check()
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.raise_signal(number)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            stop.check()
    assert signal.getsignal(signal.SIGINT) is previous
    monkeypatch.setattr(ProcessGroup, "all_gather", lambda self, own: [own, True])  # that of another process
    with catch_stop_signals(ProcessGroup(1, 2)) as stop:
        with pytest.raises(KeyboardInterrupt):
            stop.check()
        assert not stop.received  # so that its own first SIGINT is not taken for a second one


def test_a_hangup_stays_ignored_as_by_nohup() -> None:
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with catch_stop_signals(ProcessGroup()):
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    signal.signal(signal.SIGHUP, previous)


def test_the_peak_is_that_of_a_matrix_product() -> None:
    assert 1e8 < peak_flops(CPU, "fp32") < 1e14


@pytest.mark.parametrize(
    "fail",
    [
        Mock(side_effect=MemoryError()),
        Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory")),
        Mock(side_effect=torch.AcceleratorError("CUDA error: out of memory", 2)),
        Mock(side_effect=RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")),
        Mock(side_effect=RuntimeError("InductorError: OutOfMemoryError: Tried to allocate 2.00 GiB")),
        lambda: torch.empty(1 << 60, dtype=torch.uint8),
    ],
)
def test_exhausted_memory_is_an_error_with_the_remedy(fail: Callable[[], object]) -> None:
    with pytest.raises(LmtrainError, match="out of memory: buy more"), explain_out_of_memory("buy more"):
        fail()


def test_other_errors_pass() -> None:
    with pytest.raises(RuntimeError, match="something else"), explain_out_of_memory("buy more"):
        raise RuntimeError("something else")


def test_a_message_that_nobody_can_read_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            tried.append(text)
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(sys, "stderr", Closed())
    log.warning("a message")
    log.warning("another")
    assert tried == ["a message", "another"]


def test_a_program_without_stderr_gets_no_messages(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    log.warning("a message")
    assert capsys.readouterr().out == ""


def test_a_level_that_is_set_before_the_first_import_is_kept() -> None:
    first = "import logging; logging.getLogger('lmtrain').setLevel('WARNING')"
    then = "from lmtrain.system.messages import log; log.info('an info'); log.warning('a warning')"
    done = subprocess.run([sys.executable, "-c", f"{first}; {then}"], check=True, capture_output=True)
    assert done.stderr == b"a warning\n"


def test_the_heap_is_retained() -> None:
    code = (
        "from lmtrain.system.allocator import retain_heap; import resource, sys\n"
        "if sys.argv[1] == 'retained': retain_heap()\n"
        "for _ in range(2): bytearray(b'x') * (64 << 20)\n"  # the first time the memory is new
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "bytearray(b'x') * (64 << 20)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)"
    )
    faults = {
        form: int(subprocess.run([sys.executable, "-c", code, form], check=True, capture_output=True).stdout)
        for form in ("retained", "default")
    }
    assert faults["retained"] < 10 < faults["default"]


@pytest.mark.parametrize(
    ("flops", "waits", "size"),
    [(1e11, 0.0, 1536), (1e11, 0.02, 1536), (1e10, 0.02, 768), (1e9, 0.0, 384), (1e8, 0.0, 192)],
)
def test_the_peak_is_that_of_the_fastest_product_of_a_size_that_does_not_take_long(
    monkeypatch: pytest.MonkeyPatch, flops: float, waits: float, size: int
) -> None:
    """On machines of different speeds; on a busy one each product also waits for its threads."""
    clock = SimpleNamespace(seconds=0.0, calls=0, slower=itertools.cycle([2, 3, 1, 1.5]))

    def product(left: torch.Tensor, _: torch.Tensor) -> None:
        clock.calls += len(left) == size
        clock.seconds += next(clock.slower) * (waits + 2 * len(left) ** 3 / flops)

    monkeypatch.setattr("lmtrain.system.machine.time", SimpleNamespace(perf_counter=lambda: clock.seconds))
    monkeypatch.setattr(torch, "mm", product)
    found = peak_flops(CPU, "fp32")
    assert found == pytest.approx(2 * size**3 / (waits + 2 * size**3 / flops))
    assert clock.seconds < 3.0
    assert clock.calls == 1 + 4


def test_messages_are_not_repeated_by_the_root_logger(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.StreamHandler(sys.stderr)])
    log.warning("once")
    assert capsys.readouterr().err == "once\n"


def test_a_level_inside_another_does_not_lower_it(capsys: pytest.CaptureFixture[str]) -> None:
    with log_level(logging.ERROR), log_level(logging.WARNING):
        log.warning("a warning")
    assert capsys.readouterr().err == ""


def test_bf16_of_an_arm_processor_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda path: "processor\t: 0\nFeatures\t: fp asimd bf16\n")
    assert choose_precision("auto", CPU) == "bf16"


def test_each_process_of_a_node_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setenv("LOCAL_RANK", "1")
    distributed._set_cuda_device()
    assert chosen == [1]
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(LmtrainError, match="has 2: start 2 processes per node"):
        distributed._set_cuda_device()
