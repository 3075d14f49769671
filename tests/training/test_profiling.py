"""The profile of training: its parts, operators and trace, and the command."""

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest

from lmtrain.config.schema import Config
from lmtrain.data.tokens import TokenStore
from lmtrain.training import profiling
from lmtrain.training.flops import step_flops
from lmtrain.training.profiling import PARTS, profile_steps, profile_text
from tests.helpers import TINY, Lmtrain
from tests.training.helpers import start

STEPS = 2


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a trace takes the profiler half a second and more for each of its steps."""
    monkeypatch.setattr(profiling, "WARM_UP", 1)
    monkeypatch.setattr(profiling, "STEPS", STEPS)


def test_a_profile_has_the_figures_of_a_step_and_a_trace_of_its_own(
    tiny: Config, store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiling, "peak_flops", lambda *_: 1e9)
    monkeypatch.setattr(profiling, "ROWS", 1000)  # of a tiny model, other operators may take longest
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "trace.json.gz").symlink_to(tmp_path / "mine")
    result = profile_steps(tiny, store, tmp_path)
    assert (tmp_path / "mine").read_text() == "mine", "the trace replaces a link, not what it names"
    parts = result["parts"]
    assert list(parts) == [*PARTS, "rest"]
    assert min(parts[name] for name in PARTS) > 0
    assert result["tokens_per_second"] * result["seconds"] == pytest.approx(4 * 16)
    assert result["mfu"] * result["seconds"] == pytest.approx(step_flops(start(tiny).model, tiny, store) / 1e9)
    assert f"\nclip {1e3 * parts['clip']:46.2f} " in profile_text(result)
    assert "aten::mm" in result["operators"]
    with gzip.open(result["trace"], "rt") as file:
        events = json.load(file)["traceEvents"]
    ours = [event for event in events if event.get("cat") == "user_annotation" and event["name"].startswith("lmtrain ")]
    count = Counter(event["name"].removeprefix("lmtrain ") for event in ours)
    assert count == dict.fromkeys(PARTS[:3], 2 * STEPS) | dict.fromkeys((*PARTS[3:], "step"), STEPS), "2 micro-batches"


def test_the_command_writes_only_a_trace_and_prints_the_figures(
    lmtrain: Lmtrain, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, command = set(workdir.rglob("*")), ["train", *TINY, "--quiet", "run.name=only", "train.optimizer=muon"]
    done = lmtrain(*command, "--profile", "--json")
    result = done.json
    assert done.err == ""
    folder = workdir / "runs/only/profile"
    assert set(workdir.rglob("*")) - before == {folder.parent, folder, folder / "trace.json.gz"}
    assert result["trace"] == "runs/only/profile/trace.json.gz"
    assert list(result["parts"]) == [*PARTS, "rest"]
    assert lmtrain("eval", "--json").json["run"] == "runs/sample", "a profile alone is not a run"
    monkeypatch.setattr(profiling, "profile_steps", lambda *_: result)
    printed = f"{profile_text(result)}\n\nruns/only/profile/trace.json.gz: open it at ui.perfetto.dev\n"
    assert lmtrain(*command, "--profile").out == printed
    assert lmtrain("train", *TINY, "--quiet", "run.name=only", "train.steps=1").code == 0, "a run has its profile"
