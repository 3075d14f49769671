"""Processes that die, hang, disagree or can't save: all of them end, and the run resumes from a good checkpoint."""

import json
import os
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from lmtrain.config.schema import Config
from lmtrain.data.tokens import TokenStore
from lmtrain.errors import LmtrainError
from lmtrain.storage import run_checkpoints, run_folder
from lmtrain.system import disk, distributed
from lmtrain.system.process_group import ProcessGroup
from lmtrain.training import loop
from lmtrain.training.loop import train_step
from lmtrain.training.parallel import check_agreement
from lmtrain.training.saving import CheckpointSaver
from lmtrain.training.train_state import TrainState, snapshot
from tests.helpers import TINY
from tests.training.helpers import CIRCUMSTANCES, change, full_disk, last_hash, run, run_state, start, verified_steps
from tests.training.ranks import together, train_ranks


@pytest.mark.parametrize(("number", "timeout"), [(signal.SIGKILL, 30.0), (signal.SIGSTOP, 2.0), (None, 30.0)])
def test_if_a_process_dies_hangs_or_fails_all_end(
    tiny: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int | None, timeout: float
) -> None:
    """It is harmed in the fourth step."""

    def step(state: TrainState, lr: float) -> None:
        if state.step == 3 and state.processes.rank == 1:
            if number is None:
                raise RuntimeError("a fault")
            os.kill(os.getpid(), number)
        train_step(state, lr)

    monkeypatch.setattr(loop, "train_step", step)
    config = change(tiny, train__steps=6, train__eval_steps=3)
    whole = run(config, tmp_path / "whole")[0]

    def work(processes: ProcessGroup) -> None:
        run(config, tmp_path / "run", processes=processes)

    monkeypatch.setattr(distributed, "TIMEOUT", timedelta(seconds=timeout))
    ranks = train_ranks(2, work, tmp_path / "log")
    assert ranks.children[0].end() == 1
    if number == signal.SIGSTOP:
        os.kill(ranks.children[1].process, signal.SIGKILL)
    ranks.children.pop(0)
    ranks.end()
    assert "another process of this run has ended, or has not answered" in ranks.output(0)
    assert verified_steps(tmp_path / "run")[-1] == 3
    assert run_state(tmp_path / "run")["status"] == "failed"
    assert run(config, tmp_path / "run")[0].valid == whole.valid
    assert last_hash(tmp_path / "run") == last_hash(tmp_path / "whole")


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("killed", [True, False])
def test_a_failed_save_of_one_process_leaves_the_previous_checkpoint(
    tiny: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: int, killed: bool
) -> None:
    """It is killed, or its disk is full, while both write the second of two sharded checkpoints."""
    run_dir, write = tmp_path / "run", disk.write

    def work(processes: ProcessGroup) -> None:
        def harmed(path: Path, data: Any) -> None:
            if processes.rank == victim and path.name.startswith("ema"):
                if killed:
                    os.kill(os.getpid(), signal.SIGKILL)
                full_disk(path, data)
            write(path, data)

        state = start(change(tiny, train__parallel="fsdp"), processes)
        with CheckpointSaver(run_dir, 1, processes) as saver:
            saver.save(1, *snapshot(state, None, **CIRCUMSTANCES))
            saver.wait()
            processes.barrier()
            monkeypatch.setattr(disk, "write", harmed)
            saver.save(2, *snapshot(state, None, **CIRCUMSTANCES))

    ranks = train_ranks(2, work, tmp_path / "log")
    statuses = ranks.end()
    assert (statuses[victim], statuses[1 - victim]) == (-signal.SIGKILL if killed else 1, 1)
    assert killed or "No space left on device" in ranks.output(victim)
    other = "another process of this run has ended" if killed else "No space left on device"
    assert other in ranks.output(1 - victim)
    with run_folder.lock(run_dir):
        found, damaged = run_checkpoints.last(run_dir)
    assert found is not None
    assert (found.info["step"], found.info["processes"], damaged) == (1, 2, [])
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["step-00000001"]


