"""Processes that die, hang, disagree or get a signal: all end together, and the run goes on from a good checkpoint."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from lmtrain.config.schema import Config
from lmtrain.data.tokens import TokenStore
from lmtrain.storage import checkpoint
from lmtrain.storage.files import read_manifest, verify
from lmtrain.system.distributed import Workers
from lmtrain.training import loop, state
from lmtrain.training.loop import fit, train_step
from lmtrain.training.meter import StepResult
from lmtrain.training.saving import Saver
from tests.children import Child
from tests.conftest import TINY
from tests.training.ranks import Ranks, said, together
from tests.training.test_loop import change, last_hash, run

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).parent.parent.parent
GRACE = 5.0
"""Seconds beside the timeout in which all processes must have ended."""
SAVING: dict[str, Any] = {"train__steps": 6, "train__eval_steps": 3, "train__save_minutes": 1e-9}


def harmed(config: Config, store: TokenStore, run_dir: Path, harm: Callable[[], None]) -> Callable[[Workers], None]:
    """Training in which the last process comes to harm in its fourth step, all before it being saved."""

    def work(workers: Workers) -> None:
        def stepped(training: state.Training, lr: float) -> StepResult:
            if training.counters.step == 3 and workers.rank == workers.size - 1:
                harm()
            return train_step(training, lr)

        save = Saver.save

        def saved(saver: Saver, *arguments: Any) -> None:
            save(saver, *arguments)
            saver.wait()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop, "train_step", stepped)
            patch.setattr(Saver, "save", saved)
            fit(config, store, run_dir, resume=True, note=print, quiet=True, workers=workers)

    return work


def fail() -> None:
    raise RuntimeError("a fault")


@pytest.mark.parametrize(("number", "timeout"), [(signal.SIGKILL, 30.0), (signal.SIGSTOP, 2.0), (None, 30.0)])
def test_a_process_that_dies_hangs_or_fails_ends_all(
    tiny: Config, store: TokenStore, tmp_path: Path, number: int | None, timeout: float
) -> None:
    config = change(tiny, **SAVING)
    whole = run(config, store, tmp_path / "whole")[0]
    harm = fail if number is None else lambda: os.kill(os.getpid(), number)
    work = harmed(config, store, tmp_path / "run", harm)
    ranks = Ranks(2, work, tmp_path / "log", timeout / 60)
    begun = time.monotonic()
    assert ranks.children[0].end() == 1
    waited = time.monotonic() - begun
    if number == signal.SIGSTOP:
        assert waited > timeout
        os.kill(ranks.children[1].process, signal.SIGKILL)
    ranks.children.pop(0)
    ranks.end()
    assert "another process of this run has ended, or has not answered" in said(tmp_path / "log", 0)
    for folder in checkpoint.folders(tmp_path / "run"):
        verify(folder, read_manifest(folder, checkpoint.FORMAT))
    assert checkpoint.choose(tmp_path / "run", "last").name == "step-00000003"
    assert json.loads((tmp_path / "run" / checkpoint.STATE).read_text())["status"] == "failed"
    assert run(config, store, tmp_path / "run")[0].score == whole.score
    assert last_hash(tmp_path / "run") == last_hash(tmp_path / "whole")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"train__lr": 0.5}, "process 1 has train.lr=0.5 where process 0 has 0.001"),
        ({"eval__batch_size": 3}, "process 1 has eval.batch_size=3 where process 0 has 256"),
        (None, "process 1 has its token"),
    ],
)
def test_processes_that_disagree_get_one_sentence(
    tiny: Config,
    store: TokenStore,
    little: Config,
    little_store: TokenStore,
    tmp_path: Path,
    changes: dict[str, Any] | None,
    sentence: str,
) -> None:
    def work(workers: Workers) -> None:
        config, tokens = tiny, store
        if workers.rank:
            config, tokens = (change(tiny, **changes), store) if changes else (little, little_store)
        fit(config, tokens, tmp_path / "run", resume=True, note=print, quiet=True, workers=workers)

    assert together(2, work, tmp_path) == [1, 1]
    assert sentence in said(tmp_path, 0)
    assert "AlreadyReported" in said(tmp_path, 1)
    assert not (tmp_path / "run").exists()


def test_a_folder_that_only_the_leader_sees(tiny: Config, store: TokenStore, tmp_path: Path) -> None:
    def work(workers: Workers) -> None:
        place = tmp_path / f"node-{workers.rank}" / "run"
        fit(tiny, store, place, resume=True, note=print, quiet=True, workers=workers)

    assert together(2, work, tmp_path / "log") == [1, 1]
    assert "run.dir must be a folder that all nodes share" in said(tmp_path / "log", 0)


def test_a_run_in_use_is_refused_by_all(tiny: Config, store: TokenStore, tmp_path: Path) -> None:
    def work(workers: Workers) -> None:
        fit(tiny, store, tmp_path / "run", resume=True, note=print, quiet=True, workers=workers)

    with checkpoint.lock(tmp_path / "run"):
        assert together(2, work, tmp_path / "log") == [1, 1]
    assert "in use by another process" in said(tmp_path / "log", 0)
    assert "AlreadyReported" in said(tmp_path / "log", 1)


def test_processes_whose_torchrun_is_killed_save_and_end(
    tiny: Config, store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = change(tiny, train__steps=10**6, train__eval_steps=10**6)

    def work(workers: Workers) -> None:
        outcome = fit(config, store, tmp_path / "run", resume=True, note=print, quiet=True, workers=workers)
        (tmp_path / f"{workers.rank}.json").write_text(json.dumps([outcome.status, outcome.step]))

    def torchrun(say: Callable[[str], None]) -> None:
        ranks = Ranks(2, work, tmp_path / "log")
        say(" ".join(str(child.process) for child in (*ranks.children, ranks.host)))
        signal.pause()

    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "test")
    parent = Child(torchrun)
    processes = [int(number) for number in parent.hear().split()]
    metrics, ended = tmp_path / "run" / checkpoint.METRICS, [tmp_path / f"{rank}.json" for rank in range(2)]
    try:
        _wait_for(lambda: metrics.exists() and metrics.stat().st_size > 0)
        os.kill(parent.process, signal.SIGKILL)
        parent.end()
        _wait_for(lambda: all(path.exists() and path.stat().st_size for path in ended))
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
    step = checkpoint.folders(tmp_path / "run")[-1].name.removeprefix("step-")
    assert [json.loads(path.read_text()) for path in ended] == [["interrupted", int(step)]] * 2


def _wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


SCRIPT = """
import os, signal, sys
from lmtrain.training import loop

step = loop.train_step

def stepped(training, *rest):
    result = step(training, *rest)
    if training.counters.step == 7 and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    return result

loop.train_step = stepped
sys.argv[0] = "lmtrain"
from lmtrain.cli.app import main
main()
"""


def test_torchrun_brings_a_run_back(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "1", "--monitor-interval", "0.1", "script.py", "train", *TINY, "--json", "--quiet"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"} | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)  # one process alone prints
    assert (result["status"], result["step"]) == ("finished", 12)
    assert "resuming runs/default from step 5" in done.stderr
    assert last_hash(tmp_path / "runs" / "default") == last_hash(trained / "runs" / "default")
