"""Signals: a run stops soon wherever the signal arrives, saves its state, and resumes to the same end."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lmtrain.config.schema import Config
from lmtrain.data.tokens import TokenStore
from lmtrain.training import loop
from tests.helpers import TINY, default_interrupts
from tests.training.helpers import (
    Sender,
    change,
    last_hash,
    observed,
    run,
    run_state,
    verified_steps,
    worsen,
)

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).parent.parent.parent
NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
KINDS = ("step", "log", "batch", "disk")
SLOW: dict[str, Any] = {
    "model__layers": 0,
    "train__steps": 8,
    "train__eval_tokens": 1000,
    "train__save_minutes": 1e-9,
    "train__sample_prompts": [],
    "eval__batch_size": 8,
    "eval__stride": 16,
}
"""Evaluations of many batches."""
OVERRIDES = [*TINY, *(f"{name.replace('__', '.')}={value}" for name, value in SLOW.items())]


def test_a_signal_at_any_moment_saves_the_run(tiny: Config, store: TokenStore, tmp_path: Path) -> None:
    """It stops before the next step or batch."""
    config, choice = change(tiny, **SLOW), random.Random(0)
    heard: list[str] = []
    with observed(heard.append):
        run(config, store, tmp_path / "whole")
    for kind in KINDS:
        for attempt in range(2):
            run_dir, number = tmp_path / f"{kind}-{attempt}", choice.choice(NUMBERS)
            sender = Sender(kind, choice.randrange(heard.count(kind) - 5) + 1, number)
            with observed(sender):
                outcome, _ = run(config, store, run_dir)
            assert outcome.status == "interrupted"
            name = signal.Signals(number).name
            assert run_state(run_dir) == {"status": "interrupted", "step": outcome.step, "signal": name}
            assert verified_steps(run_dir)[-1] == outcome.step
            assert sender.after.count("step") <= 1
            assert sender.after.count("batch") <= 1
            assert run(config, store, run_dir)[0].score is not None
            assert last_hash(run_dir) == last_hash(tmp_path / "whole")


@pytest.mark.parametrize("is_best", [True, False])
def test_a_signal_while_a_finished_run_is_scored_again_changes_no_checkpoint(
    tiny: Config, store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_best: bool
) -> None:
    """Whether the last checkpoint is the best or not."""
    config = change(tiny, **SLOW, train__eval_steps=2)
    if not is_best:
        monkeypatch.setattr(loop, "train_step", worsen)
    first, _ = run(config, store, tmp_path)
    assert (first.best_step == first.step) is is_best

    def files() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in (tmp_path / "checkpoints").rglob("*") if path.is_file()}

    before = files()
    with observed(Sender("batch", 2, signal.SIGTERM)):
        assert run(config, store, tmp_path)[0].status == "interrupted"
    assert files() == before
    again, _ = run(config, store, tmp_path)
    assert (again.score, again.step, again.best_step) == (first.score, first.step, first.best_step)


def child() -> None:
    """The command line in a process that sends itself signals: kind, count, signals, then the command's arguments."""
    from lmtrain.__main__ import main

    numbers = [int(number) for number in sys.argv[3].split(",")]
    senders = [Sender(sys.argv[1], int(sys.argv[2]), number, "now") for number in numbers]
    sys.argv = ["lmtrain", *sys.argv[4:]]

    def heard(kind: str) -> None:
        for sender in senders:
            sender(kind)

    with observed(heard):
        main()


def launch(folder: Path, *command: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        text=True,
        stderr=subprocess.PIPE,
        preexec_fn=default_interrupts,  # noqa: PLW1509 -- no other thread is running here
    )


def train_and_send(folder: Path, data_dir: Path, kind: str, count: int, *numbers: int) -> tuple[int, str]:
    """The exit status and stderr of training that gets these signals at the n-th moment of one kind."""
    arm = "from tests.training.test_signals import child; child()"
    command = ["-c", arm, kind, str(count), ",".join(str(int(number)) for number in numbers)]
    with launch(folder, *command, "train", *OVERRIDES, f"data.dir={data_dir}", "--quiet") as process:
        err = process.communicate(timeout=120)[1]
    return process.returncode, err


