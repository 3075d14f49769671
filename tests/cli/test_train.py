"""`lmtrain train`: training, resuming, and what trains nothing."""

import json
import re
from pathlib import Path

import pytest

from lmtrain.config.loader import flat
from lmtrain.config.schema import Config
from lmtrain.evaluation.perplexity import Score
from lmtrain.training.finished import Outcome
from tests.helpers import TINY, Lmtrain


def test_train_prints_its_outcome_and_resumes(lmtrain: Lmtrain, workdir: Path) -> None:
    result = lmtrain("train", *TINY, "run.name=again", "--json").json
    assert (result["status"], result["step"], result["run"]) == ("finished", 12, "runs/again")
    first = json.loads((workdir / "runs/sample/state.json").read_text())
    assert result["valid"]["nats"] == first["valid"]["nats"]
    text = lmtrain("train", *TINY, "run.name=again").out
    assert "finished at step 12" in text
    assert "on valid (context 16, stride 4):\n" in text


def test_a_small_vocabulary_prints_no_misleading_figures(lmtrain: Lmtrain, workdir: Path) -> None:
    """Neither on the terminal nor in the metrics."""
    done = lmtrain("train", *TINY, "run.name=small", "tokenizer.vocab_size=20")
    remark = r" \(unknown words: \d\d\.?\d?%\)\n"
    evaluation = r"step \d+ valid:  loss \d\.\d{3}  word perplexity \d+\.\d{3} over \d+ words and line ends"
    assert len(re.findall(evaluation + remark, done.err)) == 3
    assert re.search(rf"word perplexity .*{remark}", done.out)
    lines = [json.loads(line) for line in (workdir / "runs/small/metrics.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines if "word_perplexity" in line] == ["valid"] * 3 + ["final"]
    assert not any("bits_per_byte" in line for line in lines)
    assert "bits per byte" not in lmtrain("eval", "--run", "runs/small").out


def test_dry_run_trains_nothing(lmtrain: Lmtrain, workdir: Path) -> None:
    result = lmtrain("train", *TINY, "run.name=dry", "--dry-run", "--json").json
    assert result["config"]["model"]["dim"] == 16
    assert result["steps"] == 12
    assert not (workdir / "runs/dry").exists()
    text = lmtrain("train", *TINY, "--dry-run").out.partition("---\n")[2]
    assert re.search(r"^model: [\d,]+ parameters, 1 block of width 16, context 16$", text, re.M)
    assert re.search(r"^budget: 12 steps \(768 tokens, 0\.\d+ epochs\)$", text, re.M)
    large = lmtrain("train", *TINY, "model.dim=1000000", "--dry-run").out
    assert re.search(r"^model: [\d,.]+ M parameters, 1 block of width 1000000", large, re.M), "it is not made"


@pytest.mark.parametrize("prefixes", [[], ["model"], ["train.eval_", "eval."]])
def test_fields_lists_all_fields_or_those_of_the_prefixes(lmtrain: Lmtrain, prefixes: list[str]) -> None:
    done = lmtrain("train", "--fields", *prefixes)
    assert (done.code, done.err) == (0, "")
    names = [line.partition("=")[0] for line in done.out.splitlines() if line and not line.startswith(" ")]
    assert names == [name for prefix in prefixes or [""] for name in flat(Config()) if name.startswith(prefix)]


def test_the_next_commands_can_be_pasted_if_a_path_has_a_space(lmtrain: Lmtrain, workdir: Path) -> None:
    done = lmtrain("train", *TINY, "run.dir=my runs")
    assert "--run 'my runs/sample'; tensorboard --logdir 'my runs'\n" in done.err


def test_the_outcome_is_printed_in_its_units(lmtrain: Lmtrain, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    score = Score(nats=10.0, tokens=10, words=10.0, bytes=50.0, context=16, stride=4)
    outcome = Outcome("finished", 12, 1.5, best_step=5, valid=score)
    monkeypatch.setattr("lmtrain.api.train.train_plan", lambda plan: outcome)
    result = lmtrain("train", *TINY, "--json").json
    assert (result["step"], result["best_step"], result["minutes"]) == (12, 5, 1.5)
    text = "finished at step 12 after 1.5 minutes; the best checkpoint, of step 5, on valid"
    assert text in lmtrain("train", *TINY).out
