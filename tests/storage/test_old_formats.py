"""A stored run of each format that was ever written: its content, what it computes, and that it can be resumed.

`python -m tests.stored.make` makes the one of the current format.
"""

import shutil
from pathlib import Path

import pytest

import lmtrain
from lmtrain.api.train import train_plan
from lmtrain.config.loader import differences
from lmtrain.config.schema import BUDGET_FIELDS, CHANGEABLE_FIELDS
from lmtrain.storage import checkpoint, run_checkpoints, run_folder
from lmtrain.training.plan import plan_run
from lmtrain.training.train_state import new_state, restore
from tests.helpers import state_hash
from tests.stored.make import HERE, example, loss
from tests.training.helpers import take_step

STORED: dict[str, tuple[str, float]] = {
    "lmtrain-checkpoint-1": ("adca30f41632f81f72ffa64858833d47cc8a53edc6ce8fff41e987687415060e", 2.852043),
}
"""The state hash of each, and the nats per token that it computes for a text."""


@pytest.mark.parametrize("name", STORED)
def test_a_stored_run_is_read_as_it_was_written(name: str) -> None:
    stored_hash, expected = STORED[name]
    folder = run_checkpoints.choose(HERE / name, "last")
    assert state_hash(checkpoint.load(folder)) == stored_hash
    assert run_checkpoints.best_folder(HERE / name) == folder
    assert loss(HERE / name) == pytest.approx(expected, abs=1e-5)
    assert sum(path.stat().st_size for path in (HERE / name).rglob("*") if path.is_file()) < 50_000


@pytest.mark.parametrize("name", STORED)
def test_a_stored_run_can_be_resumed(name: str, folder: Path) -> None:
    config, store = example()
    shutil.copytree(HERE / name, folder / "run")
    state = new_state(run_folder.run_config(folder / "run"), store)
    stored = checkpoint.load(run_checkpoints.choose(folder / "run", "last"))
    restore(state, stored)
    assert state.step == stored.info["step"] == 10
    assert differences(state.config, config).keys() <= CHANGEABLE_FIELDS | BUDGET_FIELDS
    assert state.ema
    nats = [float(take_step(state, 0.01)[0]) for _ in range(40)]
    assert state.step == 50
    assert sum(nats[-10:]) < sum(nats[:10])


@pytest.mark.parametrize("name", STORED)
def test_a_run_that_does_not_say_what_its_text_was_is_used_with_a_note(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str], notes: list[str]
) -> None:
    _, store = example()
    shutil.copytree(HERE / name, folder / "run")
    score = lmtrain.load("run", checkpoint="last", device="cpu").evaluate(source=Path("text.txt"))
    assert score.tokens == store.split("valid").tokens
    assert "run is of an earlier version: lmtrain can't check that" in capsys.readouterr().err
    assert train_plan(plan_run(None, [], folder / "run")).step == 10
    assert "the run is of an earlier version: lmtrain can't check that its text is unchanged" in notes


def test_every_format_has_its_example() -> None:
    assert checkpoint.FORMAT.replace("/", "-") in STORED
    assert {path.name for path in HERE.iterdir() if path.is_dir() and path.name[0] != "_"} == set(STORED)


@pytest.mark.parametrize(
    ("tokenizer", "size"),
    [
        ("kind: bpe", 16_384),
        ("kind: bpe, vocab_size: 300", 300),
        ("kind: bpe, file: t.json", None),
        ("kind: auto, file: t.json", None),
        ("kind: auto, file: t.json, vocab_size: 100", 100),
        ("kind: word", None),
    ],
)
def test_a_bpe_vocabulary_of_no_stated_size_had_16384_entries(tmp_path: Path, tokenizer: str, size: int | None) -> None:
    (tmp_path / "config.yaml").write_text(f"tokenizer: {{{tokenizer}}}\n")
    assert run_folder.run_config(tmp_path).tokenizer.vocab_size == size
