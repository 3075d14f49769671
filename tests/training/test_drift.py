"""What may change under a run: each field of a configuration is refused by its name or accepted; data never may."""

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
from lmtrain.storage import checkpoint
from lmtrain.storage.files import remove_folder
from lmtrain.training.loop import fit
from lmtrain.training.state import check_same_run, prepare, snapshot
from tests.conftest import TINY

OTHER: dict[str, dict[str, Any]] = {
    "run": {"name": "other", "dir": "elsewhere", "seed": 2},
    "data": {
        "source": "wikitext-2",
        "subset": "part",
        "revision": "main",
        "text_column": "line",
        "sources": [{"source": "sample", "weight": 2}],
        "dir": "elsewhere",
        "sample_tokens": 4000,
    },
    "tokenizer": {"kind": "byte", "vocab_size": 50, "file": "runs/other/tokenizer.json"},
    "model": {
        "mode": "windowed",
        "context": 24,
        "dim": 32,
        "embed_dim": 8,
        "layers": 2,
        "heads": 4,
        "ff_dim": 16,
        "activation": "relu",
        "norm": "layer",
        "norm_position": "post",
        "attention": "linear",
        "attention_window": 5,
        "attention_stride": 5,
        "attention_globals": 5,
        "compression": 5,
        "projected_length": 5,
        "inducing_points": 5,
        "qk_norm": True,
        "position": "learned",
        "pool_query": "seed",
        "pool_residual": "seed",
        "copy": True,
        "output": "adaptive",
        "output_cutoffs": [5, 9],
        "tie_embeddings": False,
        "output_bias": False,
        "dropout": 0.2,
        "attention_dropout": 0.2,
        "input_dropout": 0.2,
        "output_dropout": 0.2,
    },
    "train": {
        "device": "auto",
        "precision": "bf16",
        "compile": False,
        "threads": 2,
        "parallel": "fsdp",
        "timeout_minutes": 3.0,
        "activation_checkpointing": True,
        "batch_size": 8,
        "micro_batch": 1,
        "loss_chunk": 5,
        "steps": 13,
        "epochs": 2.0,
        "max_minutes": 1.0,
        "optimizer": "muon",
        "lr": 0.5,
        "schedule": "wsd",
        "warmup": 0.5,
        "decay": 0.5,
        "final_lr": 0.5,
        "weight_decay": 0.5,
        "embedding_weight_decay": 0.5,
        "beta1": 0.5,
        "beta2": 0.5,
        "eps": 0.5,
        "clip": None,
        "token_noise": 0.5,
        "init_from": "runs/other",
        "teacher": "runs/other",
        "teacher_weight": 0.25,
        "ema": None,
        "log_steps": 3,
        "eval_steps": 6,
        "eval_epochs": 1.0,
        "eval_tokens": 100,
        "patience": 3,
        "save_minutes": 1.0,
        "keep": 3,
        "sample_prompts": ["A"],
        "sample_tokens": 4,
    },
    "eval": {
        "stride": 8,
        "batch_size": 8,
        "temperature": 1.1,
        "cache_weight": 0.5,
        "cache_theta": 5.0,
        "cache_window": 50,
        "dynamic_rule": "sgd",
        "dynamic_lr": 0.5,
        "dynamic_embedding": 2.0,
        "dynamic_decay": 0.5,
    },
}
"""Another value for each field; none is what the tests' configuration has."""
FIELDS = [f"{section}.{field}" for section, fields in OTHER.items() for field in fields]
ALONE = {"train.epochs": "train.steps", "train.eval_epochs": "train.eval_steps"}
"""Fields that can't be given beside another one."""


def other(config: Config, name: str) -> Config:
    """The configuration with one field changed, and where need be another one left out."""
    values = config.model_dump(mode="json")
    section, _, field = name.partition(".")
    values[section][field] = OTHER[section][field]
    if name in ALONE:
        values[section][ALONE[name].partition(".")[2]] = None
    return parse(values, "test")


