"""The configuration: its sources and their order, what is rejected, and what the messages name."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from lmtrain.config import loader as config
from lmtrain.config.earlier import REMOVED
from lmtrain.config.schema import Config
from lmtrain.errors import LmtrainError, UsageError
from lmtrain.storage.run_folder import run_config

CONFIGS = sorted((Path(__file__).parents[2] / "configs").rglob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_shipped_configuration_loads_and_round_trips(path: Path) -> None:
    loaded = config.load(path, environment={})
    assert config.load(yaml.safe_load(config.dump(loaded)), environment={}) == loaded


@pytest.mark.usefixtures("folder")
def test_a_folder_does_not_hide_the_recipe_of_its_name() -> None:
    """As in the folder of runs, which are named after their recipes."""
    Path("wikitext2-cpu").mkdir()
    assert config.load(Path("wikitext2-cpu"), [], {}).train.max_minutes == 10


def test_later_sources_win(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("model:\n  dim: 64\n  layers: 1\n  context: 16\n")
    loaded = config.load(
        path, ["model.dim=32"], {"LMTRAIN_MODEL__DIM": "48", "LMTRAIN_MODEL__LAYERS": "2", "OTHER": "x"}
    )
    assert (loaded.model.context, loaded.model.layers, loaded.model.dim) == (16, 2, 32)


@pytest.mark.parametrize("text", ["2026-11-22", "2026-22-11", "12", "1234567", "12345e7", "1.50", "true", "1:30"])
def test_a_text_may_look_like_a_number_or_a_date(text: str, tmp_path: Path) -> None:
    """A shell removes quotes, so the command line can't tell text from numbers; a file can."""
    keys = ["data.source", "data.revision", "data.dir", "train.init_from"]
    keys += ["run.name"] if ":" not in text else []
    loaded = config.load(None, [f"{key}={text}" for key in keys], {})
    found = config.flat(loaded)
    assert [found[key] for key in keys] == [text] * len(keys)
    assert config.load(None, [f"train.teacher={text}"], {}).train.teacher == (Path(text),)
    assert config.load(None, [], {"LMTRAIN_DATA__DIR": text}).data.dir == Path(text)
    path = tmp_path / "c.yaml"
    path.write_text(f"data:\n  revision: {text}\n")
    if text.startswith("2026-") or ":" in text:
        assert config.load(path, [], {}).data.revision == text
    else:
        with pytest.raises(LmtrainError, match=r"data\.revision=.*in quotes"):
            config.load(path, [], {})
    assert config.load(None, ["data.revision=null"], {}).data.revision is None


