"""Signals: a run stops soon wherever the signal arrives, saves its state, and resumes to the same end."""

import random
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import lmtrain
from lmtrain.__main__ import main
from lmtrain.config.schema import Config
from lmtrain.evaluation.perplexity import Score, evaluate
from lmtrain.storage import run_folder
from lmtrain.system import disk
from lmtrain.training import loop, validation
from lmtrain.training.monitor import RunMonitor
from tests.helpers import TINY, Child, Interrupt, contents, default_interrupts
from tests.storage.crash_states import CALLS
from tests.training.helpers import change, last_hash, logged, run, run_interrupted, run_state, verified_steps, worsen

NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
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


@contextmanager
def observed(heard: Callable[[str], None]) -> Iterator[None]:
    """Report the moments of a run whose handlers are installed: step, log, batch (of an evaluation), disk (call)."""

    def reporting(kind: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
                heard(kind)
            return real(*arguments, **options)

        return call

    def evaluated(*arguments: Any, advance: Callable[[int], object], **options: Any) -> Score:
        return evaluate(*arguments, advance=reporting("batch", advance), **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(validation, "evaluate", evaluated)
        patch.setattr(loop, "train_step", reporting("step", loop.train_step))
        patch.setattr(RunMonitor, "record", reporting("log", RunMonitor.record))
        for name in CALLS:
            patch.setattr(disk, name, reporting("disk", getattr(disk, name)))
        yield


class Sender:
    """Sends this process signals at the n-th moment of one kind; `after` lists the moments after it."""

    def __init__(self, kind: str, count: int, *numbers: int) -> None:
        self._kind, self._left, self._numbers = kind, count, numbers
        self.after: list[str] = []

    def __call__(self, kind: str) -> None:
        if self._left == 0:
            self.after.append(kind)
        elif kind == self._kind:
            self._left -= 1
            if self._left == 0:
                for number in self._numbers:
                    signal.raise_signal(number)


def test_a_signal_at_any_moment_saves_the_run(tiny: Config, tmp_path: Path) -> None:
    """It stops before the next step or batch, and an interrupted evaluation, the final one too, is repeated."""
    config, choice = change(tiny, **SLOW), random.Random(0)
    heard: list[str] = []
    with observed(heard.append):
        whole, _ = run(config, tmp_path / "whole")
    moments = [(kind, choice.randrange(heard.count(kind) - 5) + 1) for kind in KINDS for _ in range(2)]
    moments += [("batch", 1), ("batch", heard.count("batch") - 2)]
    for attempt, (kind, count) in enumerate(moments):
        run_dir, number = tmp_path / str(attempt), NUMBERS[attempt % len(NUMBERS)]
        sender = Sender(kind, count, number)
        with observed(sender):
            run_interrupted(config, run_dir)
        assert run_state(run_dir) == {"status": "interrupted", "step": verified_steps(run_dir)[-1]}
        assert sender.after.count("step") <= 1
        assert sender.after.count("batch") <= 1
        assert run(config, run_dir)[0].valid == whole.valid
        assert last_hash(run_dir) == last_hash(tmp_path / "whole")
        assert logged(run_dir) == logged(tmp_path / "whole")


def test_a_signal_while_a_complete_run_is_scored_again_changes_no_checkpoint(
    tiny: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a kill in the final evaluation."""
    monkeypatch.setattr(loop, "train_step", worsen)
    config = change(tiny, **SLOW, train__eval_steps=2)
    first, _ = run(config, tmp_path)
    assert first.best_step < first.step
    run_folder.write_state(tmp_path, "running", step=first.step)
    before = contents(tmp_path / "checkpoints")
    with observed(Sender("batch", 2, signal.SIGTERM)):
        run_interrupted(config, tmp_path)
    assert contents(tmp_path / "checkpoints") == before
    again, _ = run(config, tmp_path)
    assert (again.valid, again.step, again.best_step) == (first.valid, first.step, first.best_step)


def train_and_send(data_dir: Path, log: Path, *sent: Any) -> tuple[int, str]:
    """The exit status and the messages of the command line in a process that gets signals; `sent` as for `Sender`."""

    def work(_say: Callable[[str], None]) -> None:
        default_interrupts()
        Path("sample.yaml").touch()
        sys.argv = ["lmtrain", "train", "-c", "sample.yaml", *OVERRIDES, f"data.dir={data_dir}", "--quiet"]
        with observed(Sender(*sent)):
            main()

    return Child(work, log).end(), log.read_text()


def test_one_signal_saves_and_a_second_ctrl_c_ends_the_process_at_once(tiny: Config, folder: Path) -> None:
    """In a save, in a step and in an evaluation; the checkpoints are good, and resume to the same end."""
    config = change(tiny, **SLOW)
    run(config, folder / "whole")
    run_dir = folder / "runs" / "sample"
    code, printed = train_and_send(tiny.data.dir, folder / "log", "disk", 15, signal.SIGTERM)
    assert code == 130, printed
    assert re.search(r"interrupted at step \d; .*: rerun the same command to resume\n", printed)
    found = run_state(run_dir)
    assert found["status"] == "interrupted"
    assert verified_steps(run_dir)[-1] == found["step"]
    for kind, count in (("step", 2), ("batch", 30)):
        code, text = train_and_send(tiny.data.dir, folder / "log", kind, count, *[signal.SIGINT] * 3)
        assert text.count("lmtrain: stopping: saving a checkpoint (Ctrl-C again exits without saving)\n") == 1
        printed += text
        assert code == 130, text
        assert run_state(run_dir)["status"] == "running"  # as after `kill -9`
        assert re.search(r"lmtrain: interrupted again: exited; the same command resumes .*\n\Z", text)
    assert "Traceback" not in printed
    assert "Exception" not in printed
    assert run(config, run_dir)[0].status == "finished"
    assert last_hash(run_dir) == last_hash(folder / "whole")


def read_until(process: "subprocess.Popen[str]", wanted: str, times: int) -> str:
    """Read stderr up to the n-th line that matches the pattern `wanted`."""
    assert process.stderr is not None
    seen = ""
    for line in process.stderr:
        seen += line
        times -= re.search(wanted, line) is not None
        if times == 0:
            break
    return seen


EARLY = ["-X", "importtime", "-m", "lmtrain", "train", *OVERRIDES, "data.sample_tokens=20000"]


@pytest.mark.parametrize(("line", "times"), [(r"\| +torch\.", 7), ("training a word tokenizer", 1)])
def test_ctrl_c_before_training_ends_the_process_at_once(tmp_path: Path, line: str, times: int) -> None:
    """While modules are imported or data is prepared: no traceback is shown."""
    with subprocess.Popen(
        [sys.executable, *EARLY],
        cwd=tmp_path,
        text=True,
        stderr=subprocess.PIPE,
        preexec_fn=default_interrupts,  # noqa: PLW1509 -- no other thread is running here
    ) as process:
        seen = read_until(process, line, times)
        process.send_signal(signal.SIGINT)
        err = process.communicate(timeout=60)[1]
    assert process.returncode == -signal.SIGINT
    assert "Traceback" not in seen + err
    assert not (tmp_path / "runs" / "sample" / "state.json").exists()


def test_ctrl_c_ends_a_program_that_trains(workdir: Path, interrupt_after: Interrupt) -> None:
    interrupt_after(2, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        lmtrain.train("run.name=stopped", config=lmtrain.load("sample").config, quiet=True)
    assert run_state(workdir / "runs/stopped")["status"] == "interrupted"