@pytest.fixture(scope="module")
def started(tiny: Config, store: TokenStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run at its first checkpoint."""
    run_dir = tmp_path_factory.mktemp("started")
    checkpoint.create_run(run_dir, tiny, store.folder / checkpoint.TOKENIZER)
    training = prepare(tiny, store, lambda message: None)
    checkpoint.save(run_dir, 1, *snapshot(training, store, None, {"seconds": 1.0, "metrics_bytes": 0}))
    return run_dir


def check(config: Config, store: TokenStore, run_dir: Path) -> None:
    check_same_run(config, store, run_dir, checkpoint.load(checkpoint.choose(run_dir, "last")))


def test_the_table_names_every_field_and_changes_it(tiny: Config) -> None:
    old = flat(tiny)
    assert sorted(FIELDS) == sorted(old)
    assert [name for name in FIELDS if flat(other(tiny, name))[name] == old[name]] == []


@pytest.mark.parametrize("name", sorted(set(FIELDS) - RESOURCE_FIELDS))
def test_a_field_of_the_identity_is_refused_by_name(tiny: Config, store: TokenStore, started: Path, name: str) -> None:
    changed = other(tiny, name)
    with pytest.raises(LmtrainError) as refusal:
        check(changed, store, started)
    message = str(refusal.value)
    assert f"{name}: {flat(tiny)[name]} -> {flat(changed)[name]}" in message
    assert "choose another run.name, or give the old values" in message
    assert str(started) in message
    assert len(identity_difference(tiny, changed)) == (2 if name in ALONE else 1)


@pytest.mark.parametrize("name", sorted(RESOURCE_FIELDS))
def test_a_resource_may_change(tiny: Config, store: TokenStore, started: Path, name: str) -> None:
    changed = other(tiny, name)
    check(changed, store, started)
    assert changed != tiny


def test_a_run_goes_on_with_other_resources_and_not_with_another_identity(
    tiny: Config, store: TokenStore, tmp_path: Path
) -> None:
    def go_on(config: Config) -> int:
        return fit(config, store, tmp_path, resume=True, note=lambda message: None, quiet=True).step

    assert go_on(tiny) == 12
    for checkpoints in checkpoint.folders(tmp_path)[1:]:
        remove_folder(checkpoints)
    for name in ("model.dim", "train.lr", "train.steps", "run.seed"):
        with pytest.raises(LmtrainError, match=name):
            go_on(other(tiny, name))
    changed = tiny
    resources = ("micro_batch", "loss_chunk", "log_steps", "keep", "sample_prompts")
    for name in (*(f"train.{resource}" for resource in resources), "eval.batch_size"):
        changed = other(changed, name)
    assert go_on(changed) == 12
    assert checkpoint.run_config(tmp_path) == changed


TEXT = "the the the cat cat rat\n" * 120


@pytest.fixture
def own(tmp_path: Path) -> Config:
    """A configuration on a text of the test's own."""
    (tmp_path / "own.txt").write_text(TEXT)
    return load(None, [*TINY, f"data.dir={tmp_path / 'data'}", f"data.source={tmp_path / 'own.txt'}"], {})


def store_of(config: Config) -> TokenStore:
    corpus = download(config.data)
    return tokenize([corpus], config.tokenizer, config.data.dir, note=lambda message: None, progress=False)


@pytest.mark.parametrize(("word", "message"), [("cat", "corpus is not the one"), ("cow", "tokenizer is not the one")])
def test_one_changed_word_of_a_text_is_refused(own: Config, tmp_path: Path, word: str, message: str) -> None:
    """A file of the same name and size; the new word is one that the text has already, or a new one."""

    def go_on() -> int:
        config = own.model_copy(update={"train": own.train.model_copy(update={"steps": 2})})
        return fit(config, store_of(own), tmp_path / "run", resume=True, note=lambda _: None, quiet=True).step

    assert go_on() == 2
    place, text = TEXT.index("rat", 400), (tmp_path / "own.txt")
    text.write_text(TEXT[:place] + word + TEXT[place + 3 :])
    assert text.stat().st_size == len(TEXT)
    with pytest.raises(LmtrainError, match=message):
        go_on()
    text.write_text(TEXT)
    assert go_on() == 2


def test_one_changed_byte_of_a_text_is_refused(own: Config, tmp_path: Path) -> None:
    config = parse(own.model_dump(mode="json") | {"tokenizer": {"kind": "byte"}}, "test")
    checkpoint.create_run(tmp_path / "run", config, store_of(config).folder / checkpoint.TOKENIZER)
    store = store_of(config)
    parts = snapshot(prepare(config, store, lambda _: None), store, None, {"seconds": 1.0, "metrics_bytes": 0})
    checkpoint.save(tmp_path / "run", 1, *parts)
    check(config, store, tmp_path / "run")
    text = tmp_path / "own.txt"
    content = bytearray(text.read_bytes())
    content[500] ^= 1
    text.write_bytes(content)
    with pytest.raises(LmtrainError, match="corpus is not the one"):
        check(config, store_of(config), tmp_path / "run")


def test_one_changed_byte_of_the_tokens_is_refused(own: Config) -> None:
    store = store_of(own)
    for path in sorted(store.folder.glob("*.npy")):
        honest = path.read_bytes()
        path.write_bytes(honest[:-1] + bytes([honest[-1] ^ 1]))
        with pytest.raises(LmtrainError, match=path.name):
            open_store(store.folder)
        path.write_bytes(honest)
    assert open_store(store.folder).sha256 == store.sha256


def test_another_tokenizer_of_the_same_size_is_refused(tiny: Config, store: TokenStore, started: Path) -> None:
    tokenizer = store.tokenizer
    words = [tokenizer.token(index) for index in range(tokenizer.vocab_size)]
    words[-1], words[-2] = words[-2], words[-1]
    vocabulary = {word: index for index, word in enumerate(words)}
    swapped = type(tokenizer)("word", vocabulary, [], b"its file")
    with pytest.raises(LmtrainError, match="the tokenizer is not the one"):
        check(tiny, dataclasses.replace(store, tokenizer=swapped), started)
