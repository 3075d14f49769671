"""How near gradients are, how large the tensors are that an operation makes, and how many operations a layer takes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode


def assert_near(found: list[Tensor], wanted: list[Tensor], tolerance: float) -> None:
    """Relative to the largest element of each."""
    for one, other in zip(found, wanted, strict=True):
        largest = max(other.abs().flatten().tolist(), default=0.0)
        torch.testing.assert_close(one, other, rtol=0, atol=tolerance * largest)


class Sizes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The size of the largest tensor that any operation makes."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor):
                self.largest = max(self.largest, tensor.numel())
        return result


@contextmanager
def largest_tensor() -> Iterator[Sizes]:
    with Sizes() as sizes:  # type: ignore[no-untyped-call]
        yield sizes


def flops(layer: nn.Module, length: int, width: int) -> int:
    """The operations of a forward pass over (1, length, width)."""
    with FlopCounterMode(display=False) as counter:
        layer(torch.zeros(1, length, width))
    return int(counter.get_total_flops())
