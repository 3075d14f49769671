"""Loss of power at any moment: a restart recovers from every state of the disk that it may leave.

The calls by which checkpoints and files are written are recorded, and `crash_states` lists what each prefix of them may
leave. Omitting calls on purpose shows that these states would reveal a missing one.
"""

import re
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from lmtrain.errors import LmtrainError
from lmtrain.storage import files, run_checkpoints
from tests.storage.crash_states import Call, Tree, build, crash_states, read_tree, record
from tests.storage.helpers import leftovers, read, restart, save


@dataclass(frozen=True)
class Save:
    """A recorded save, and the tree before it."""

    start: Tree
    calls: list[Call]
    returned: int
    """How many calls had been made when `checkpoint.save` returned."""
    old: str | None
    new: str
    """The hashes of the states before and after."""


def recorded_save(base: Path, kind: str) -> Save:
    base.mkdir()
    run_dir = base / "run"
    old = None if kind == "first" else read(save(run_dir, 1, seed=1))
    start = read_tree(base)
    with pytest.MonkeyPatch.context() as patch:
        calls = record(patch, base)
        folder = save(run_dir, 1 if kind == "same step" else 2, seed=2)
        returned = len(calls)
        if kind == "pruned":
            run_checkpoints.prune(run_dir, 1)
    return Save(start, calls, returned, old, read(folder))


def complaint(run_dir: Path, saved: Save, *, returned: bool) -> str:
    """What is wrong with what a restart finds, or nothing."""
    try:
        found, notes = restart(run_dir)
    except LmtrainError as error:
        return f"rejected: {error}"
    if leftovers(run_dir):
        return "leftovers"
    if notes:
        return "a damaged folder had the name of a checkpoint"
    if found == saved.new or (found == saved.old and not returned):
        return ""
    return "an older state after the save had returned" if found == saved.old else "neither old nor new"


def complaints(saved: Save, states: dict[Tree, int], place: Path) -> Iterator[str]:
    """What is wrong with what a restart finds in each of these states, the latest first."""
    for tree, done in reversed(states.items()):
        build(tree, place / "state")
        yield complaint(place / "state" / "run", saved, returned=done >= saved.returned)
        shutil.rmtree(place / "state")


@pytest.mark.parametrize("kind", ["first", "beside an older one", "pruned", "same step"])
def test_a_crash_leaves_the_old_checkpoint_or_the_new_one(tmp_path: Path, kind: str) -> None:
    saved = recorded_save(tmp_path / "recorded", kind)
    states = crash_states(saved.start, saved.calls)
    assert len(states) > 200
    assert Counter(complaints(saved, states, tmp_path)) == {"": len(states)}


@pytest.mark.parametrize(
    ("kind", "lost", "expected"),
    [
        ("beside an older one", r".*\.(json|safetensors)", "a damaged folder had the name of a checkpoint"),
        ("beside an older one", r"\.tmp-[^.]*", "a damaged folder had the name of a checkpoint"),
        ("beside an older one", "checkpoints", "an older state after the save had returned"),
        ("first", "run", "an older state after the save had returned"),
        ("pruned", "checkpoints", "neither old nor new"),
        ("same step", "checkpoints", "neither old nor new"),
    ],
)
def test_an_omitted_sync_would_be_found(tmp_path: Path, kind: str, lost: str, expected: str) -> None:
    """`lost` are the names of the files and folders that are not synced."""

    def is_lost(call: Call) -> bool:
        return call.name == "sync" and re.fullmatch(lost, call.path.name) is not None

    saved = recorded_save(tmp_path / "recorded", kind)
    assert any(is_lost(call) for call in saved.calls)
    assert expected in complaints(saved, crash_states(saved.start, saved.calls, is_lost), tmp_path)


def test_a_crash_of_the_restart_harms_nothing(tmp_path: Path) -> None:
    """Two crashes in a row: one leaves an older folder renamed, the other happens while it is renamed back."""
    saved = recorded_save(tmp_path / "recorded", "same step")
    tried = 0
    for tree in crash_states(saved.start, saved.calls):
        if "~old-" not in str(tree):
            continue
        base = tmp_path / "base"
        build(tree, base)
        with pytest.MonkeyPatch.context() as patch:
            calls = record(patch, base)
            assert not complaint(base / "run", saved, returned=False)
        shutil.rmtree(base)
        assert calls
        states = dict.fromkeys(crash_states(tree, calls), 0)
        tried += len(states)
        assert Counter(complaints(saved, states, tmp_path)) == {"": len(states)}
    assert tried > 20


def test_a_crash_leaves_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    old, new = b"old" * 30, b"new" * 30
    path = tmp_path / "state.json"
    files.write_file(path, old)
    start = read_tree(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        calls = record(patch, tmp_path)
        files.write_file(path, new)

    def bad(lost: Call | None) -> int:
        """In how many states neither is found, or the old one after the last call, if one call is lost."""
        found = 0
        for tree, done in crash_states(start, calls, lambda call: call is lost).items():
            build(tree, tmp_path / "state")
            files.recover(tmp_path / "state")
            allowed = [new] if done == len(calls) else [new, old]
            found += read_tree(tmp_path / "state") not in [(("state.json", content),) for content in allowed]
            shutil.rmtree(tmp_path / "state")
        return found

    assert [call.name for call in calls] == ["write", "sync", "rename", "sync"]
    assert bad(None) == 0
    assert bad(calls[1]) > 0
    assert bad(calls[3]) > 0
