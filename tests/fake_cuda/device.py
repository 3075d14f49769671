"""A CUDA device where there is none: tensors that have a device there, a shape and a type, and no data.

torch's fake tensors refuse to let two devices meet. What a real device would do besides, this one notes: the host reads
a value, or something is copied to or from it, and the host waits.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CUDA = torch.device("cuda")
ANSWERS = {torch.bool: True, torch.int64: 3, torch.int32: 3, torch.float64: 3.0}
"""What the host reads where it reads several values; of others, and of a single one, see `FakeCuda`."""


class FakeCuda(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes in `waits` each operation for which the host would have to wait, and lets it go on.

    A value that the host reads is False, 1 or -1.0; whoever reads several gets True, 3 or -1.0.
    """

    current: "FakeCuda"

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.waits: list[str] = []
        FakeCuda.current = self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        here = {tensor.device.type for tensor in inputs if tensor.dim() or tensor.device.type != "cpu"}
        if func is torch.ops.aten._local_scalar_dense.default and inputs[0].is_cuda:
            self.waits.append("read")
            dtype = inputs[0].dtype
            return False if dtype == torch.bool else -1.0 if dtype.is_floating_point else 1
        if func is torch.ops.aten.nonzero.default and inputs[0].is_cuda:
            self.waits.append("read")
            return torch.zeros(2, inputs[0].dim(), dtype=torch.int64, device=CUDA)
        result = func(*args, **kwargs)
        there = {tensor.device.type for tensor in tree_leaves(result) if isinstance(tensor, Tensor)}
        crossing = func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default) and not (
            kwargs.get("non_blocking") or args[2:3] == (True,)
        )
        if len(here) > 1 or (crossing and len({tensor.device.type for tensor in inputs} | there) > 1):
            self.waits.append(str(func))
        return result


@contextmanager
def fake_cuda(monkeypatch: pytest.MonkeyPatch, *, compiling: bool = False) -> Iterator[FakeCuda]:
    """The device, for the length of the block; `on_host` leaves it for the length of a call.

    With `compiling` it notes nothing and answers nothing: torch compiles nothing that is watched.
    """
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "none")
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(FakeTensor, "tolist", lambda tensor: _values(tensor).tolist())
    monkeypatch.setattr(FakeTensor, "numpy", _values, raising=False)
    monkeypatch.setattr(FakeTensor, "__deepcopy__", _copied, raising=False)
    monkeypatch.setattr(nn.Module, "to", _moved)
    watch = FakeCuda()
    with FakeTensorMode(allow_non_fake_inputs=True), nullcontext() if compiling else watch:
        yield watch


def _values(tensor: Tensor) -> np.ndarray:
    with unset_fake_temporarily():
        return torch.full(tensor.shape, ANSWERS.get(tensor.dtype, -1.0), dtype=tensor.dtype).numpy()


def _copied(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    """torch's own way reads the address of the data."""
    copied = tensor.detach().clone()
    memo[id(tensor)] = result = nn.Parameter(copied) if tensor.requires_grad else copied
    return result


def _moved(module: nn.Module, device: torch.device) -> nn.Module:
    """Fake tensors can't be moved in place: new ones take the place of all that is registered."""
    moved: dict[int, Any] = {}
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            moved.setdefault(id(parameter), nn.Parameter(parameter.detach().to(device), parameter.requires_grad))
            part.register_parameter(name, moved[id(parameter)])
        for name, buffer in part.named_buffers(recurse=False):
            setattr(part, name, buffer.to(device))
    return module


def on_host(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, computed with real tensors."""

    def run(*arguments: Any, **named: Any) -> Any:
        with unset_fake_temporarily():
            return function(*arguments, **named)

    return run
