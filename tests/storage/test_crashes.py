"""Loss of power at any moment: a restart recovers from every state of the disk that it may leave.

The calls by which checkpoints and files are written are recorded, and `crash_states` lists what each prefix of them may
leave. Omitting calls on purpose shows that these states would reveal a missing one.
"""

import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from lmtrain.errors import LmtrainError
from lmtrain.storage import checkpoint, files, run_checkpoints, run_folder
from tests.helpers import Content, content, read
from tests.storage.crash_states import Call, Tree, build, crash_states, read_tree, record


@dataclass(frozen=True)
class Save:
    """A recorded save, and the tree before it."""

    start: Tree
    calls: list[Call]
    returned: int
    """How many calls had been made when `checkpoint.save` returned."""
    old: Content | None
    new: Content


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder for thousands of states, in memory if possible."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
        yield Path(folder)


def save(run_dir: Path, step: int, seed: int) -> Path:
    torch.manual_seed(seed)
    groups = ("model", "optimizer", "ema")
    tensors = {group: {"w": torch.randn(40), "steps": torch.randint(9, (3,))} for group in groups}
    return checkpoint.save(run_dir, step, tensors, {"score": 1.0 / seed, "counters": {"seed": seed}})


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
            run_checkpoints.prune(run_dir, keep=1)
    return Save(start, calls, returned, old, read(folder))


def same(left: Content | None, right: Content | None) -> bool:
    """Whether all tensors are equal, bit for bit, and so is everything else."""
    if left is None or right is None:
        return left is right
    if left.info != right.info or left.tensors.keys() != right.tensors.keys():
        return False
    return all(
        left.tensors[group].keys() == named.keys()
        and all(torch.equal(left.tensors[group][name], value) for name, value in named.items())
        for group, named in right.tensors.items()
    )


def complaint(run_dir: Path, saved: Save, *, returned: bool) -> str:
    """What is wrong with what a restart finds, or nothing."""
    notes: list[str] = []
    try:
        with run_folder.lock(run_dir):
            newest = run_checkpoints.last(run_dir, notes.append)
            found = content(newest) if newest is not None else None
    except LmtrainError as error:
        return f"rejected: {error}"
    if list(run_dir.rglob(".tmp-*")):
        return "leftovers"
    if notes:
        return "a damaged folder had the name of a checkpoint"
    if same(found, saved.new) or (same(found, saved.old) and not returned):
        return ""
    return "an older state after the save had returned" if same(found, saved.old) else "neither old nor new"


def complaints(saved: Save, states: dict[Tree, int], place: Path) -> Iterator[str]:
    """What is wrong with what a restart finds in each of these states, the latest first."""
    for tree, done in reversed(states.items()):
        build(tree, place / "state")
        yield complaint(place / "state" / "run", saved, returned=done >= saved.returned)
        shutil.rmtree(place / "state")


@pytest.mark.parametrize("kind", ["first", "beside an older one", "pruned", "same step"])
def test_a_crash_leaves_the_old_checkpoint_or_the_new_one(
    tmp_path: Path, place: Path, kind: str, record_property: Callable[[str, object], None]
) -> None:
    saved = recorded_save(tmp_path / "recorded", kind)
    states = crash_states(saved.start, saved.calls)
    record_property("states", len(states))
    assert len(states) > 1000
    assert Counter(complaints(saved, states, place)) == {"": len(states)}


def _file(call: Call) -> bool:
    return call.name == "sync" and call.path.suffix in {".json", ".safetensors"}


def _names_of_the_new_folder(call: Call) -> bool:
    return call.name == "sync" and call.path.name.startswith(".tmp-") and not call.path.suffix


def _names_of_the_checkpoints(call: Call) -> bool:
    return call.name == "sync" and call.path.name == "checkpoints"


def _names_of_the_run(call: Call) -> bool:
    return call.name == "sync" and call.path.name == "run"


@pytest.mark.parametrize(
    ("kind", "lost", "expected"),
    [
        ("beside an older one", _file, "a damaged folder had the name of a checkpoint"),
        ("beside an older one", _names_of_the_new_folder, "a damaged folder had the name of a checkpoint"),
        ("beside an older one", _names_of_the_checkpoints, "an older state after the save had returned"),
        ("first", _names_of_the_run, "an older state after the save had returned"),
        ("pruned", _names_of_the_checkpoints, "neither old nor new"),
        ("same step", _names_of_the_checkpoints, "neither old nor new"),
    ],
)
def test_an_omitted_sync_would_be_found(
    tmp_path: Path, place: Path, kind: str, lost: Callable[[Call], bool], expected: str
) -> None:
    saved = recorded_save(tmp_path / "recorded", kind)
    assert any(lost(call) for call in saved.calls)
    states = crash_states(saved.start, saved.calls, lost)
    assert expected in complaints(saved, states, place)


def test_hashes_left_unchecked_would_be_found(tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = recorded_save(tmp_path / "recorded", "beside an older one")
    states = crash_states(saved.start, saved.calls, _file)
    monkeypatch.setattr(checkpoint, "has_hash", lambda *_: True)
    assert "neither old nor new" in complaints(saved, states, place)


def test_a_restart_that_cleans_nothing_up_would_be_found(
    tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = recorded_save(tmp_path / "recorded", "same step")
    monkeypatch.setattr(run_folder, "recover", lambda parent: None)
    assert "leftovers" in complaints(saved, crash_states(saved.start, saved.calls), place)


def test_a_crash_of_the_restart_harms_nothing(tmp_path: Path, place: Path) -> None:
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
        assert Counter(complaints(saved, states, place)) == {"": len(states)}
    assert tried > 20


def recorded_file(base: Path) -> tuple[Tree, list[Call]]:
    base.mkdir()
    files.write_file(base / "state.json", b"old" * 30)
    start = read_tree(base)
    with pytest.MonkeyPatch.context() as patch:
        calls = record(patch, base)
        files.write_file(base / "state.json", b"new" * 30)
    return start, calls


def bad_files(states: dict[Tree, int], calls: int, place: Path) -> int:
    """In how many states a restart finds neither the old file nor the new one, or the old one after the last call."""
    bad = 0
    for tree, done in states.items():
        build(tree, place / "state")
        files.recover(place / "state")
        allowed = [b"new" * 30] if done == calls else [b"new" * 30, b"old" * 30]
        bad += read_tree(place / "state") not in [(("state.json", content),) for content in allowed]
        shutil.rmtree(place / "state")
    return bad


def test_a_crash_leaves_the_old_file_or_the_new_one(tmp_path: Path, place: Path) -> None:
    start, calls = recorded_file(tmp_path / "recorded")
    assert [call.name for call in calls] == ["write", "sync", "rename", "sync"]
    states = crash_states(start, calls)
    assert len(states) >= 7
    assert bad_files(states, len(calls), place) == 0
    for lost in calls[1], calls[3]:
        assert bad_files(crash_states(start, calls, lost.__eq__), len(calls), place) > 0
