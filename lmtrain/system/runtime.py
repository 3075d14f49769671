"""The machine: device, precision, threads, seeds, signals."""

import importlib.util
import os
import platform
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from lmtrain.errors import LmtrainError

NATIVE_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})


def choose_device(name: str) -> torch.device:
    """The device for `auto`, `cpu` or `cuda`. Raises LmtrainError where CUDA is asked for and absent."""
    if name == "cuda" and not torch.cuda.is_available():
        raise LmtrainError("PyTorch sees no CUDA device: use cpu or auto in place of cuda (train.device or --device)")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def choose_precision(name: str, device: torch.device) -> str:
    """`fp32`, `bf16` or `fp16` for a configured precision; `auto` takes bf16 only where the hardware computes in it,
    else fp16 on a GPU and fp32 on a CPU.

    Emulated bf16 is slower than float32, so capability is read from the hardware and not from what PyTorch can run.
    """
    if name != "auto":
        return name
    if device.type == "cuda":
        return "bf16" if torch.cuda.get_device_capability(device) >= (8, 0) else "fp16"
    return "bf16" if NATIVE_BF16_FLAGS & _cpu_flags() else "fp32"


def _cpu_flags() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    flags = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    return frozenset(flags.partition(":")[2].split())


def autocast(device: torch.device, precision: str) -> AbstractContextManager[Any]:
    """The context in which the forward pass runs at `precision`."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16 if precision == "bf16" else torch.float16)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A CPU tensor's copy on the device; the host does not wait for it, nor for what the device still has to do."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def set_threads(count: int | None) -> None:
    """Use `count` CPU threads; None = PyTorch's own choice."""
    if count is not None:
        torch.set_num_threads(count)


def step_seed(seed: int, step: int, micro: int) -> int:
    """The seed of the random numbers of one micro-batch: a function of its place alone, so a resume needs no state.

    SplitMix64's finaliser (Steele et al. 2014) over the three numbers.
    """
    mixed = 0
    for part in (seed, step, micro):
        mixed = (mixed ^ part) + 0x9E3779B97F4A7C15 & (1 << 64) - 1
        mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & (1 << 64) - 1
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & (1 << 64) - 1
        mixed ^= mixed >> 31
    return mixed >> 1


def lacks_to_compile(device: torch.device) -> str | None:
    """What torch.compile would need and can't find here: a C++ compiler, or for CUDA a C compiler and Triton.

    For a CPU also PyTorch 2.13: a maximum over a transposed matrix of few rows, as in the pool, is compiled by older
    ones to code that writes past the end of its result, and may end the process.
    """
    cuda = device.type == "cuda"
    if not cuda and torch.__version__ < "2.13":
        return f"PyTorch 2.13 (what {torch.__version__} compiles for a CPU can crash)"
    names = (os.environ.get("CC") or "gcc", "clang") if cuda else (os.environ.get("CXX") or "g++", "c++", "clang++")
    if not any(shutil.which(name) for name in names):
        return f"{'C' if cuda else 'C++'} compiler"
    return "Triton" if cuda and importlib.util.find_spec("triton") is None else None


def peak_flops(device: torch.device, precision: str) -> float:
    """Floating-point operations a second of a large matrix product at `precision`, measured now, in about 0.2 s."""
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    size, runs = (8192, 10) if device.type == "cuda" else (1536, 4)
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    best = float("inf")
    for _ in range(runs):
        synchronize(device)
        start = time.perf_counter()
        torch.mm(left, right)
        synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2.0 * size**3 / best


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def memory_bytes(device: torch.device) -> int:
    """Peak memory so far: of the process on a CPU, of PyTorch's allocator on a CUDA device."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if platform.system() == "Darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def machine(device: torch.device) -> dict[str, Any]:
    """What a measured figure must carry: processor, device, threads, versions."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "system": f"{platform.system()} {platform.machine()}",
        "python": sys.version.split()[0],
        "torch": torch.__version__,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


@contextmanager
def enough_memory(remedy: str) -> Iterator[None]:
    """Turn what PyTorch and Python say when memory ends, on a CPU or a GPU, into LmtrainError with this remedy."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        # PyTorch's CPU allocator has no class of its own for it.
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
            raise
        raise LmtrainError(f"out of memory: {remedy}") from error


class Interrupted(Exception):  # noqa: N818 -- it is no error
    """Raised by `Interrupts.check`."""


def _raise_interrupt() -> None:
    raise KeyboardInterrupt


class Interrupts:
    """Asks of the outside world that the run should end: read `name` between steps, `check` inside longer work.

    The first signal only sets `name`; a Ctrl-C after it calls `abort`. `agree` gives the largest of
    the numbers that the processes of a run give it, so that all of them end at one `check`.
    """

    def __init__(self, agree: Callable[[int], int] = int, abort: Callable[[], object] = _raise_interrupt) -> None:
        self.name: str | None = None
        self._agree = agree
        self._abort = abort

    def handle(self, number: int, _frame: FrameType | None) -> None:
        """Note the signal; a Ctrl-C that is not the first signal ends the run at once."""
        if self.name is not None and number == signal.SIGINT:
            self._abort()
        self.name = signal.Signals(number).name

    def check(self, _count: int = 0) -> None:
        """Raise Interrupted if a signal has come, to whichever process."""
        number = self._agree(signal.Signals[self.name] if self.name is not None else 0)
        if number:
            self.name = signal.Signals(number).name
            raise Interrupted(self.name)


@contextmanager
def interrupts(
    agree: Callable[[int], int] = int, abort: Callable[[], object] = _raise_interrupt
) -> Iterator[Interrupts]:
    """Catch SIGINT, SIGTERM and SIGUSR1 for the length of the block; the former handlers come back after it."""
    caught = Interrupts(agree, abort)
    numbers = [signal.SIGINT, signal.SIGTERM, *([signal.SIGUSR1] if hasattr(signal, "SIGUSR1") else [])]
    former = {number: signal.signal(number, caught.handle) for number in numbers}
    try:
        yield caught
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
