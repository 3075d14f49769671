"""Facts about the machine, to record with a measurement, and its peak in a matrix product."""

import platform
import sys
import time
from typing import Any

import torch

from lmtrain.system.device import cores, cpu_info, synchronize


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


def peak_flops(device: torch.device, precision: str) -> float:
    """Measure the floating-point operations per second of a large matrix product at `precision`, in about 0.2 s."""
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