def test_a_message_names_the_source_of_the_value(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("model:\n  dim: wide\n  dimm: 3\n")
    with pytest.raises(LmtrainError) as caught:
        config.load(path, ["model.heads=many", "modell.x=1", "model.dim=wider"], {"LMTRAIN_MODEL__LAYERZ": "1"})
    assert sorted(str(caught.value).split("; ")) == sorted(
        [
            "the command line: model.dim='wider': should be a valid integer, unable to parse string as an integer",
            "the command line: model.heads='many': should be a valid integer, unable to parse string as an integer",
            f"{path}: unknown field model.dimm",
            "did you mean model.dim (Width of the residual stream)?",
            "LMTRAIN_MODEL__LAYERZ: unknown field model.layerz",
            "did you mean model.layers (Encoder blocks below the attention pool)?",
            "the command line: unknown section modell",
            "did you mean model?",
        ]
    )
    with pytest.raises(
        LmtrainError, match=r"^LMTRAIN_MODEL_DIM: a field is .* LMTRAIN_SECTION__FIELD in the environment"
    ):
        config.load(None, [], {"LMTRAIN_MODEL_DIM": "8"})
    path.write_text("model: {dim: 7, position: none}")
    together = {  # if several fields conflict, the one that was set outside the file
        "model.heads=2": "the command line: model.dim=7 is not divisible by model.heads=2",
        "model.attention=foo": "the command line: model.attention=foo: choose among",
        "train.lr=1e20": "the command line: train.lr=1e+20: a number may not be larger than",
        "data.source='http://a'": "the command line: data.source is a URL",
    }
    for override, message in together.items():
        with pytest.raises(LmtrainError, match=re.escape(message)):
            config.load(path, [*(["model.heads=7"] if "heads" not in override else []), override], {})
    path.write_text("model: {heads: 2}")
    odd = "model.position=rotary needs an even width per head, and model.dim=10 / model.heads=2 is 5"
    with pytest.raises(LmtrainError, match=f"^the command line: {odd}$"):
        config.load(path, ["model.dim=10"], {})
    path.write_text("model: {heads: 2, dim: 10}")
    with pytest.raises(LmtrainError, match=f"^{path}: {odd}$"):
        config.load(path, ["model.layers=1"], {})
    with pytest.raises(
        LmtrainError, match=r"^LMTRAIN_EVAL__STRIDE: eval\.stride=999 is longer than model\.context=128$"
    ):
        config.load(None, [], {"LMTRAIN_EVAL__STRIDE": "999"})


def test_a_removed_field_is_ignored_in_a_stored_run_only(tmp_path: Path) -> None:
    """A run that an earlier version stored has every field of that version."""
    path = tmp_path / "config.yaml"
    for section, fields in REMOVED.items():
        path.write_text(yaml.safe_dump({section: dict.fromkeys(fields, 6.5), "run": {"seed": 7}}))
        assert run_config(tmp_path) == config.load(None, ["run.seed=7"], {})
        with pytest.raises(UsageError, match=rf"{section}\.{fields[0]}"):
            config.load(path, environment={})
    path.write_text("train: {parallel: auto}")
    assert run_config(tmp_path) == Config()


def test_the_sections_of_the_caller_remain_as_they_were() -> None:
    sections = {"eval": {"batch_size": 4}}
    assert config.load(sections, ["eval.stride=7"], {}).eval.stride == 7
    assert sections == {"eval": {"batch_size": 4}}


def test_sections_from_python_may_hold_paths() -> None:
    sections: dict[str, dict[str, object]] = {
        "data": {"source": Path("book.txt"), "dir": Path("texts")},
        "train": {"teacher": [Path("runs/a")]},
    }
    loaded = config.load(sections, [], {})
    assert (loaded.data.source, loaded.data.dir, loaded.train.teacher) == ("book.txt", Path("texts"), (Path("runs/a"),))


@pytest.mark.parametrize(
    ("text", "paths"),
    [("null", []), ("[]", []), ("runs/a", ["runs/a"]), ("[runs/a, 'b, c']", ["runs/a", "b, c"]), ("'[a]'", ["[a]"])],
)
def test_teachers_are_a_path_or_a_list_of_paths(text: str, paths: list[str], tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(f"train:\n  teacher: {text}\n")
    for loaded in (config.load(path, [], {}), config.load(None, [f"train.teacher={text}"], {})):
        assert loaded.train.teacher == tuple(map(Path, paths))
        path.write_text(config.dump(loaded))
        assert config.load(path, [], {}) == loaded


def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    places = config.load(None, ["data.dir=~/data", "run.dir='~'", "train.teacher=~/a", "data.source=~/b"])
    found = (places.data.dir, places.run.dir, *places.train.teacher)
    assert found == (tmp_path / "data", tmp_path, tmp_path / "a")
    with pytest.raises(LmtrainError, match=r"data\.dir='~nobody-here/x'.*home directory"):
        config.load(None, ["data.dir=~nobody-here/x"])


def test_overrides_are_single_values() -> None:
    loaded = config.load(None, ["train.lr=1e-3", "train.clip=null", "train.sample_prompts=[a, 'b #c']"], {})
    assert (loaded.train.lr, loaded.train.clip, loaded.train.sample_prompts) == (1e-3, None, ("a", "b #c"))
    texts = {
        "a#b": "a#b",
        "a #b: c": "a #b: c",
        "[a]": "[a]",
        "'null'": "null",
        '"a\\tb"': "a\tb",
        "null": None,
        "": None,
    }
    for text, value in texts.items():
        assert config.load(None, [f"data.revision={text}"], {}).data.revision == value
        assert config.load(None, [], {"LMTRAIN_DATA__REVISION": text}).data.revision == value


@pytest.mark.parametrize(("text", "dim"), [("0100", 100), ("010", 10), ("+64", 64)])
def test_a_leading_zero_does_not_make_a_number_octal(text: str, dim: int, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(f"model: {{dim: {text}, heads: 1}}")
    assert config.load(path, [], {}).model.dim == dim
    assert config.load(None, ["model.heads=1", f"model.dim={text}"], {}).model.dim == dim


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.dim=0", "model.dim=0: should be greater than or equal to 1$"),
        ("model.dim=null", "model.dim=None: should be a valid integer$"),
        ("model.heads=256", "needs an even width per head"),
        ("model.dropout=1", "model.dropout=1: should be less than 1$"),
        ("train.loss_chunk=0", "train.loss_chunk=0: should be greater than or equal to 1 or should be 'auto'$"),
        ("data.source=", "data.source=None: should be a string"),
        ("data.source=''", "data.source='': String should have at least 1 character$"),
        ("model.output_cutoffs=[a]", "^the command line: model.output_cutoffs.0='a': should be a valid integer"),
        ("train.sample_prompts=The", r"train.sample_prompts='The': should be a list, as in \[a, b\]$"),
        ("model.dim=64 # wide", "model.dim='64 # wide'"),
        ("train.sample_prompts=[a #b]", "not valid YAML"),
        ("train.lr=nan", "train.lr='nan': should be a finite number$"),
        ("train.patience=true", "train.patience=True: a number is needed"),
        ("model.output_cutoffs=[true, 5]", r"model.output_cutoffs=\[True, 5\]: a number is needed"),
        ("train.micro_batch=5", "is not divisible by train.micro_batch=5"),
        ("tokenizer.kind=words", "tokenizer.kind='words': should be 'word', 'bpe' or 'byte'$"),
        ("run.name=../escape", "run.name"),
        ("model.dim", "not of the form"),
        ("configs/a.yaml", "section.field=value; .* a configuration file after -c$"),
        ("train=5", "section.field=value, or .*; `lmtrain train --fields train` lists the fields of train$"),
        ("model.dim=[1", "not valid YAML"),
    ],
)
def test_a_wrong_override_is_named(override: str, message: str) -> None:
    with pytest.raises(LmtrainError, match=message):
        config.load(None, [override], {})


def test_only_the_first_argument_may_be_a_text() -> None:
    with pytest.raises(UsageError, match=r"^override 'book.txt' is not of the form .*; a source comes before"):
        config.load(None, config.with_source(["model.dim=16", "book.txt"]), {})
    assert config.load(None, config.with_source(["./a=b.txt"]), {}).data.source == "./a=b.txt"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["train.epochs=1", "train.tokens=1"],
            "train.epochs and train.tokens contradict each other: give one, and set the others to null",
        ),
        (["tokenizer.kind=byte", "tokenizer.vocab_size=300"], "no meaning with tokenizer.kind=byte"),
        (["tokenizer.kind=bpe", "tokenizer.vocab_size=100"], "at least 257"),
        (["model.mode=windowed", "eval.stride=2"], "windowed"),
        (["model.attention=linformer"], "model.attention=linformer can't be causal"),
        (
            ["model.mode=windowed", "model.layers=2", "model.attention=[linformer, global]", "model.position=learned"],
            "linformer and global don't go together",
        ),
        (["model.attention=[full,local]"], "model.attention names 2 layers, and model.layers=4"),
        (["model.attention=sparse"], "model.attention=sparse: choose among full, local"),
        (["model.attention=full+local"], "a union is made of local, strided and global"),
        (["model.attention=local+local"], "each once"),
        (["model.attention=linear+local"], "a union is made of"),
        (["model.attention=linear", "model.position=alibi"], "model.position=alibi is a bias on attention scores"),
        (["model.attention=induced", "model.mode=windowed"], "inducing points have none"),
        (["model.position=sinusoidal", "model.dim=7", "model.heads=1"], "sinusoidal needs an even model.dim, not 7"),
        (["tokenizer.eos_token=</s>"], "tokenizer.eos_token is a token of tokenizer.file: give the file"),
        (["train.warmup=1", "train.max_minutes=1"], r"train.warmup=1 is a number of steps, .* follows the clock"),
    ],
)
def test_a_contradiction_is_named(overrides: list[str], message: str) -> None:
    with pytest.raises(LmtrainError, match=message):
        config.load(None, overrides, {})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"just text", "must hold sections"),
        (b"model: 5", "model=5: a section holds one `field: value` per line"),
        (b"\xff\xfe", "not UTF-8"),
        (b"a: &a [x, x]\nb: &b [*a, *a]", "aliases"),
        (b"model:\n  dim: 64\n  dim: 128", "line 3: duplicate key dim"),
        (b"model: !!python/object/apply:os.system ['true']", "line 1: aliases .* and tags .* are not allowed"),
        (b"[" * 5000, "not valid YAML"),
        (b"model:\n  dim: 123456789123456789123456789123456789", "model.dim"),
        (b"1: 2", "must hold sections"),
        (b"run: {? [a] : 1}", "found unhashable key"),
        (b"run: {seed: " + b"9" * 5000 + b"}", "should be a finite number"),
        (b"train: {lr: " + b"1:" * 200 + b"0.5}", "train.lr='1:1:1.*should be a valid number"),
        (b"train: {steps: 1099511627777}", "train.steps=.*larger than 2\\*\\*40"),
        (b'run: {dir: "a\\0b"}', "run.dir=.*: contains a NUL byte, or a character that this locale"),
        (b'data: {dir: "a\\ud800b"}', "data.dir=.*: contains a NUL byte, or a character that this locale"),
        (b"".join(b"k%d: 1\n" % number for number in range(5_000)), "and 4995 more$"),
        (b"#" * (config.MAX_FILE_BYTES + 1), "larger than 256 KiB"),
    ],
    ids=range(17),
)
def test_a_bad_file_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_bytes(content)
    with pytest.raises(LmtrainError, match=message) as caught:
        config.load(path, environment={})
    assert len(str(caught.value)) < 2_000


