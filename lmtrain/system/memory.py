"""Memory: the peak so far, and the message for an allocation that fails."""

import platform
import resource
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lmtrain.errors import LmtrainError


def memory_bytes(device: torch.device) -> int:
    """Peak memory so far: of the process on a CPU, of PyTorch's allocator on a CUDA device."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if platform.system() == "Darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@contextmanager
def enough_memory(remedy: str) -> Iterator[None]:
    """Turn the errors that PyTorch and Python raise when memory is exhausted into LmtrainError with this remedy."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        # PyTorch's CPU allocator raises a plain RuntimeError.
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
            raise
        raise LmtrainError(f"out of memory: {remedy}") from error
