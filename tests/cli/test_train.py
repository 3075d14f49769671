"""`lmtrain train`: training, resuming, and what trains nothing."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lmtrain.config.loader import flat
from lmtrain.config.schema import Config
from tests.helpers import TINY, Lmtrain


def test_train_prints_its_outcome_and_resumes(lmtrain: Lmtrain, workdir: Path) -> None:
    done = lmtrain("train", *TINY, "run.name=again", "--json")
    assert done.code == 0, done.err
    result = json.loads(done.out)
    assert (result["status"], result["step"], result["run"]) == ("finished", 12, "runs/again")
    first = json.loads((workdir / "runs/default/state.json").read_text())
    assert result["valid"]["nats"] == first["valid"]["nats"]
    text = lmtrain("train", *TINY, "run.name=again").out
    assert "finished at step 12" in text


def test_a_small_vocabulary_prints_no_misleading_figures(lmtrain: Lmtrain, workdir: Path) -> None:
    """Neither on the terminal nor in the metrics."""
    done = lmtrain("train", *TINY, "run.name=small", "tokenizer.vocab_size=20")
    remark = r" \(<unk> stands for \d\d\.\d\d% of the tokens\)\n"
    assert len(re.findall(rf"valid: .*word perplexity \S+{remark}", done.err)) == 3
    assert re.search(rf"valid word perplexity \S+{remark}", done.out)
    lines = [json.loads(line) for line in (workdir / "runs/small/metrics.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines if "word_perplexity" in line] == ["valid"] * 3 + ["final"]
    assert not any("bits_per_byte" in line for line in lines)
    assert "bits per byte" not in lmtrain("eval", "--run", "runs/small").out


def test_dry_run_trains_nothing(lmtrain: Lmtrain, workdir: Path) -> None:
    done = lmtrain("train", *TINY, "run.name=dry", "--dry-run", "--json")
    assert done.code == 0, done.err
    result = json.loads(done.out)
    assert result["config"]["model"]["dim"] == 16
    assert result["memory_bytes"]["weights"] == 4 * result["parameters"]
    assert result["steps"] == 12
    assert not (workdir / "runs/dry").exists()
    assert "parameters" in lmtrain("train", *TINY, "--dry-run").out


@pytest.mark.parametrize("prefixes", [[], ["model"], ["train.eval_", "eval."]])
def test_fields_describes_fields(lmtrain: Lmtrain, prefixes: list[str]) -> None:
    done = lmtrain("train", "--fields", *prefixes)
    assert (done.code, done.err) == (0, "")
    names = [line.partition("=")[0] for line in done.out.splitlines() if line and not line.startswith(" ")]
    assert names == [name for prefix in prefixes or [""] for name in flat(Config()) if name.startswith(prefix)]


@pytest.mark.parametrize(("number", "name"), [(signal.SIGINT, "SIGINT"), (signal.SIGTERM, "SIGTERM")])
def test_an_interrupted_run_saves_and_says_how_to_resume(workdir: Path, number: int, name: str) -> None:
    command = [sys.executable, "-m", "lmtrain", "train", *TINY, "run.name=cut", "train.steps=100000"]
    command += ["train.compile=false"]  # a run this long would compile first
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "step 5 valid" in line:
                break
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    messages = r"(?s)lmtrain: stopping: saving .*\ninterrupted at step \d+; .*: rerun the same command to resume\n"
    assert re.search(messages, err)
    state = json.loads((workdir / "runs/cut/state.json").read_text())
    assert (state["status"], state["signal"]) == ("interrupted", name)
    assert (workdir / f"runs/cut/checkpoints/step-{state['step']:08d}/manifest.json").is_file()


@pytest.mark.parametrize("name", ["...yaml", "-.yaml", "a b.yaml"])
def test_a_file_gives_a_run_no_name_that_a_run_may_not_have(lmtrain: Lmtrain, workdir: Path, name: str) -> None:
    (workdir / name).write_text("")
    before = sorted(workdir.rglob("*"))
    done = lmtrain("train", f"--config={name}", *TINY)
    assert done.code == 2
    assert f"--config {name}: a run can't be named" in done.err
    assert "set run.name" in done.err
    assert sorted(workdir.rglob("*")) == before


def test_a_full_disk_ends_the_run_and_leaves_the_checkpoints_as_they_were(lmtrain: Lmtrain, workdir: Path) -> None:
    """A limit on the size of files stands in for the full disk: the kernel rejects the write in the same place."""
    command = ["train", *TINY, "run.name=full"]
    assert lmtrain(*command, "train.steps=5").code == 0
    before = {path: path.read_bytes() for path in (workdir / "runs/full/checkpoints").rglob("*") if path.is_file()}
    limited = "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
    limited += "resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000)); sys.argv[0] = 'lmtrain'; "
    limited += "from lmtrain.cli.app import main; main()"
    config = workdir / "runs/full/config.yaml"
    config.write_text(config.read_text().replace("\n  steps: 5\n", "\n  steps: 12\n"))
    done = subprocess.run([sys.executable, "-c", limited, *command], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "File too large" in done.stderr
    assert "Traceback" not in done.stderr
    after = {path: path.read_bytes() for path in (workdir / "runs/full/checkpoints").rglob("*") if path.is_file()}
    assert after == before
