"""The machine: facts to record with a measurement, its peak in a matrix product, and its memory."""

import platform
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lmtrain.errors import LmtrainError
from lmtrain.system.device import DTYPES, cores, cpu_info, synchronize


def machine(device: torch.device) -> dict[str, Any]:
    """Return the facts to record with a measurement: processor, device, threads, versions."""
    return {
        "processor": cpu_info("model name") or platform.machine(),
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "system": f"{platform.system()} {platform.machine()}",
        "python": sys.version.split()[0],
        "torch": torch.__version__,
    }


MAX_PRODUCT_SECONDS = 0.5
"""Seconds. A product that would probably take longer is not tried."""


def peak_flops(device: torch.device, precision: str) -> float:
    """Measure the floating-point operations per second of a large matrix product at `precision`, in about half a
    second.

    The size doubles until the next product would take too long, as in bf16 on a processor without its instructions. A
    small product alone says little: on a busy CPU it waits for threads far longer than it computes.
    """
    largest, runs = (8192, 10) if device.type == "cuda" else (1536, 4)
    for size in (largest // 8, largest // 4, largest // 2, largest):
        left, right = (torch.randn(size, size, device=device).to(DTYPES[precision]) for _ in range(2))
        torch.mm(left, right)  # the first one loads libraries, on a GPU for up to a second
        best = float("inf")
        for _ in range(runs):
            synchronize(device)
            start = time.perf_counter()
            torch.mm(left, right)
            synchronize(device)
            best = min(best, time.perf_counter() - start)
        if 2**3 * best > MAX_PRODUCT_SECONDS:
            break
    return 2.0 * size**3 / best


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory so far: that of the process on a CPU, or what PyTorch's allocator held on a CUDA device.

    On CUDA that is what it had reserved: what replayed CUDA graphs use is not counted as allocated.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@contextmanager
def explain_out_of_memory(remedy: str) -> Iterator[None]:
    """Turn an error that PyTorch or Python raises when memory is exhausted into LmtrainError with this remedy.

    PyTorch's CPU allocator raises a plain RuntimeError; CUDA's libraries, and the compiler, errors of their own.
    """
    messages = "can't allocate memory", "out of memory", "OutOfMemoryError", "CUBLAS_STATUS_ALLOC_FAILED"
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        exhausted = isinstance(error, MemoryError | torch.OutOfMemoryError)
        if not exhausted and not any(message in str(error) for message in messages):
            raise
        raise LmtrainError(f"out of memory: {remedy}") from error
