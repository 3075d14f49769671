"""The profile of training: its parts, operators and trace, and the command."""

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest

from lmtrain.config.schema import Config
from lmtrain.data.tokens import TokenStore
from lmtrain.training import profiling
from lmtrain.training.costs import step_flops
from lmtrain.training.profiling import PARTS, profile_steps, profile_text
from tests.helpers import TINY, Lmtrain
from tests.training.helpers import start

STEPS = 2


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a trace takes the profiler half a second and more for each of its steps."""
    monkeypatch.setattr(profiling, "WARM_UP", 1)
    monkeypatch.setattr(profiling, "STEPS", STEPS)


def test_a_profile_has_parts_operators_and_a_trace(tiny: Config, store: TokenStore, tmp_path: Path) -> None:
    result = profile_steps(tiny, store, tmp_path / "new" / "profile")
    parts = result["parts"]
    assert list(parts) == [*PARTS, "rest"]
    assert min(parts[name] for name in PARTS) > 0
    assert result["tokens_per_second"] * result["seconds"] == pytest.approx(4 * 16)
    rows = result["operators"]
    assert len(rows) == 10
    assert [row["seconds"] for row in rows] == sorted((row["seconds"] for row in rows), reverse=True)
    assert 0 < sum(row["share"] for row in rows) < 1
    assert f"\nclip {1e3 * parts['clip']:46.2f} " in profile_text(result)
    with gzip.open(result["trace"], "rt") as file:
        events = json.load(file)["traceEvents"]
    assert "aten::mm" in {event["name"] for event in events}
    ours = [event for event in events if event.get("cat") == "user_annotation" and event["name"].startswith("lmtrain ")]
    count = Counter(event["name"].removeprefix("lmtrain ") for event in ours)
    assert count == dict.fromkeys(PARTS[:3], 2 * STEPS) | dict.fromkeys((*PARTS[3:], "step"), STEPS), "2 micro-batches"


def test_the_command_writes_only_a_trace_and_prints_the_figures(lmtrain: Lmtrain, workdir: Path) -> None:
    before = set(workdir.rglob("*"))
    done = lmtrain("train", *TINY, "--profile", "--json", "--quiet", "run.name=only", "train.optimizer=muon")
    result = done.json
    assert done.err == ""
    folder = workdir / "runs/only/profile"
    assert set(workdir.rglob("*")) - before == {folder.parent, folder, folder / "trace.json.gz"}
    assert result["trace"] == "runs/only/profile/trace.json.gz"
    assert list(result["parts"]) == [*PARTS, "rest"]
    assert lmtrain("eval", "--json").json["run"] == "runs/sample", "a profile alone is not a run"
    shown = lmtrain("train", *TINY, "--profile", "--quiet", "run.name=only", "train.optimizer=muon").out
    assert shown.endswith("\n\nruns/only/profile/trace.json.gz: open it at ui.perfetto.dev\n")
    assert len(shown.splitlines()) == len(profile_text(result).splitlines()) + 2
    assert lmtrain("train", *TINY, "--quiet", "run.name=only", "train.steps=1").code == 0, "a run has its profile"


def test_figures_are_those_of_a_step_and_the_trace_is_a_file_of_its_own(
    tiny: Config, store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiling, "OPERATORS", 1000)
    monkeypatch.setattr(profiling, "peak_flops", lambda *_: 1e9)
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "trace.json.gz").symlink_to(tmp_path / "mine")
    result, state = profile_steps(tiny, store, tmp_path), start(tiny)
    assert result["mfu"] * result["seconds"] == pytest.approx(step_flops(state.model, tiny, store) / 1e9)
    calls = {row["name"]: row["calls"] for row in result["operators"]}
    assert calls["aten::_fused_adamw_"] == len(state.optimizer.param_groups)
    assert (tmp_path / "mine").read_text() == "mine", "the trace replaces a link, not what it names"
