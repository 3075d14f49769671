"""The profile of a training: parts against the whole and against a part made slow, and a trace that can be read."""

import gzip
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from lmtrain.cli.output import show_profile
from lmtrain.config.schema import Config
from lmtrain.data.tokens import TokenStore
from lmtrain.errors import LmtrainError
from lmtrain.training.loop import train_step
from lmtrain.training.profiling import PARTS, STEPS, profile_steps, profile_text
from lmtrain.training.state import prepare
from tests.conftest import TINY, Lmtrain

pytestmark = pytest.mark.usefixtures("one_thread")
NAP = 0.05


@pytest.fixture
def slow_clipping(monkeypatch: pytest.MonkeyPatch) -> None:
    clip = torch.nn.utils.clip_grad_norm_

    def slow(*arguments: Any) -> torch.Tensor:
        time.sleep(NAP)
        return clip(*arguments)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", slow)


def test_parts_and_operators_and_a_trace(tiny: Config, store: TokenStore, tmp_path: Path, slow_clipping: None) -> None:
    result = profile_steps(tiny, store, tmp_path / "new" / "profile", lambda message: None)
    parts = result["parts"]
    assert list(parts) == [*PARTS, "rest"]
    assert min(parts[name] for name in PARTS) > 0
    assert NAP < parts["clip"] < 3 * NAP
    assert 0 <= parts["rest"] < 0.1 * sum(parts.values())
    assert sum(parts.values()) == pytest.approx(result["seconds"], rel=0.5)
    assert result["tokens_per_second"] * result["seconds"] == pytest.approx(4 * 16)
    rows = result["operators"]
    assert len(rows) == 10
    assert [row["seconds"] for row in rows] == sorted((row["seconds"] for row in rows), reverse=True)
    assert 0.3 < sum(row["share"] for row in rows) < 1
    assert any(row["name"].startswith("aten::") for row in rows)
    assert (tmp_path / "new/profile/profile.txt").read_text() == profile_text(result) + "\n"
    assert f"\nclip {1e3 * parts['clip']:46.2f} " in profile_text(result)

    with gzip.open(result["trace"], "rt") as file:
        events = json.load(file)["traceEvents"]
    assert {event["name"] for event in events} > {"aten::mm"}
    ours = [event for event in events if event.get("cat") == "user_annotation" and event["name"].startswith("lmtrain ")]
    spent: Counter[str] = Counter()
    for event in ours:
        spent[event["name"].removeprefix("lmtrain ")] += event["dur"] / 1e6
    assert set(spent) == {*PARTS, "step"}
    count = Counter(event["name"].removeprefix("lmtrain ") for event in ours)
    assert [count[name] for name in (*PARTS, "step")] == [2 * STEPS] * 3 + [STEPS] * 3, "two micro-batches"
    assert 0.8 * spent["step"] < sum(spent[name] for name in PARTS) <= spent["step"]
    assert NAP < spent["clip"] / STEPS < 3 * NAP


def test_what_watches_the_parts_changes_nothing(tiny: Config, store: TokenStore) -> None:
    seen: list[str] = []

    def watch(name: str) -> torch.profiler.record_function:
        seen.append(name)
        return torch.profiler.record_function(name)

    plain, watched = (prepare(tiny, store, lambda message: None) for _ in range(2))
    watched.part = watch
    for training in (plain, watched):
        train_step(training, 1e-2)
    assert seen == [*PARTS[:3], *PARTS]
    pairs = zip(plain.model.parameters(), watched.model.parameters(), strict=True)
    assert all(torch.equal(left, right) for left, right in pairs)


def test_a_folder_that_is_a_file_is_named(tiny: Config, store: TokenStore, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LmtrainError, match=r"can't write .*file"):
        profile_steps(tiny, store, tmp_path / "file" / "profile", lambda message: None)


def test_the_command(lmtrain: Lmtrain, workdir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = set(workdir.rglob("*"))
    done = lmtrain("train", *TINY, "--profile", "--json", "--quiet", "run.name=only", "train.optimizer=muon")
    assert (done.code, done.err) == (0, "")
    result = json.loads(done.out)
    folder = workdir / "runs/only/profile"
    assert set(workdir.rglob("*")) - before == {folder.parent, folder, folder / "trace.json.gz", folder / "profile.txt"}
    assert result["trace"] == "runs/only/profile/trace.json.gz"
    assert list(result["parts"]) == [*PARTS, "rest"]
    assert json.loads(lmtrain("eval", "--json").out)["run"] == "runs/default", "the folder of a profile alone is no run"
    show_profile(result, as_json=False)
    text = (folder / "profile.txt").read_text()
    assert capfd.readouterr().out == f"{text}\nruns/only/profile/trace.json.gz: open it at ui.perfetto.dev\n"


def test_a_dry_run_and_a_profile_are_refused(lmtrain: Lmtrain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = lmtrain("train", "--profile", "--dry-run")
    assert (done.code, done.out) == (2, "")
    assert done.err == "lmtrain: --fields, --dry-run and --profile exclude each other: give one of them\n"
    assert list(tmp_path.iterdir()) == []