def test_one_signal_saves_and_a_second_ctrl_c_ends_the_process_at_once(
    store: TokenStore, tiny: Config, tmp_path: Path
) -> None:
    """In a save, in a step and in an evaluation; the checkpoints are good, and resume to the same end."""
    config = change(tiny, **SLOW)
    run(config, store, tmp_path / "whole")
    run_dir = tmp_path / "runs" / "default"
    code, err = train_and_send(tmp_path, tiny.data.dir, "disk", 15, signal.SIGUSR1)
    assert code == 130, err
    assert "interrupted at step" in err
    found = run_state(run_dir)
    assert (found["status"], found["signal"]) == ("interrupted", "SIGUSR1")
    assert verified_steps(run_dir)[-1] == found["step"]
    for kind, count in (("step", 2), ("batch", 30)):
        code, text = train_and_send(tmp_path, tiny.data.dir, kind, count, *[signal.SIGINT] * 3)
        err += text
        assert code == 130, text
        (step,) = verified_steps(run_dir)[-1:] or [0]
        assert run_state(run_dir) == {"status": "interrupted", "step": step, "signal": "SIGINT"}
        remaining = f"the checkpoint of step {step} is good" if step else "no checkpoint has been saved yet"
        assert re.search(rf"lmtrain: interrupted again, so ended at once: {remaining}.*\n\Z", text)
        assert text.count("now") == 2
    assert "Traceback" not in err
    assert "Exception" not in err
    assert run(config, store, run_dir)[0].status == "finished"
    assert last_hash(run_dir) == last_hash(tmp_path / "whole")


def read_until(process: "subprocess.Popen[str]", wanted: str, times: int = 1) -> str:
    """Read stderr up to the n-th line that matches the pattern `wanted`."""
    assert process.stderr is not None
    seen = ""
    for line in process.stderr:
        seen += line
        times -= re.search(wanted, line) is not None
        if times == 0:
            break
    return seen


EARLY = ["-X", "importtime", "-m", "lmtrain", "train", *OVERRIDES, "data.sample_tokens=20000", "--quiet"]


@pytest.mark.parametrize(
    ("number", "line", "times"),
    [
        (signal.SIGINT, r"\| +lmtrain\.errors$", 1),
        (signal.SIGINT, "training a word tokenizer", 1),
        (signal.SIGTERM, r"\| +torch\.", 12),
        (signal.SIGUSR1, r"\| +torch\.", 7),
    ],
)
def test_a_signal_before_training_ends_the_process(
    tmp_path: Path, number: signal.Signals, line: str, times: int
) -> None:
    """While modules are imported or data is prepared: nothing is lost, and no traceback is shown."""
    with launch(tmp_path, *EARLY) as process:
        seen = read_until(process, line, times)
        process.send_signal(number)
        err = process.communicate(timeout=60)[1]
    assert re.search(line, seen)
    assert process.returncode == (-number if number == signal.SIGTERM else 130)
    assert (number == signal.SIGUSR1) == ("lmtrain: ended by SIGUSR1: training was not under way" in err)
    assert "Traceback" not in seen + err
    assert not (tmp_path / "runs" / "default" / "state.json").exists()
    assert number == signal.SIGTERM or not list(tmp_path.rglob(".tmp-*"))


@pytest.mark.parametrize("line", [r"\| +lmtrain\.errors$", r"\| +typer$", r"\| +torch\._C"])
def test_interrupts_in_quick_succession_show_no_traceback(tmp_path: Path, line: str) -> None:
    """From the first import on; the second one ends the process even while the first is handled."""
    with launch(tmp_path, *EARLY) as process:
        seen = read_until(process, line)
        for _ in range(4):
            process.send_signal(signal.SIGINT)
            time.sleep(0.002)
        err = process.communicate(timeout=60)[1]
    assert process.returncode in (130, -signal.SIGINT)
    assert "Traceback" not in seen + err
    assert "Exception" not in seen + err
