"""A small model of a file system, and of what a crash, such as a loss of power, may leave of it.

The content of a file is safe once the file was synced, and the names in a folder once the folder was. Until then a file
may have all of its content, nothing, a part, or zeros, and any of the changes to the names in a folder (created,
renamed, removed) may be missing. A rename is atomic, as on every file system with a journal.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import combinations, product
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import pytest

from lmtrain.system import disk

CALLS = ("make_folder", "write", "sync", "rename", "remove")

Tree: TypeAlias = "bytes | tuple[tuple[str, Tree], ...]"
"""The content of a file, or the sorted names in a folder, each with its own tree."""


class Call(NamedTuple):
    """One call of `lmtrain.system.disk`; its paths are relative to the folder in which it was recorded."""

    name: str
    path: Path
    argument: Any = None


@dataclass(eq=False)
class File:
    content: bytes
    synced: bool = False


class Change(NamedTuple):
    """A node of a folder is named, renamed or removed."""

    node: "File | Folder"
    before: str | None
    after: str | None


@dataclass(eq=False)
class Folder:
    names: dict[str, "File | Folder"] = field(default_factory=dict)
    """Those that are safe on the disk."""
    changes: list[Change] = field(default_factory=list)
    """Since the last sync."""

    def after(self, changes: Iterable[Change]) -> dict[str, "File | Folder"]:
        """The names if exactly these changes are on the disk."""
        names = dict(self.names)
        for node, before, after in changes:
            if before is not None and names.get(before) is node:
                del names[before]
            if after is not None:
                names[after] = node
        return names

    def now(self) -> dict[str, "File | Folder"]:
        """The names that a running process finds."""
        return self.after(self.changes)


def record(patch: pytest.MonkeyPatch, root: Path) -> list[Call]:
    """The calls of `lmtrain.system.disk` that succeed from now on, below `root`; the list grows with them."""
    calls: list[Call] = []

    def recorder(name: str, real: Callable[..., None]) -> Callable[..., None]:
        def recorded(path: Path, argument: Any = None) -> None:
            real(path) if argument is None else real(path, argument)
            argument = b"".join(argument) if isinstance(argument, list) else argument
            argument = argument.relative_to(root) if isinstance(argument, Path) else argument
            calls.append(Call(name, path.relative_to(root), argument))

        return recorded

    for name in CALLS:
        patch.setattr(disk, name, recorder(name, getattr(disk, name)))
    return calls


def read_tree(path: Path) -> Tree:
    """The tree at a real path."""
    if path.is_file():
        return path.read_bytes()
    return tuple((child.name, read_tree(child)) for child in sorted(path.iterdir()))


def build(tree: Tree, path: Path) -> None:
    """Write `tree` to a real path."""
    if isinstance(tree, bytes):
        path.write_bytes(tree)
        return
    path.mkdir()
    for name, child in tree:
        build(child, path / name)


def crash_states(start: Tree, calls: list[Call], lost: Callable[[Call], bool] = lambda call: False) -> dict[Tree, int]:
    """Every tree that a crash during or after `calls` may leave, with the largest number of calls that may leave it.

    Calls that `lost` selects are counted but have no effect, as if the program had omitted them.
    """
    root = _model(start)
    assert isinstance(root, Folder)
    states = dict.fromkeys(_possible(root), 0)
    for done, call in enumerate(calls, start=1):
        if not lost(call):
            _play(root, call)
        states.update(dict.fromkeys(_possible(root), done))
    return states


def _model(tree: Tree) -> File | Folder:
    """`tree`, all of it synced."""
    if isinstance(tree, bytes):
        return File(tree, synced=True)
    return Folder({name: _model(child) for name, child in tree})


def _find(root: File | Folder, path: Path) -> File | Folder:
    for part in path.parts:
        assert isinstance(root, Folder)
        root = root.now()[part]
    return root


def _play(root: Folder, call: Call) -> None:
    """Apply a call to the model."""
    if call.name == "sync":
        node = _find(root, call.path)
        if isinstance(node, File):
            node.synced = True
        else:
            node.names, node.changes = node.now(), []
        return
    folder, name = _find(root, call.path.parent), call.path.name
    assert isinstance(folder, Folder)
    if call.name == "remove":
        _remove(folder, name)
    elif call.name == "rename":
        assert call.argument.parent == call.path.parent, "the model has renames only within a folder"
        folder.changes.append(Change(folder.now()[name], name, call.argument.name))
    else:
        node = Folder() if call.name == "make_folder" else File(call.argument)
        folder.changes.append(Change(node, None, name))


def _remove(folder: Folder, name: str) -> None:
    node = folder.now().get(name)
    if isinstance(node, Folder):
        for inner in node.now():
            _remove(node, inner)
    if node is not None:
        folder.changes.append(Change(node, name, None))


def _possible(node: File | Folder) -> set[Tree]:
    """What a crash now may leave of the node."""
    if isinstance(node, File):
        return {node.content} if node.synced else _unsynced(node.content)
    return {
        tree
        for changes in _subsets(node.changes)
        for tree in product(
            *(
                [(name, content) for content in _possible(child)]
                for name, child in sorted(node.after(changes).items(), key=lambda item: item[0])
            )
        )
    }


def _subsets(changes: list[Change]) -> Iterator[tuple[Change, ...]]:
    for count in range(len(changes) + 1):
        yield from combinations(changes, count)


def _unsynced(content: bytes) -> set[Tree]:
    """All, nothing, the first half, zeros, and all but the end, where zeros are."""
    size = len(content)
    return {content, b"", content[: size // 2], bytes(size), content[: size - size // 8] + bytes(size // 8)}
