"""Signals: a run ends soon wherever one finds it, keeps what it has done, and goes on to the same end."""

import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lmtrain.config.schema import Config
from lmtrain.data.tokens import TokenStore
from lmtrain.storage import checkpoint
from lmtrain.storage.files import read_manifest, verify
from lmtrain.training import loop
from lmtrain.training.monitor import Monitor
from tests.conftest import TINY
from tests.training.resuming import worsen
from tests.training.sending import Sender, watched
from tests.training.test_loop import change, last_hash, run

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).parent.parent.parent
NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
KINDS = ("step", "log", "batch", "disk")
SECONDS = 5.0
"""Of processor time, in which a run must have ended: the time on the clock is that of everything on the machine."""
SLOW: dict[str, Any] = {
    "model__layers": 0,
    "train__steps": 8,
    "train__eval_tokens": 1000,
    "train__save_minutes": 1e-9,
    "train__sample_prompts": [],
    "eval__batch_size": 8,
    "eval__stride": 16,
}
"""Evaluations in many batches."""


def state(run_dir: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((run_dir / checkpoint.STATE).read_text())
    return loaded


def check_folders(run_dir: Path) -> list[int]:
    """The steps of a run's checkpoints, all of them whole."""
    for folder in checkpoint.folders(run_dir):
        verify(folder, read_manifest(folder, checkpoint.FORMAT))
    return [int(folder.name.removeprefix("step-")) for folder in checkpoint.folders(run_dir)]


def moments(config: Config, store: TokenStore, run_dir: Path) -> dict[str, int]:
    """How many moments of each kind a run has."""
    heard: list[str] = []
    with watched(heard.append):
        run(config, store, run_dir)
    return {kind: heard.count(kind) for kind in KINDS}


@pytest.mark.parametrize("seed", range(3))
def test_a_signal_at_any_moment_is_saved_and_gone_on_from(
    tiny: Config, store: TokenStore, tmp_path: Path, seed: int
) -> None:
    config, draw = change(tiny, **SLOW), random.Random(seed)
    counts = moments(config, store, tmp_path / "whole")
    for kind in KINDS:
        run_dir, number = tmp_path / kind, draw.choice(NUMBERS)
        sender = Sender(kind, draw.randrange(counts[kind] - 5) + 1, number)
        with watched(sender):
            outcome, _ = run(config, store, run_dir)
        assert outcome.status == "interrupted"
        assert state(run_dir) == {"status": "interrupted", "step": outcome.step, "signal": signal.Signals(number).name}
        assert check_folders(run_dir)[-1] == outcome.step
        assert sender.after.count("step") <= 1
        assert sender.after.count("batch") <= 1
        assert run(config, store, run_dir)[0].score is not None
        assert last_hash(run_dir) == last_hash(tmp_path / "whole")


@pytest.mark.parametrize("is_best", [True, False])
def test_a_signal_while_a_finished_run_is_scored_again_changes_no_checkpoint(
    tiny: Config, store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_best: bool
) -> None:
    """Neither where the last checkpoint is the best, nor where another one has taken its place for the score."""
    config = change(tiny, **SLOW, train__eval_steps=2)
    if not is_best:
        monkeypatch.setattr(loop, "train_step", worsen)
    first, _ = run(config, store, tmp_path)
    assert (first.best_step == first.step) is is_best
    before = {path: path.read_bytes() for path in (tmp_path / "checkpoints").rglob("*") if path.is_file()}
    with watched(Sender("batch", 2, signal.SIGTERM)):
        assert run(config, store, tmp_path)[0].status == "interrupted"
    assert {path: path.read_bytes() for path in (tmp_path / "checkpoints").rglob("*") if path.is_file()} == before
    again, _ = run(config, store, tmp_path)
    assert (again.score, again.step, again.best_step) == (first.score, first.step, first.best_step)


def child() -> None:
    """The command line, in a process that sends itself signals: kind, count, signals, then the command's arguments."""
    from lmtrain.__main__ import main

    numbers = [int(number) for number in sys.argv[3].split(",")]
    senders = [Sender(sys.argv[1], int(sys.argv[2]), number, "now") for number in numbers]
    sys.argv = ["lmtrain", *sys.argv[4:]]

    def heard(kind: str) -> None:
        for sender in senders:
            sender(kind)

    with watched(heard):
        main()


def hear_interrupts() -> None:
    """A shell's background jobs ignore Ctrl-C, and so would their children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def start(folder: Path, *command: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        text=True,
        stderr=subprocess.PIPE,
        preexec_fn=hear_interrupts,  # noqa: PLW1509 -- no other thread is at work here
    )


def read_until(process: "subprocess.Popen[str]", wanted: str, times: int = 1) -> str:
    """Read what the process says up to the line in which the pattern `wanted` is found for the n-th time."""
    assert process.stderr is not None
    seen = ""
    for line in process.stderr:
        seen += line
        times -= re.search(wanted, line) is not None
        if times == 0:
            break
    return seen


def assert_ends_soon(process: "subprocess.Popen[str]") -> str:
    """Return what else it says until it has ended."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    before = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # in the program and in the system
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    err = process.communicate(timeout=30)[1]  # of waiting for nothing, which costs no processor time
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert used.ru_utime - ended.ru_utime + used.ru_stime - ended.ru_stime - before < SECONDS
    return err


OVERRIDES = [*TINY, *(f"{name.replace('__', '.')}={value}" for name, value in SLOW.items())]


def test_a_process_ends_soon_in_a_save_and_in_an_evaluation(store: TokenStore, tiny: Config, tmp_path: Path) -> None:
    draw = random.Random(0)
    overrides = [*OVERRIDES, f"data.dir={tiny.data.dir}"]
    arm = "from tests.training.test_signals import child; child()"
    for number, kind, most in ((signal.SIGUSR1, "disk", 20), (signal.SIGINT, "batch", 40)):
        command = ["-c", arm, kind, f"{draw.randrange(most) + 1}", f"{int(number)}"]
        with start(tmp_path, *command, "train", *overrides, "--quiet") as process:
            read_until(process, "now")
            err = assert_ends_soon(process)
        assert process.returncode == 130, err
        assert "the same command resumes from it" in err
        assert "Traceback" not in err
        found = state(tmp_path / "runs" / "default")
        assert (found["status"], found["signal"]) == ("interrupted", number.name)
        assert check_folders(tmp_path / "runs" / "default")[-1] == found["step"]
    config = change(tiny, **SLOW)
    run(config, store, tmp_path / "whole")
    run(config, store, tmp_path / "runs" / "default")
    assert last_hash(tmp_path / "runs" / "default") == last_hash(tmp_path / "whole")


@pytest.mark.parametrize(("kind", "count"), [("step", 5), ("batch", 30)])
def test_a_second_ctrl_c_ends_the_process_at_once_and_harms_nothing(
    store: TokenStore, tiny: Config, tmp_path: Path, kind: str, count: int
) -> None:
    """It says what is kept, the state says so too, and nothing is made of a third one."""
    arm = "from tests.training.test_signals import child; child()"
    numbers = ",".join([str(int(signal.SIGINT))] * 3)
    command = ["-c", arm, kind, f"{count}", numbers, "train", *OVERRIDES, f"data.dir={tiny.data.dir}", "--quiet"]
    with start(tmp_path, *command) as process:
        err = process.communicate(timeout=60)[1]
    run_dir = tmp_path / "runs" / "default"
    assert process.returncode == 130, err
    (step,) = check_folders(run_dir)[-1:] or [0]
    assert state(run_dir) == {"status": "interrupted", "step": step, "signal": "SIGINT"}
    kept = f"the checkpoint of step {step} is good" if step else "no checkpoint has been saved yet"
    assert re.search(rf"lmtrain: interrupted again, so ended at once: {kept}.*\n\Z", err)
    assert err.count("now") == 2
    assert "Traceback" not in err
    assert "Exception" not in err
    config = change(tiny, **SLOW)
    run(config, store, tmp_path / "whole")
    assert run(config, store, run_dir)[0].status == "finished"
    assert last_hash(run_dir) == last_hash(tmp_path / "whole")


def test_a_signal_before_the_first_step_leaves_the_state_as_it_was(
    tiny: Config, store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`running` is not said before signals are caught: a run that is over by then would say it for ever."""

    def interrupted(*arguments: Any, **options: Any) -> Monitor:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(loop, "Monitor", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(tiny, store, tmp_path)
    assert not (tmp_path / checkpoint.STATE).exists()
    assert run(tiny, store, tmp_path)[0].status == "finished"


@pytest.mark.parametrize(
    ("number", "line", "most"),
    [
        (signal.SIGINT, r"\| +lmtrain\.errors$", 1),
        (signal.SIGINT, r"\| +torch\.", 20),
        (signal.SIGTERM, r"\| +torch\.", 20),
        (signal.SIGINT, "training a word tokenizer", 1),
        (signal.SIGUSR1, r"\| +lmtrain\.errors$", 1),
        (signal.SIGUSR1, r"\| +torch\.", 20),
    ],
)
def test_a_signal_before_training_ends_the_process_at_once(
    tmp_path: Path, number: signal.Signals, line: str, most: int
) -> None:
    """While modules are imported, data is made or the run is set up: nothing is lost, and no traceback is shown."""
    command = ["-X", "importtime", "-m", "lmtrain", "train", *OVERRIDES, "data.sample_tokens=20000", "--quiet"]
    with start(tmp_path, *command) as process:
        seen = read_until(process, line, random.Random(line).randrange(most) + 1)
        process.send_signal(number)
        err = assert_ends_soon(process)
    assert re.search(line, seen)
    assert process.returncode == (-number if number == signal.SIGTERM else 130)
    assert (number == signal.SIGUSR1) == ("lmtrain: ended by SIGUSR1: training was not under way" in err)
    assert "Traceback" not in seen + err
    assert not (tmp_path / "runs" / "default" / "state.json").exists()
    assert number == signal.SIGTERM or not list(tmp_path.rglob(".tmp-*"))


def test_interrupts_in_quick_succession_show_no_traceback(tmp_path: Path) -> None:
    """From the first import on; the second one ends the process, even while the first is dealt with."""
    command = ["-X", "importtime", "-m", "lmtrain", "train", *OVERRIDES, "data.sample_tokens=20000", "--quiet"]
    for line in (r"\| +lmtrain\.errors$", r"\| +typer$", r"\| +torch\._C", "training a word tokenizer"):
        with start(tmp_path, *command) as process:
            seen = read_until(process, line)
            for _ in range(4):
                process.send_signal(signal.SIGINT)
                time.sleep(0.002)
            err = process.communicate(timeout=30)[1]
        assert process.returncode in (130, -signal.SIGINT)
        assert "Traceback" not in seen + err
        assert "Exception" not in seen + err


def test_an_interrupt_that_python_would_ignore_ends_the_process(tmp_path: Path) -> None:
    """One that comes while an object is deleted."""
    code = (
        "import signal, time; from lmtrain import signals; signals.install()\n"
        "class Held:\n    def __del__(self): signal.raise_signal(signal.SIGINT)\n"
        "held = Held(); del held; print('went on')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
