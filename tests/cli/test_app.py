"""The five commands as a user types them, and every mistake that a user can make with them."""

import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
import yaml

from lmtrain.cli import app as cli
from tests.conftest import TINY, Lmtrain


def test_version_help_and_no_arguments(lmtrain: Lmtrain) -> None:
    assert lmtrain("--version").out.startswith("lmtrain 0")
    for arguments in (["-h"], ["--help"], ["train", "-h"]):
        done = lmtrain(*arguments)
        assert done.code == 0
        assert "Usage: lmtrain" in done.out
    assert lmtrain().code == 2


WRONG_USAGE = [
    ["trian"],
    ["train", "--confg", "x"],
    ["eval", "--stride", "x"],
    ["eval", "--precision", "fp12"],
    ["generate", "x", "--device", "tpu"],
]


@pytest.mark.parametrize("arguments", WRONG_USAGE, ids=" ".join)
def test_wrong_usage_exits_with_two(lmtrain: Lmtrain, arguments: list[str]) -> None:
    done = lmtrain(*arguments)
    assert done.code == 2
    assert done.out == ""
    assert "Error" in done.err


def test_download_and_tokenize(lmtrain: Lmtrain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = tmp_path / "corpus"
    text.mkdir()
    (text / "train.txt").write_text("a b c\nb c d\n")
    (text / "valid.txt").write_text("a z\n")
    done = lmtrain("download", text, "--json")
    assert done.code == 0
    assert json.loads(done.out)["splits"]["train"]["words"] == 6
    assert "no test split" in done.err
    done = lmtrain("tokenize", text, "--json")
    result = json.loads(done.out)
    assert result["vocab_size"] == 6
    assert result["splits"]["train"]["tokens"] == 8
    again = lmtrain("tokenize", text)
    assert "8" in again.out
    assert "training a" not in again.err


def test_a_column_can_be_named_at_every_step(lmtrain: Lmtrain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.jsonl").write_text('{"body": "a b c"}\n' * 100)
    done = lmtrain("tokenize", "own.jsonl")
    assert (done.code, "set data.text_column or --text-column to one of its columns (body)" in done.err) == (1, True)
    assert lmtrain("download", "own.jsonl", "--text-column", "body").code == 0
    assert lmtrain("tokenize", "own.jsonl", "--text-column", "body").code == 0


def test_options_are_taken_as_they_are_written(
    lmtrain: Lmtrain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A revision of digits alone, and a path that is no YAML."""
    monkeypatch.chdir(tmp_path)
    text = tmp_path / "a: b #1 [é].txt"
    text.write_text("a b c\n" * 100)
    done = lmtrain("download", text.name, "--revision", "1234567", "--subset", "null", "--data-dir", "0x10")
    assert (done.code, done.err.count("lmtrain: data.")) == (0, 0)
    assert lmtrain("tokenize", text.name, "--data-dir", "0x10", "--kind", "bpe", "--vocab-size", "260").code == 0
    assert len(list((tmp_path / "0x10").iterdir())) == 2


def test_eval_of_a_copied_run(lmtrain: Lmtrain, workdir: Path) -> None:
    done = lmtrain("eval", "--json")
    assert done.code == 0, done.err
    result = json.loads(done.out)
    state = json.loads((workdir / "runs/default/state.json").read_text())
    assert result["word_perplexity"] == pytest.approx(state["valid"]["word_perplexity"], rel=1e-5)
    assert (result["weights"], result["context"], result["stride"], result["split"]) == ("ema", 16, 4, "valid")
    raw = json.loads(lmtrain("eval", "--json", "--weights", "raw", "--batch-size", "3").out)
    assert raw["nats"] != result["nats"]
    rounded = json.loads(lmtrain("eval", "--json", "--precision", "int8").out)
    assert (rounded["precision"], result["precision"]) == ("int8", "fp32")
    assert rounded["nats"] != result["nats"]
    assert rounded["word_perplexity"] == pytest.approx(result["word_perplexity"], rel=0.02)
    text = lmtrain("eval", "--split", "test", "--stride", "16", "--checkpoint", "last").out
    assert "word perplexity" in text
    assert "(floor " in text
    assert "context 16, stride 16" in text


def test_a_text_is_scored_as_the_split_that_it_was_by_the_run_alone(lmtrain: Lmtrain, workdir: Path) -> None:
    """The file of the validation split gives the split's own figures, though the data is gone and the run elsewhere."""
    plain = json.loads(lmtrain("eval", "--json").out)
    adapted = ["--cache", "--dynamic", "--limit", "200"]
    both = json.loads(lmtrain("eval", "--json", *adapted).out)
    (text,) = (workdir / "data").glob("sample-*/valid.txt")
    text = text.rename(workdir / "own.txt")
    found = json.loads(lmtrain("eval", "--json", "--text", text, *adapted).out)
    assert (found.pop("text"), both.pop("split")) == (str(text), "valid")
    assert found == both
    shutil.rmtree(workdir / "data")
    moved = (workdir / "runs/default").rename(workdir / "elsewhere")
    done = lmtrain("eval", "--json", "--run", moved, "--text", text)
    found = json.loads(done.out)
    assert (found.pop("text"), plain.pop("split")) == (str(text), "valid")
    assert (found.pop("run"), plain.pop("run")) == (str(moved), "runs/default")
    assert found == plain


def test_bits_per_byte_are_those_of_text_whose_bytes_were_predicted(lmtrain: Lmtrain, workdir: Path) -> None:
    """`<unk>` in the text is a word like others; where it stands for other words, their share is named instead."""
    (train,) = (workdir / "data").glob("sample-*/train.txt")
    known = "".join(train.read_text().splitlines(keepends=True)[:20])
    tokens = len(known.split()) + known.count("\n")
    (workdir / "own.txt").write_text(f"{known}{'<unk> ' * tokens}")
    done = lmtrain("eval", "--text", "own.txt")
    assert "bits per byte" in done.out
    assert "stands for" not in done.out
    assert json.loads(lmtrain("eval", "--text", "own.txt", "--json").out)["unknown_share"] == 0
    (workdir / "own.txt").write_text(f"{known}{'xyzzy <unk> ' * tokens}")
    done = lmtrain("eval", "--text", "own.txt", "--limit", "50")
    assert f" words (<unk> stands for {tokens / (3 * tokens + 1):.2%} of the tokens)\n" in done.out
    assert "bits per byte" not in done.out
    assert " on own.txt: context 16, stride 4\n" in done.out
    assert "(floor" not in done.out
    result = json.loads(lmtrain("eval", "--text", "own.txt", "--json").out)
    assert (result["bits_per_byte"], result["unknown_share"]) == (None, pytest.approx(tokens / (3 * tokens + 1)))


def test_a_small_vocabulary_prints_no_false_figures(lmtrain: Lmtrain, workdir: Path) -> None:
    """Neither while training, nor in its metrics."""
    done = lmtrain("train", *TINY, "run.name=small", "tokenizer.vocab_size=20")
    remark = r" \(<unk> stands for \d\d\.\d\d% of the tokens\)\n"
    assert len(re.findall(rf"valid: .*word perplexity \S+{remark}", done.err)) == 3
    assert re.search(rf"valid word perplexity \S+{remark}", done.out)
    lines = [json.loads(line) for line in (workdir / "runs/small/metrics.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines if "word_perplexity" in line] == ["valid"] * 3 + ["final"]
    assert not any("bits_per_byte" in line for line in lines)
    assert "bits per byte" not in lmtrain("eval", "--run", "runs/small").out


def test_a_text_in_a_column_is_scored_beside_a_corpus_of_another(lmtrain: Lmtrain, workdir: Path) -> None:
    """The column is that of the file; and by the rule `sgd`, which needs no gradients of the corpus, not even that."""
    (train,) = (workdir / "data").glob("sample-*/train.txt")
    lines = train.read_text().splitlines()[:20]
    (workdir / "own.txt").write_text("".join(f"{line}\n" for line in lines))
    (workdir / "own.jsonl").write_text("".join(json.dumps({"body": line}) + "\n" for line in lines))
    for rule in ("rms", "sgd"):
        if rule == "sgd":
            shutil.rmtree(workdir / "data")
        options = ["--dynamic", f"eval.dynamic_rule={rule}", "--json"]
        plain = json.loads(lmtrain("eval", "--text", "own.txt", *options).out)
        found = json.loads(lmtrain("eval", "--text", "own.jsonl", "--text-column", "body", *options).out)
        assert found["nats"] == plain["nats"]
        assert (workdir / "data").is_dir() == (rule == "rms")


def test_eval_is_told_where_the_corpus_lies_now(lmtrain: Lmtrain, workdir: Path) -> None:
    (workdir / "own.txt").write_text("a b c d e f\n" * 200)
    assert lmtrain("train", *TINY[1:], "run.name=own", "data.source=own.txt", "--quiet").code == 0
    before = json.loads(lmtrain("eval", "--run", "runs/own", "--json").out)
    (workdir / "own.txt").rename(workdir / "moved.txt")
    assert json.loads(lmtrain("eval", "--run", "runs/own", "--json").out) == before
    done = lmtrain("eval", "--run", "runs/own", "--data-dir", "other")
    assert "are not in other: say where they are with data.dir=FOLDER" in done.err
    assert "(the run says 'own.txt')" in done.err
    done = lmtrain("eval", "--run", "runs/own", "data.source=moved.txt", "--data-dir", "other", "--json")
    assert json.loads(done.out) == before
    assert (workdir / "other").is_dir()
    (workdir / "data").rename(workdir / "elsewhere")
    assert json.loads(lmtrain("eval", "--run", "runs/own", "data.dir=elsewhere", "--json").out) == before


@pytest.mark.parametrize("field", ["source", "dir", "sources"])
def test_eval_takes_no_location_from_a_run(lmtrain: Lmtrain, workdir: Path, field: str) -> None:
    """A stranger's run names files of the user's: nothing is read from them, and nothing is written there."""
    secret = workdir / "secret"
    secret.mkdir()
    (secret / "own.txt").write_text("a b c d e f\n" * 200)
    config = workdir / "runs/default/config.yaml"
    values = yaml.safe_load(config.read_text())
    values["data"] |= {
        "source": {"source": str(secret / "own.txt")},
        "dir": {"dir": str(secret)},
        "sources": {"sources": [{"source": "someone/corpus"}, {"source": str(secret / "own.txt")}]},
    }[field]
    config.write_text(yaml.safe_dump(values))
    shutil.rmtree(workdir / "data")
    done = lmtrain("eval")
    assert done.code == (0 if field == "dir" else 1)
    assert [path.name for path in secret.iterdir()] == ["own.txt"]
    if field == "dir":  # the built-in sample is made where the user keeps data
        assert (workdir / "data").is_dir()
    else:
        assert "are not in data: say where they are with data.dir=FOLDER, or what to make them from" in done.err
        assert not (workdir / "data").exists()


def test_eval_finds_the_store_in_the_folder_that_training_used(lmtrain: Lmtrain, workdir: Path) -> None:
    (workdir / "own.txt").write_text("a b c d e f\n" * 200)
    arguments = [*TINY[1:], "run.name=own", "data.source=own.txt", f"data.dir={workdir / 'big'}", "--quiet"]
    assert lmtrain("train", *arguments).code == 0
    (workdir / "own.txt").write_text("changed\n" * 200)
    before = sorted((workdir / "big").rglob("*"))
    done = lmtrain("eval", "--run", "runs/own")
    assert done.code == 0, done.err
    assert sorted((workdir / "big").rglob("*")) == before


def test_a_damaged_best_checkpoint_is_named_or_an_error(lmtrain: Lmtrain, workdir: Path) -> None:
    found = json.loads(lmtrain("eval", "--json").out)
    best = workdir / f"runs/default/checkpoints/step-{found['step']:08d}"
    path = best / "optimizer.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    for command in (["eval"], ["generate", "x"]):
        done = lmtrain(*command)
        assert done.code == 0, done.err
        assert f"{best.name} may be the best checkpoint and is damaged" in done.err
        assert "is used instead" in done.err
        for which in ("best", str(found["step"])):
            done = lmtrain(*command, "--checkpoint", which)
            assert (done.code, done.out) == (1, "")
            assert f"{best.name}/optimizer.safetensors is missing or truncated" in done.err


@pytest.mark.parametrize("name", ["...yaml", "-.yaml", "a b.yaml"])
def test_a_configuration_gives_a_run_no_name_that_it_may_not_have(lmtrain: Lmtrain, workdir: Path, name: str) -> None:
    (workdir / name).write_text("")
    before = sorted(workdir.rglob("*"))
    done = lmtrain("train", f"--config={name}", *TINY)
    assert done.code == 1
    assert f"--config {name}: a run can't be named" in done.err
    assert "set run.name" in done.err
    assert sorted(workdir.rglob("*")) == before


@pytest.mark.parametrize("arguments", [["eval", "--data-dir", "b\udcffd"], ["train", "data.source=b\udcffd.txt"]])
def test_a_name_that_is_not_utf8_is_called_so(lmtrain: Lmtrain, workdir: Path, arguments: list[str]) -> None:
    done = lmtrain(*arguments)
    assert done.code == 2
    assert "is not UTF-8 text: rename what has this name" in done.err
    assert "YAML" not in done.err


def test_the_environment_sets_what_evaluation_has_to_do_with(
    lmtrain: Lmtrain, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the rest, which is the run's own, nothing is read, so that nothing there can be wrong either."""
    monkeypatch.setenv("LMTRAIN_MODEL__HEADS", "7")
    monkeypatch.setenv("LMTRAIN_EVAL__STRIDE", "8")
    (workdir / "runs").rename(workdir / "kept")
    monkeypatch.setenv("LMTRAIN_RUN__DIR", "kept")
    found = json.loads(lmtrain("eval", "--json").out)
    assert (found["run"], found["stride"]) == ("kept/default", 8)
    assert json.loads(lmtrain("eval", "--json", "--stride", "16").out)["stride"] == 16
    assert lmtrain("generate", "the", "--max-tokens", "2").code == 0


def test_train_says_how_it_went_and_resumes(lmtrain: Lmtrain, workdir: Path) -> None:
    done = lmtrain("train", *TINY, "run.name=again", "--json")
    assert done.code == 0, done.err
    result = json.loads(done.out)
    assert (result["status"], result["step"], result["run"]) == ("finished", 12, "runs/again")
    first = json.loads((workdir / "runs/default/state.json").read_text())
    assert result["valid"]["nats"] == first["valid"]["nats"]
    text = lmtrain("train", *TINY, "run.name=again").out
    assert "finished at step 12" in text


def test_dry_run_trains_nothing(lmtrain: Lmtrain, workdir: Path) -> None:
    done = lmtrain("train", *TINY, "run.name=dry", "--dry-run", "--json")
    assert done.code == 0, done.err
    result = json.loads(done.out)
    assert result["config"]["model"]["dim"] == 16
    assert result["memory_bytes"]["weights"] == 4 * result["parameters"]
    assert result["steps"] == 12
    assert not (workdir / "runs/dry").exists()
    assert "parameters" in lmtrain("train", *TINY, "--dry-run").out


def test_a_short_option_means_the_same_in_every_command() -> None:
    commands: Any = typer.main.get_command(cli.app)
    meanings: dict[str, set[str]] = {}
    for command in commands.commands.values():
        for parameter in command.params:
            for short in (name for name in parameter.opts if re.fullmatch("-[a-z]", name)):
                meanings.setdefault(short, set()).update(name for name in parameter.opts if name.startswith("--"))
    assert meanings["-n"] == {"--max-tokens"}
    assert all(len(meaning) == 1 for meaning in meanings.values()), meanings


@pytest.mark.parametrize(("number", "name"), [(signal.SIGINT, "SIGINT"), (signal.SIGTERM, "SIGTERM")])
def test_an_interrupted_run_saves_and_says_how_to_go_on(workdir: Path, number: int, name: str) -> None:
    command = [sys.executable, "-m", "lmtrain", "train", *TINY, "run.name=cut", "train.steps=100000"]
    command += ["train.compile=false"]  # which so long a run would begin with
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "step 5 valid" in line:
                break
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "the same command goes on from it" in err
    state = json.loads((workdir / "runs/cut/state.json").read_text())
    assert (state["status"], state["signal"]) == ("interrupted", name)
    assert (workdir / f"runs/cut/checkpoints/step-{state['step']:08d}/manifest.json").is_file()


BAD_FILES = {
    "empty.txt": b"",
    "blank.txt": b"\n\n\n",
    "short.txt": b"one two three\n" * 30,
    "latin.txt": b"caf\xe9\n" * 100,
    "bad.yaml": b"model:\n  dimm: 5\n",
    "type.yaml": b"model:\n  dim: wide\n",
    "own.txt": b"a b c d e f\n" * 200,
}
TRAIN = ["train", "run.name=new", "train.steps=1", "--quiet"]
MISTAKES = {
    "missing corpus": (["download", "nowhere/corpus.txt"], "nowhere/corpus.txt"),
    "missing configuration": (["train", "-c", "nowhere.yaml"], "nowhere.yaml does not exist"),
    "empty corpus": ([*TRAIN, "data.source=empty.txt"], "empty.txt"),
    "blank corpus": ([*TRAIN, "data.source=blank.txt"], "blank.txt"),
    "corpus shorter than a window": ([*TRAIN, "data.source=short.txt"], "model.context=128"),
    "not UTF-8": ([*TRAIN, "data.source=latin.txt"], "byte 3"),
    "unknown key": ([*TRAIN, "-c", "bad.yaml"], "did you mean model.dim?"),
    "unknown override": ([*TRAIN, "train.ler=1"], "did you mean train.lr?"),
    "wrong type": ([*TRAIN, "-c", "type.yaml"], "model.dim='wide'"),
    "vocabulary too large": ([*TRAIN, "tokenizer.vocab_size=5000000000"], "tokenizer.vocab_size"),
    "no run": (["eval", "--run", "nowhere"], "nowhere is not a run folder"),
    "no such checkpoint": (["eval", "--checkpoint", "77"], "no checkpoint '77'"),
    "no such split": (["eval", "--split", "dev"], "dev"),
    "stride too long": (["eval", "--stride", "17"], "eval.stride=17"),
    "a file in the way": ([*TRAIN, *TINY[:6], "run.dir=empty.txt"], "empty.txt"),
    "CUDA on a machine without": (
        [*TRAIN, *TINY[:6], "train.device=cuda"],
        "use cpu or auto in place of cuda",
    ),
    "a configuration as an override": (["train", "type.yaml"], "a configuration file is given by --config"),
    "a run as an override": (["eval", "runs/default"], "a run is named by --run"),
    "a split and a text": (["eval", "--split", "test", "--text", "short.txt"], "give one of them"),
    "a dry run with a profile": (["train", "--dry-run", "--profile"], "give one of them"),
    "a tokenizer and its kind": (["tokenize", "--tokenizer", "x.json", "--kind", "bpe"], "leave --kind and"),
    "an unknown kind": (["tokenize", "--kind", "words"], "tokenizer.kind='words'"),
    "no such text": (["eval", "--text", "nowhere.txt"], "nowhere.txt is no file of text"),
    "a text that is a folder": (["eval", "--text", "runs"], "runs is no file of text"),
    "a text without words": (["eval", "--text", "blank.txt"], "has no words"),
    "learning backwards": (["eval", "eval.dynamic_lr=-1"], "eval.dynamic_lr=-1"),
    "another corpus": (
        ["eval", "data.source=own.txt"],
        "or is another one, and what looks held out may have been learned; --text",
    ),
}


WRONG_COMMANDS = {
    *("unknown key", "unknown override", "wrong type", "vocabulary too large", "stride too long"),
    *("a configuration as an override", "a run as an override", "a split and a text", "learning backwards"),
    *("a dry run with a profile", "a tokenizer and its kind", "an unknown kind"),
}
"""What is wrong is the command or the configuration, and not what it names."""


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_clear_sentence(
    lmtrain: Lmtrain, workdir: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file, content in BAD_FILES.items():
        (workdir / file).write_bytes(content)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    arguments, message = MISTAKES[name]
    done = lmtrain(*arguments)
    assert done.code == (2 if name in WRONG_COMMANDS else 1), done
    assert done.out == ""
    assert message in done.err
    assert "Traceback" not in done.err
    assert done.err.count("lmtrain: ") == 1


@pytest.mark.parametrize("damage", ["weights", "config", "tokenizer", "foreign", "other shape"])
def test_a_damaged_or_foreign_run_is_refused(lmtrain: Lmtrain, workdir: Path, damage: str) -> None:
    run = workdir / "runs/default"
    if damage == "weights":
        for path in run.glob("checkpoints/*/ema.safetensors"):
            path.write_bytes(path.read_bytes()[:-1] + b"x")
    elif damage == "config":
        (run / "config.yaml").write_text("model: {")
    elif damage == "tokenizer":
        (run / "tokenizer.json").write_text("{}")
    elif damage == "foreign":
        for path in run.glob("checkpoints/*/manifest.json"):
            path.write_text(json.dumps({"format": "other"}))
    else:
        text = (run / "config.yaml").read_text()
        (run / "config.yaml").write_text(text.replace("dim: 16", "dim: 32"))
    for command in (["eval"], ["generate", "x"]):
        done = lmtrain(*command)
        assert done.code == 1
        assert "runs/default" in done.err
        assert "Traceback" not in done.err


def test_a_corpus_changed_under_a_run_is_refused(lmtrain: Lmtrain, workdir: Path) -> None:
    (workdir / "own.txt").write_text("a b c d e f\n" * 200)
    arguments = ["train", *TINY[1:], "run.name=own", "data.source=own.txt", "--quiet"]
    assert lmtrain(*arguments).code == 0
    before = {path: path.read_bytes() for path in workdir.glob("data/own-*/*")}
    score = lmtrain("eval", "--run", "runs/own", "--json").out
    (workdir / "own.txt").write_text("a b c d e g\n" * 200)
    done = lmtrain(*arguments)
    assert done.code == 1
    assert "choose another run.name" in done.err
    assert {path: path.read_bytes() for path in before} == before
    assert lmtrain("eval", "--run", "runs/own", "--json").out == score
    for folder in {path.parent for path in before}:
        shutil.rmtree(folder)
    done = lmtrain("eval", "--run", "runs/own")
    assert done.code == 1
    assert "are not in data" in done.err


def test_a_full_disk_ends_the_run_and_harms_nothing(lmtrain: Lmtrain, workdir: Path) -> None:
    """A limit on the size of files stands in for the full disk: the kernel refuses the write in the same place."""
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