def test_a_missing_file_is_named_and_an_empty_one_has_the_defaults(tmp_path: Path) -> None:
    with pytest.raises(LmtrainError, match="does not exist"):
        config.load(tmp_path / "none.yaml", environment={})
    with pytest.raises(LmtrainError, match=r"can't be read: it is not a regular file$"):
        config.load(tmp_path, environment={})
    (tmp_path / "empty.yaml").touch()
    assert config.load(tmp_path / "empty.yaml", environment={}) == Config()


@pytest.mark.usefixtures("folder")
def test_a_file_takes_precedence_over_the_recipe_of_its_name() -> None:
    recipe = config.load(Path("quickstart"), [], {})
    Path("quickstart").write_text("model: {dim: 64}")
    assert config.load(Path("quickstart"), [], {}).model.dim == 64 != recipe.model.dim


@pytest.mark.parametrize(
    "sections",
    [
        {"\ud800": {}},
        {"model": {"\ud800": 1}},
        {"data": {"text_column": "\ud800"}},
        {"model": {"attention": "\ud800"}},
        {"train": {"sample_prompts": ["The", "\ud800"]}},
    ],
)
def test_a_text_that_is_not_unicode_is_rejected(sections: dict[str, dict[str, Any]]) -> None:
    with pytest.raises(UsageError, match="a text has a lone surrogate, which is not a character"):
        config.load(sections, [], {})


def test_a_field_of_what_is_no_section_is_named() -> None:
    with pytest.raises(UsageError, match=r"^override model\.dim: model is not a section$"):
        config.load({"model": 5}, ["model.dim=3"], {})  # type: ignore[dict-item]
