"""`lmtrain eval`: which run, which text, and what a run may and may not decide."""

import json
import os
import shutil
from pathlib import Path

import pytest
import yaml

from lmtrain.config.schema import TokenizerConfig
from lmtrain.data.tokenizer import Tokenizer
from tests.helpers import TINY, Lmtrain, contents


def test_a_copied_run_has_its_score_and_options_choose_weights_precision_and_checkpoint(
    lmtrain: Lmtrain, workdir: Path
) -> None:
    result = lmtrain("eval", "--json").json
    state = json.loads((workdir / "runs/sample/state.json").read_text())
    assert result["word_perplexity"] == pytest.approx(state["valid"]["word_perplexity"], rel=1e-5)
    assert (result["weights"], result["context"], result["stride"], result["split"]) == ("ema", 16, 4, "valid")
    raw = lmtrain("eval", "--json", "--weights", "raw", "eval.batch_size=3").json
    assert raw["nats"] != result["nats"]
    rounded = lmtrain("eval", "--json", "--precision", "bf16").json
    assert (rounded["precision"], result["precision"]) == ("bf16", "fp32")
    assert rounded["nats"] != result["nats"]
    assert rounded["word_perplexity"] == pytest.approx(result["word_perplexity"], rel=0.02)
    early = lmtrain("eval", "--json", "--checkpoint", "10", "--weights", "raw").json
    assert (early["step"], early["weights"]) == (10, "raw")
    text = lmtrain("eval", "--split", "test", "eval.stride=16", "--checkpoint", "last").out
    assert "word perplexity" in text
    assert "(unknown words: " in text
    assert "context 16, stride 16" in text


def test_a_text_is_scored_as_the_split_that_it_was_by_the_run_alone(lmtrain: Lmtrain, workdir: Path) -> None:
    """The file of the validation split gives the figures of the split, with the data gone and the run elsewhere."""
    plain = lmtrain("eval", "--json").json
    adaptive = ["--cache", "--dynamic", "--limit", "200"]
    both = lmtrain("eval", "--json", *adaptive).json
    (text,) = (workdir / "data").glob("sample-*/valid.txt")
    text = text.rename(workdir / "own.txt")
    found = lmtrain("eval", "--json", "--text", text, *adaptive).json
    assert (found.pop("text"), both.pop("split")) == (str(text), "valid")
    assert found == both
    shutil.rmtree(workdir / "data")
    moved = (workdir / "runs/sample").rename(workdir / "elsewhere")
    assert lmtrain("generate", "The river", "--run", moved, "-n", "2").code == 0
    found = lmtrain("eval", "--json", "--run", moved, "--text", text).json
    assert (found.pop("text"), plain.pop("split")) == (str(text), "valid")
    assert (found.pop("run"), plain.pop("run")) == (str(moved), "runs/sample")
    assert found == plain


def test_bits_per_byte_are_those_of_text_whose_bytes_were_predicted(lmtrain: Lmtrain, workdir: Path) -> None:
    """`<unk>` in the text is a word like any other; where it stands for other words, their share is printed instead."""
    (train,) = (workdir / "data").glob("sample-*/train.txt")
    known = "".join(train.read_text().splitlines(keepends=True)[:20])
    tokens = len(known.split()) + known.count("\n")
    (workdir / "own.txt").write_text(f"{known}{'<unk> ' * tokens}")
    done = lmtrain("eval", "--text", "own.txt")
    assert "bits per byte" in done.out
    assert "unknown" not in done.out
    assert lmtrain("eval", "--text", "own.txt", "--json").json["unknown_share"] == 0
    (workdir / "own.txt").write_text(f"{known}{'xyzzy <unk> ' * tokens}")
    done = lmtrain("eval", "--text", "own.txt", "--limit", "50")
    assert f" words and line ends (unknown words: {100 * tokens / (3 * tokens + 1):.3g}%)\n" in done.out
    assert "bits per byte" not in done.out
    assert " on own.txt: context 16, stride 4\n" in done.out
    assert "(floor" not in done.out
    result = lmtrain("eval", "--text", "own.txt", "--json").json
    assert (result["bits_per_byte"], result["unknown_share"]) == (None, pytest.approx(tokens / (3 * tokens + 1)))