@pytest.mark.parametrize(("parallel", "victim"), [("ddp", 0), ("fsdp", 0), ("fsdp", 1)])
def test_if_the_last_checkpoint_cannot_be_written_all_end(
    tiny: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parallel: str, victim: int
) -> None:
    """With the reason in the output of all that write."""
    write = disk.write

    def work(processes: ProcessGroup) -> None:
        def full(path: Path, data: Any) -> None:
            if processes.rank == victim and "step-00000003" in str(path):
                full_disk(path, data)
            write(path, data)

        monkeypatch.setattr(disk, "write", full)
        run(change(tiny, train__steps=3, train__parallel=parallel), tmp_path / "run", processes=processes)

    ranks = train_ranks(2, work, tmp_path / "log")
    assert ranks.end() == [1, 1]
    assert "No space left on device" in ranks.output(0)
    assert ("AlreadyReported" if parallel == "ddp" else "No space left on device") in ranks.output(1)


def test_processes_with_another_precision_are_rejected(tiny: Config, store: TokenStore) -> None:
    """Such as two kinds of GPU, for which `auto` is not the same."""

    class Two(ProcessGroup):
        def all_gather_json(self, value: Any) -> list[Any]:
            return [value, value | {"train.precision": "fp16"}]

    with pytest.raises(LmtrainError, match=r"process 1 has train\.precision=fp16 where process 0 has fp32"):
        check_agreement(tiny, store, Two())


def test_processes_that_disagree_are_rejected(tiny: Config, little: Config, tmp_path: Path) -> None:
    """In configuration, in data, about the run folder; and so are processes whose run is in use."""
    same, in_bytes = (tiny, "run"), [change(config, tokenizer__kind="byte") for config in (tiny, little)]
    attempts: list[tuple[tuple[Config, str], tuple[Config, str], str]] = [
        (same, (change(tiny, train__lr=0.5), "run"), "process 1 has train.lr=0.5 where process 0 has 0.001"),
        (same, (change(tiny, eval__batch_size=3), "run"), "process 1 has eval.batch_size=3 where process 0 has"),
        (same, (little, "run"), "process 1 has token"),
        ((in_bytes[0], "run"), (in_bytes[1], "run"), "process 1 has token store="),
        ((tiny, "used"), (tiny, "used"), "in use by another process"),
        ((tiny, "here"), (tiny, "elsewhere"), "run.dir must be a folder that all nodes share"),
    ]

    def work(processes: ProcessGroup) -> list[tuple[str, str]]:
        errors = []
        for *given, _ in attempts:
            config, name = given[processes.rank]
            with pytest.raises(LmtrainError) as error:
                run(config, tmp_path / name, processes=processes)
            errors.append((type(error.value).__name__, str(error.value)))
        return errors

    with run_folder.lock(tmp_path / "used"):
        main, other = together(2, work, tmp_path / "log")
    for (_, message), (*_, expected) in zip(main, attempts, strict=True):
        assert expected in message
    assert [name for name, _ in other] == ["LmtrainError"] * 4 + ["AlreadyReported", "LmtrainError"]
    assert not (tmp_path / "run").exists()


SCRIPT = """
import os, signal, sys
from lmtrain.training import loop

step = loop.train_step

def stepped(training, *rest):
    step(training, *rest)
    if training.step == 7 and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)

loop.train_step = stepped
sys.argv[0] = "lmtrain"
from lmtrain.cli.app import main
main()
"""


def test_torchrun_restarts_a_run(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "1", "--monitor-interval", "0.1", "script.py", "train", *TINY, "--json"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"} | {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)  # only one process prints
    assert (result["status"], result["step"]) == ("finished", 12)
    assert "runs/sample: resuming from step 5" in done.stderr
    assert last_hash(tmp_path / "runs" / "sample") == last_hash(trained / "runs" / "sample")
