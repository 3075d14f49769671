"""What may change between the parts of a run: resources, but no field of its identity, and no data."""

from pathlib import Path
from typing import Any

import pytest

from lmtrain.config.loader import flat, load
from lmtrain.config.schema import CHANGEABLE_FIELDS, Config
from lmtrain.data.tokenizing import prepare_store
from lmtrain.data.tokens import TokenStore
from lmtrain.errors import LmtrainError
from lmtrain.storage import checkpoint, run_checkpoints, run_folder
from lmtrain.storage.files import remove_folder
from lmtrain.training.opening import check_same_run
from lmtrain.training.train_state import snapshot
from tests.helpers import TINY
from tests.training.helpers import CIRCUMSTANCES, change, run, start

IDENTITY: dict[str, Any] = {
    "run__seed": 2,
    "model__dim": 32,
    "train__lr": 0.5,
    "train__init_from": "runs/other",
    "train__steps": 24,
}
RESOURCES: dict[str, Any] = {
    "train__micro_batch": 1,
    "train__loss_chunk": 5,
    "train__log_steps": 3,
    "train__keep": 3,
    "train__sample_prompts": ["A"],
    "eval__batch_size": 8,
    "data__dir": "elsewhere",
    "run__name": "other",
}


def begun(config: Config, run_dir: Path) -> checkpoint.Checkpoint:
    """The only checkpoint of a new run."""
    run_folder.create_run(run_dir, config)
    return checkpoint.load(checkpoint.save(run_dir, 1, *snapshot(start(config), None, **CIRCUMSTANCES)))


def test_a_changed_field_of_the_identity_is_rejected_by_name(tiny: Config, store: TokenStore, tmp_path: Path) -> None:
    found = begun(tiny, tmp_path)
    for name, value in IDENTITY.items():
        changed, field = change(tiny, **{name: value}), name.replace("__", ".")
        with pytest.raises(LmtrainError) as rejection:
            check_same_run(changed, store, tmp_path, found)
        difference = f"({field}: {flat(tiny)[field]} -> {flat(changed)[field]})"
        expected = (
            f"{tmp_path} was started with another configuration {difference}: "
            f"give the old values, or train another run with run.name={tmp_path.name}-2"
        )
        if field == "train.steps":
            expected += f"; train.init_from={tmp_path} starts it from the weights of this one"
        assert str(rejection.value) == expected
    with pytest.raises(LmtrainError, match=r"another configuration \(run\.seed: 1 -> 2\)"):
        run(change(tiny, run__seed=2), tmp_path)


def test_a_run_resumes_with_other_resources(tiny: Config, folder: Path) -> None:
    run_dir = folder / "run"
    assert {name.replace("__", ".") for name in RESOURCES} <= CHANGEABLE_FIELDS <= flat(tiny).keys()
    assert run(tiny, run_dir)[0].step == 12
    for later in run_checkpoints.folders(run_dir)[1:]:
        remove_folder(later)
    changed = change(tiny, **RESOURCES)
    assert run(changed, run_dir)[0].step == 12
    assert run_folder.run_config(run_dir) == changed


def test_a_run_with_a_constant_learning_rate_can_be_trained_further(tiny: Config, tmp_path: Path) -> None:
    """To the same weights as a run that had the larger budget from the start."""
    config = change(tiny, train__schedule="constant", train__steps=7)
    assert run(config, tmp_path / "run")[0].step == 7
    larger = change(config, train__steps=12)
    assert run(larger, tmp_path / "run")[0].step == run(larger, tmp_path / "whole")[0].step == 12
    ends = [checkpoint.load(run_checkpoints.choose(tmp_path / name, "last")).info["files"] for name in ("run", "whole")]
    assert ends[0] == ends[1]
    assert run_folder.run_config(tmp_path / "run") == larger
    with pytest.raises(LmtrainError, match=r"\(train\.max_minutes: None -> 9\.0\)"):
        run(change(larger, train__max_minutes=9.0), tmp_path / "run")
    timed = change(config, train__max_minutes=9.0, train__compile=False)
    run(timed, tmp_path / "timed")
    with pytest.raises(LmtrainError, match=r"\(train\.steps: 7 -> 12\)"):
        run(change(timed, train__steps=12), tmp_path / "timed")


TEXT = "the the the cat cat rat\n" * 120


@pytest.mark.parametrize(
    ("kind", "word", "message"), [("word", "cat", "corpus"), ("word", "cow", "tokenizer"), ("byte", "rau", "corpus")]
)
def test_a_changed_word_of_the_text_is_rejected(tmp_path: Path, kind: str, word: str, message: str) -> None:
    """In a file of the same name and size; the word is one that the text contains already, or a new one."""
    text, run_dir = tmp_path / "own.txt", tmp_path / "run"
    config = load(None, [*TINY, f"data.dir={tmp_path / 'data'}", f"data.source={text}", f"tokenizer.kind={kind}"], {})

    def store_of(content: str) -> TokenStore:
        text.write_text(content)
        return prepare_store(config)

    text.write_text(TEXT)
    found = begun(config, run_dir)
    place = TEXT.index("rat", 400)
    with pytest.raises(LmtrainError, match=f"the {message} is not the one"):
        check_same_run(config, store_of(TEXT[:place] + word + TEXT[place + 3 :]), run_dir, found)
    check_same_run(config, store_of(TEXT), run_dir, found)
