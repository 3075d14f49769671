"""What a checkpoint holds, read at once: its files may be gone when a test comes to compare it."""

from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from lmtrain.storage import checkpoint
from lmtrain.storage.checkpoint import Checkpoint


class Content(NamedTuple):
    """A checkpoint whose tensors are in memory."""

    folder: Path
    tensors: dict[str, dict[str, Tensor]]
    info: dict[str, Any]


def content(found: Checkpoint) -> Content:
    tensors = {group: {name: stored[...] for name, stored in named.items()} for group, named in found.tensors.items()}
    return Content(found.folder, tensors, found.info)


def read(folder: Path) -> Content:
    return content(checkpoint.load(folder))
