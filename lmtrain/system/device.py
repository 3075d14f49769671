"""Device, precision, CPU threads, and what torch.compile needs of the machine."""

import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path

import torch
from torch import Tensor

from lmtrain.errors import LmtrainError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""The dtypes of the precisions."""
NATIVE_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})


def choose_device(name: str) -> torch.device:
    """Return the device for `auto`, `cpu` or `cuda`, and disable cuDNN's attention kernels.

    Raises LmtrainError if CUDA is requested but not available.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise LmtrainError("PyTorch sees no CUDA device: use cpu or auto in place of cuda (train.device or --device)")
    # On Hopper PyTorch prefers cuDNN's attention, which rounds the dropout rate to a multiple of 1/16 (before 2.12;
    # pytorch/pytorch#174245), and may have gradients of NaN under a mask (as in 2.13; #196678). The compiled
    # training step of a model that has neither allows it.
    torch.backends.cuda.enable_cudnn_sdp(False)
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def cores() -> int:
    """Return how many CPU cores this process may use."""
    return len(os.sched_getaffinity(0))


def choose_precision(name: str, device: torch.device) -> str:
    """Return `fp32`, `bf16` or `fp16` for the precision `name`, which may be `auto`.

    `auto` is bf16 if the hardware supports it natively, else fp16 on a GPU and fp32 on a CPU. PyTorch can also emulate
    bf16, but that is slower than float32.
    """
    if name != "auto":
        return name
    if device.type == "cuda":
        return "bf16" if torch.cuda.get_device_capability(device) >= (8, 0) else "fp16"
    return "bf16" if NATIVE_BF16_FLAGS & {*cpu_info("flags", "Features").split()} else "fp32"


def cpu_info(*names: str) -> str:
    """Return the first entry of /proc/cpuinfo that has one of these names; "" if there is none."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(names)), "")


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """Return the context in which the forward pass runs at `precision`; with fp32 it overrules a caller's autocast."""
    dtype = None if precision == "fp32" else DTYPES[precision]
    return torch.autocast(device.type, dtype, enabled=dtype is not None)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to the device. On CUDA the copy is asynchronous, through pinned memory."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def synchronize(device: torch.device) -> None:
    """Wait until all work queued on the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def missing_to_compile(device: torch.device) -> str | None:
    """Return what torch.compile needs and this machine lacks, or None.

    It needs Python's headers. On a CPU it also needs a C++ compiler and PyTorch 2.13: earlier versions compile a
    maximum over a transposed matrix with few rows, as in the attention pool, to code that writes past the end of its
    result, which can crash the process. On CUDA it also needs a C compiler and Triton.
    """
    cuda = device.type == "cuda"
    if not cuda and torch.__version__ < "2.13":  # a TorchVersion, which compares as a version
        return f"PyTorch 2.13 or newer for a CPU (this is {torch.__version__})"
    names = (os.environ.get("CC") or "gcc", "clang") if cuda else (os.environ.get("CXX") or "g++",)
    if not any(shutil.which(name) for name in names):
        return "a C compiler" if cuda else "g++, or another C++ compiler that CXX names"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "Python's headers (python3-dev on Debian and Ubuntu)"
    return "Triton" if cuda and importlib.util.find_spec("triton") is None else None
