"""Processes that are killed while they write, and processes that lock the same run folder."""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import lmtrain
from lmtrain.errors import LmtrainError
from lmtrain.storage import checkpoint, files, run_checkpoints, run_folder
from lmtrain.system import disk
from tests.helpers import Child
from tests.storage.crash_states import CALLS

KILLED = 137
OLD, NEW = b"old" * 1000, b"new" * 1000
SYSTEM_CALLS = "write,fsync,?rename,?renameat,renameat2,?mkdir,mkdirat,openat,?unlink,unlinkat,?rmdir"
"""strace ignores those with a question mark where the processor lacks them."""

SCRIPT = """
import sys
from pathlib import Path
from lmtrain.system import disk
from lmtrain.storage import files

print("ready", flush=True)
with files.new_folder(Path(sys.argv[1]) / "folder", "kind/1", {"note": "new"}) as folder:
    disk.write(folder / "data", b"new" * 1000)
files.write_file(Path(sys.argv[1]) / "file", b"new" * 1000)
print("done", flush=True)
"""


def make_old(place: Path) -> None:
    place.mkdir()
    with files.new_folder(place / "folder", "kind/1", {"note": "old"}) as folder:
        disk.write(folder / "data", OLD)
    files.write_file(place / "file", OLD)


def run_traced(place: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    """Run the script on existing files, with these options of strace."""
    make_old(place)
    command = ["strace", "-f", *options, sys.executable, "-B", "-S", "-E", "-s", "-c", SCRIPT, str(place)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run(
        command,
        cwd=Path(lmtrain.__file__).parent.parent,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def system_calls(log: Path) -> tuple[Counter[str], Counter[str]]:
    """The numbers of system calls that the script made before it was ready, and after."""
    lines = log.read_text().splitlines()
    ready = next(number for number, line in enumerate(lines) if 'write(1, "ready' in line)
    done = next(number for number, line in enumerate(lines) if 'write(1, "done' in line)
    names = [found[1] if (found := re.match(r"\d+ +(\w+)\(", line)) else "" for line in lines]
    return Counter(names[: ready + 1]), Counter(names[ready + 1 : done])


def after_a_kill(place: Path, call: str, number: int) -> str:
    """Kill the script at its n-th call; returns what is wrong then, empty if nothing is."""
    inject = f"inject={call}:signal=KILL:when={number}"
    process = run_traced(place, "-o", "/dev/null", "-e", f"trace={call}", "-e", inject)
    if process.stdout != "ready\n" or process.returncode == 0:
        return f"{call} {number} did not kill it: {process.stdout} {process.stderr}"
    files.recover(place)
    manifest = files.read_manifest(place / "folder", "kind/1")
    files.verify(place / "folder", manifest)
    expected = {"old": OLD, "new": NEW}[manifest["note"]]
    whole = (place / "folder" / "data").read_bytes() == expected and (place / "file").read_bytes() in (OLD, NEW)
    names = {path.name for path in place.iterdir()}
    return "" if whole and names == {"file", "folder"} else f"{call} {number}: neither old nor new"


def test_a_kill_at_any_system_call_leaves_the_old_or_the_new(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    if shutil.which("strace") is None:
        pytest.skip("needs strace")
    log = tmp_path / "log"
    whole = run_traced(tmp_path / "whole", "-o", str(log), "-e", f"trace={SYSTEM_CALLS}")
    if whole.stdout != "ready\ndone\n":
        pytest.skip(f"strace can't trace here: {whole.stderr}")
    before, after = system_calls(log)
    kills = [(call, before[call] + number) for call, count in after.items() for number in range(1, count + 1)]
    record_property("kills", len(kills))
    assert len(kills) > 25
    assert after["fsync"] >= 6
    with ThreadPoolExecutor(2) as pool:
        wrong = list(pool.map(lambda kill: after_a_kill(tmp_path / f"{kill[0]}-{kill[1]}", *kill), kills))
    assert not any(wrong), [sentence for sentence in wrong if sentence]


def tensors(step: int) -> checkpoint.Tensors:
    return {"model": {"w": torch.full((30,), float(step))}, "optimizer": {"w/step": torch.tensor(float(step))}}


def save(run_dir: Path, step: int) -> Path:
    return checkpoint.save(run_dir, step, tensors(step), {"score": 1.0 / step})


def saved_step(run_dir: Path) -> int:
    """The step that a restart resumes from; its checkpoint must be complete, and no temporary files may remain."""
    notes: list[str] = []
    with run_folder.lock(run_dir):
        found = run_checkpoints.last(run_dir, notes.append)
    assert found is not None
    assert notes == []
    assert list(run_dir.rglob(".tmp-*")) == []
    step = int(found.info["step"])
    assert all(
        torch.equal(value, found.tensors[group][name][...])
        for group, named in tensors(step).items()
        for name, value in named.items()
    )
    return step


def die_at(number: int, work: Callable[[], object], say: Callable[[str], None]) -> None:
    """Do `work`, but end the process at its n-th disk call, in the middle of it if it writes."""
    made = 0

    def deadly(name: str, real: Callable[..., None], path: Path, *rest: Any) -> None:
        nonlocal made
        if made == number:
            if name == "write":
                real(path, rest[0][: len(rest[0]) // 2])
            os._exit(KILLED)
        made += 1
        real(path, *rest)

    for name in CALLS:
        setattr(disk, name, partial(deadly, name, getattr(disk, name)))
    work()


@pytest.mark.parametrize("again", [False, True], ids=["a later step", "the same step"])
def test_a_kill_at_any_disk_call_leaves_the_old_or_the_new(tmp_path: Path, again: bool) -> None:
    found = []
    for number in range(100):
        run_dir = tmp_path / str(number)
        for step in (1, 2) if again else (1,):
            save(run_dir, step)

        def work(run_dir: Path = run_dir) -> None:
            save(run_dir, 2)
            run_checkpoints.prune(run_dir, keep=1)

        status = Child(partial(die_at, number, work)).end()
        found.append(saved_step(run_dir))
        if status == 0:
            break
        assert status == KILLED
    assert len(found) > 12
    assert found[0] == (2 if again else 1)
    assert found[-1] == 2
    assert found == sorted(found)  # from one moment on it is the new one


def hold(run_dir: Path, go: int, say: Callable[[str], None]) -> None:
    """Wait for the start, lock the folder, and hold the lock until killed."""
    os.read(go, 1)
    try:
        with run_folder.lock(run_dir):
            say("held")
            signal.alarm(60)  # in case the test itself ends first
            signal.pause()
    except LmtrainError as error:
        say(str(error))


def test_one_of_two_processes_gets_the_lock_and_the_other_an_error(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    save(run_dir, 1)
    for _ in range(20):
        start, go = os.pipe()
        children = [Child(partial(hold, run_dir, start)) for _ in range(2)]
        os.write(go, b"ab")
        answers = [child.hear() for child in children]  # the loser fails while the winner holds the lock
        assert answers.count("held") == 1
        (sentence,) = [word for word in answers if word != "held"]
        assert sentence == f"{run_dir} is in use by another process: wait for it or set run.name"
        with pytest.raises(LmtrainError, match="in use by another process"), run_folder.lock(run_dir):
            pass
        winner, loser = (children[answers.index(word)] for word in ("held", sentence))
        os.kill(winner.process, signal.SIGKILL)
        assert winner.end() == -signal.SIGKILL
        assert loser.end() == 0
        assert saved_step(run_dir) == 1
        os.close(start)
        os.close(go)


def test_without_the_lock_both_would_get_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A negative control of the test above."""
    monkeypatch.setattr("fcntl.flock", lambda file, operation: None)
    save(tmp_path / "run", 1)
    start, go = os.pipe()
    children = [Child(partial(hold, tmp_path / "run", start)) for _ in range(2)]
    os.write(go, b"ab")
    assert [child.hear() for child in children] == ["held", "held"]
    for child in children:
        os.kill(child.process, signal.SIGKILL)
        child.end()
    os.close(start)
    os.close(go)