def test_a_text_in_a_column_is_scored_beside_a_corpus_of_another(
    lmtrain: Lmtrain, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The column is that of the file."""
    (train,) = (workdir / "data").glob("sample-*/train.txt")
    lines = train.read_text().splitlines()[:20]
    (workdir / "own.txt").write_text("".join(f"{line}\n" for line in lines))
    (workdir / "own.jsonl").write_text("".join(json.dumps({"body": line}) + "\n" for line in lines))
    plain = lmtrain("eval", "--text", "own.txt", "--dynamic", "--json").json
    found = lmtrain("eval", "--text", "own.jsonl", "data.text_column=body", "--dynamic", "--json").json
    assert found["nats"] == plain["nats"]
    monkeypatch.setenv("LMTRAIN_DATA__TEXT_COLUMN", "body")
    assert lmtrain("eval", "--text", "own.jsonl", "--dynamic", "--json").json["nats"] == plain["nats"]


def test_a_file_with_a_name_in_another_encoding_can_be_scored(lmtrain: Lmtrain, workdir: Path) -> None:
    name = os.fsdecode(b"caf\xe9.txt")
    (workdir / name).write_text("the cat sat\n")
    assert lmtrain("eval", "--text", name, "--json").json["text"] == "caf\\udce9.txt"


def test_options_and_the_environment_say_where_the_corpus_is_now(
    lmtrain: Lmtrain, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (workdir / "own.txt").write_text("a b c d e f\n" * 200)
    assert lmtrain("train", *TINY[2:], "run.name=own", "data.source=own.txt", "--quiet").code == 0
    before = lmtrain("eval", "--run", "runs/own", "--json").json
    (workdir / "own.txt").rename(workdir / "moved.txt")
    assert lmtrain("eval", "--run", "runs/own", "--json").json == before
    (workdir / "data").rename(workdir / "elsewhere")
    done = lmtrain("eval", "--run", "runs/own", "data.dir=other")
    assert "are not in other: say where they are with data.dir=FOLDER" in done.err
    assert f"(the run says '{workdir / 'own.txt'}')" in done.err
    assert lmtrain("eval", "--run", "runs/own", "data.source=moved.txt", "data.dir=other", "--json").json == before
    assert (workdir / "other").is_dir()
    # To score a text, only dynamic evaluation reads the corpus of the run.
    text = ["eval", "--run", "runs/own", "--text", "moved.txt", "--limit", "20", "data.dir=another"]
    assert lmtrain(*text).code == 0
    adapted = [*text, "--dynamic"]
    assert "are not in another: say where they are" in lmtrain(*adapted).err
    assert lmtrain(*adapted, "data.source=moved.txt").code == 0
    assert lmtrain("eval", "--run", "runs/own", "data.dir=elsewhere", "--json").json == before
    monkeypatch.setenv("LMTRAIN_DATA__DIR", "elsewhere")
    assert lmtrain("eval", "--run", "runs/own", "--json").json == before


def test_a_configuration_names_the_run_and_sets_what_concerns_evaluation(lmtrain: Lmtrain, workdir: Path) -> None:
    """The file that a run was trained with serves to evaluate it; the name of the run is given or that of the file."""
    (workdir / "own.yaml").write_text("model: {dim: 64}\neval: {stride: 8}\ndata: {dir: elsewhere}")
    (workdir / "other.yaml").write_text("eval: {temperature: 1.1}\ndata: {dir: elsewhere}")
    config = shutil.copytree(workdir / "runs/sample", workdir / "runs/own") / "config.yaml"
    config.write_text(yaml.safe_dump(yaml.safe_load(config.read_text()) | {"eval": {"stride": 2}}))
    (workdir / "data").rename(workdir / "elsewhere")
    for arguments, run, stride in (
        (["-c", "own.yaml"], "runs/own", 8),
        (["-c", "own.yaml", "run.name=sample", "eval.stride=16"], "runs/sample", 16),
        (["run.name=own", "data.dir=elsewhere"], "runs/own", 2),
        (["-c", "own.yaml", "--run", "runs/sample"], "runs/sample", 8),
        (["-c", "other.yaml", "--run", "runs/own"], "runs/own", 2),
    ):
        result = lmtrain("eval", *arguments, "--json").json
        assert (result["run"], result["stride"]) == (run, stride)
    for arguments in (["The", "run.name=own"], ["-c", "own.yaml", "The"], ["The", "-r", "own"]):
        assert lmtrain("generate", *arguments, "-n", "2", "--json").json["run"] == "runs/own"


@pytest.mark.parametrize("field", ["source", "dir"])
def test_eval_takes_no_location_from_a_run(lmtrain: Lmtrain, workdir: Path, field: str) -> None:
    """A stranger's run names files of the user: nothing is read from them, and nothing is written there."""
    secret = workdir / "secret"
    secret.mkdir()
    (secret / "own.txt").write_text("a b c d e f\n" * 200)
    config = workdir / "runs/sample/config.yaml"
    values = yaml.safe_load(config.read_text())
    values["data"] |= {"dir": "data", field: str(secret / "own.txt" if field == "source" else secret)}
    config.write_text(yaml.safe_dump(values))
    shutil.rmtree(workdir / "data")
    done = lmtrain("eval", "--quiet")
    assert done.code == (0 if field == "dir" else 1)
    assert [path.name for path in secret.iterdir()] == ["own.txt"]
    if field == "dir":  # the built-in sample is made where the user keeps data
        assert (workdir / "data").is_dir()
        assert done.err == ""
    else:
        assert "are not in data: say where they are with data.dir=FOLDER, or what to make them from" in done.err
        assert not (workdir / "data").exists()


def test_eval_finds_the_store_in_the_folder_that_training_used(lmtrain: Lmtrain, workdir: Path) -> None:
    (workdir / "own.txt").write_text("a b c d e f\n" * 200)
    arguments = [*TINY[2:], "run.name=own", "data.source=own.txt", f"data.dir={workdir / 'big'}", "--quiet"]
    assert lmtrain("train", *arguments).code == 0
    (workdir / "own.txt").write_text("changed\n" * 200)
    before = sorted((workdir / "big").rglob("*"))
    assert lmtrain("eval", "--run", "runs/own").code == 0
    assert sorted((workdir / "big").rglob("*")) == before


def test_the_environment_sets_what_concerns_evaluation(
    lmtrain: Lmtrain, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Variables of all other sections are not read, so an invalid one among them does not matter."""
    monkeypatch.setenv("LMTRAIN_MODEL__HEADS", "7")
    monkeypatch.setenv("LMTRAIN_EVAL__STRIDE", "8")
    (workdir / "runs").rename(workdir / "kept")
    monkeypatch.setenv("LMTRAIN_RUN__DIR", "kept")
    found = lmtrain("eval", "--json").json
    assert (found["run"], found["stride"]) == ("kept/sample", 8)
    assert lmtrain("eval", "--json", "eval.stride=16").json["stride"] == 16
    shutil.copytree("kept/sample", "kept/own")
    Path("kept/sample/state.json").touch()  # the latest run
    for name in ("LMTRAIN_RUN__NAME", "LMTRAIN_run__name"):
        with monkeypatch.context() as patched:
            patched.setenv(name, "own")
            found = lmtrain("generate", "the", "--max-tokens", "2", "--json").json
            assert found["run"] == "kept/own"


def test_a_run_with_another_tokenizer_is_rejected(lmtrain: Lmtrain, workdir: Path) -> None:
    Tokenizer.train(["a b"], TokenizerConfig(kind="word")).save(workdir / "runs/sample/tokenizer.json")
    done = lmtrain("eval")
    assert done.code == 1
    assert "runs/sample/tokenizer.json is not the tokenizer that" in done.err


def test_a_corpus_changed_under_a_run_is_rejected(lmtrain: Lmtrain, workdir: Path) -> None:
    (workdir / "own.txt").write_text("a b c d e f\n" * 200)
    arguments = ["train", *TINY[2:], "run.name=own", "data.source=own.txt", "--quiet"]
    assert lmtrain(*arguments).code == 0
    before = contents(workdir / "data")
    score = lmtrain("eval", "--run", "runs/own", "--json").out
    (workdir / "own.txt").write_text("a b c d e g\n" * 200)
    done = lmtrain(*arguments)
    assert done.code == 1
    assert "choose another run.name" in done.err
    assert "; train.init_from=runs/own starts it from the weights of this one" in done.err
    assert lmtrain(*arguments, "run.name=own-2", "train.init_from=runs/own").code == 0
    assert before.items() <= contents(workdir / "data").items()
    assert lmtrain("eval", "--run", "runs/own", "--json").out == score
    shutil.rmtree(workdir / "data")
    done = lmtrain("eval", "--run", "runs/own")
    assert done.code == 1
    assert "are not in data" in done.err
