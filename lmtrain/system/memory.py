"""Memory: the peak so far, what the machine has, and the error message when it is exhausted."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lmtrain.errors import LmtrainError


def memory_bytes(device: torch.device) -> int:
    """Return the peak memory so far: that of the process on a CPU, or of PyTorch's allocator on a CUDA device."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def installed_bytes(device: torch.device) -> int:
    """Return the size of the memory of the machine or the CUDA device, in use or not."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def explain_out_of_memory(remedy: str) -> Iterator[None]:
    """Turn an error that PyTorch or Python raises when memory is exhausted into LmtrainError with this remedy."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        # PyTorch's CPU allocator raises a plain RuntimeError.
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
            raise
        raise LmtrainError(f"out of memory: {remedy}") from error
