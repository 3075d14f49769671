"""What may change between the parts of a run: resources, but no other field of the configuration, and no data."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from lmtrain.config.loader import flat, identity_difference, load, parse
from lmtrain.config.schema import RESOURCE_FIELDS, Config
from lmtrain.data.corpus import download
from lmtrain.data.tokenizing import tokenize
from lmtrain.data.tokens import TokenStore, open_store
from lmtrain.errors import LmtrainError
from lmtrain.storage import checkpoint, run_checkpoints, run_folder
from lmtrain.storage.files import remove_folder
from lmtrain.training.opening import check_same_run
from lmtrain.training.state import snapshot
from tests.helpers import TINY
from tests.training.helpers import change, flip_bit, run, silent, start

pytestmark = pytest.mark.usefixtures("one_thread")

IDENTITY: dict[str, Any] = {
    "run__seed": 2,
    "tokenizer__kind": "byte",
    "model__mode": "windowed",
    "model__dim": 32,
    "model__dropout": 0.2,
    "train__batch_size": 8,
    "train__steps": 13,
    "train__lr": 0.5,
    "train__optimizer": "muon",
    "train__ema": None,
    "train__eval_steps": 6,
    "train__patience": 3,
    "train__init_from": "runs/other",
}
RESOURCES: dict[str, Any] = {
    "train__micro_batch": 1,
    "train__loss_chunk": 5,
    "train__log_steps": 3,
    "train__keep": 3,
    "train__sample_prompts": ["A"],
    "train__threads": 2,
    "eval__batch_size": 8,
    "data__dir": "elsewhere",
    "run__name": "other",
}


@pytest.fixture(scope="module")
def started(tiny: Config, store: TokenStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with one checkpoint."""
    run_dir = tmp_path_factory.mktemp("started")
    run_folder.create_run(run_dir, tiny, store.folder / run_folder.TOKENIZER)
    save(tiny, store, run_dir)
    return run_dir


def save(config: Config, store: TokenStore, run_dir: Path) -> None:
    checkpoint.save(run_dir, 1, *snapshot(start(config, store), store, None, {"seconds": 1.0, "metrics_bytes": 0}))


def check(config: Config, store: TokenStore, run_dir: Path) -> None:
    check_same_run(config, store, run_dir, checkpoint.load(run_checkpoints.choose(run_dir, "last")))


def test_every_field_but_the_resources_is_part_of_the_identity(tiny: Config) -> None:
    assert flat(tiny).keys() > RESOURCE_FIELDS
    assert {name.replace("__", ".") for name in RESOURCES} <= RESOURCE_FIELDS
    assert not {name.replace("__", ".") for name in IDENTITY} & RESOURCE_FIELDS


@pytest.mark.parametrize("name", IDENTITY)
def test_a_field_of_the_identity_is_rejected_by_name(tiny: Config, store: TokenStore, started: Path, name: str) -> None:
    changed, field = change(tiny, **{name: IDENTITY[name]}), name.replace("__", ".")
    with pytest.raises(LmtrainError) as rejection:
        check(changed, store, started)
    assert f"{field}: {flat(tiny)[field]} -> {flat(changed)[field]}" in str(rejection.value)
    assert "choose another run.name, or give the old values" in str(rejection.value)
    assert str(started) in str(rejection.value)
    assert len(identity_difference(tiny, changed)) == 1


def test_a_run_resumes_with_other_resources(tiny: Config, store: TokenStore, tmp_path: Path) -> None:
    assert run(tiny, store, tmp_path)[0].step == 12
    for folder in run_checkpoints.folders(tmp_path)[1:]:
        remove_folder(folder)
    changed = change(tiny, **RESOURCES | {"train__threads": 1})
    assert run(changed, store, tmp_path)[0].step == 12
    assert run_folder.run_config(tmp_path) == changed


TEXT = "the the the cat cat rat\n" * 120


def own(tmp_path: Path, **tokenizer: str) -> Config:
    """A configuration on a text of the test's own."""
    (tmp_path / "own.txt").write_text(TEXT)
    places = [
        f"data.dir={tmp_path / 'data'}",
        f"data.source={tmp_path / 'own.txt'}",
        "train.steps=2",
        "tokenizer.kind=word",
    ]
    config = load(None, [*TINY, *places], {})
    return parse(config.model_dump(mode="json") | {"tokenizer": tokenizer}, "test") if tokenizer else config


def store_of(config: Config) -> TokenStore:
    return tokenize(download(config.data), config.tokenizer, config.data.dir, note=silent, progress=False)


@pytest.mark.parametrize(("word", "message"), [("cat", "corpus is not the one"), ("cow", "tokenizer is not the one")])
def test_one_changed_word_of_the_text_is_rejected(tmp_path: Path, word: str, message: str) -> None:
    """In a file of the same name and size; the word is one that the text contains already, or a new one."""
    config, text = own(tmp_path), tmp_path / "own.txt"
    assert run(config, store_of(config), tmp_path / "run")[0].step == 2
    place = TEXT.index("rat", 400)
    text.write_text(TEXT[:place] + word + TEXT[place + 3 :])
    with pytest.raises(LmtrainError, match=message):
        run(config, store_of(config), tmp_path / "run")
    text.write_text(TEXT)
    assert run(config, store_of(config), tmp_path / "run")[0].step == 2


def test_one_changed_byte_is_rejected(tmp_path: Path) -> None:
    """Of the text with a byte tokenizer, and of the stored tokens."""
    config, run_dir = own(tmp_path, kind="byte"), tmp_path / "run"
    store = store_of(config)
    run_folder.create_run(run_dir, config, store.folder / run_folder.TOKENIZER)
    save(config, store, run_dir)
    check(config, store, run_dir)
    for path in sorted(store.folder.glob("*.npy")):
        flip_bit(path)
        with pytest.raises(LmtrainError, match=path.name):
            open_store(store.folder)
        flip_bit(path)
    assert open_store(store.folder).sha256 == store.sha256
    flip_bit(tmp_path / "own.txt", 500)
    with pytest.raises(LmtrainError, match="corpus is not the one"):
        check(config, store_of(config), run_dir)


def test_another_tokenizer_of_the_same_size_is_rejected(tiny: Config, store: TokenStore, started: Path) -> None:
    tokenizer = store.tokenizer
    words = [tokenizer.token(index) for index in range(tokenizer.vocab_size)]
    words[-1], words[-2] = words[-2], words[-1]
    swapped = type(tokenizer)("word", {word: index for index, word in enumerate(words)}, [], b"its file")
    with pytest.raises(LmtrainError, match="the tokenizer is not the one"):
        check(tiny, dataclasses.replace(store, tokenizer=swapped), started)
