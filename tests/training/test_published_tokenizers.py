"""Runs with published tokenizers, and runs whose tokens are made again with their own tokenizer.json."""

import json
import shutil
from pathlib import Path

import pytest

from lmtrain.api.train import train_plan
from lmtrain.data.tokenizer_file import Description, Json
from lmtrain.storage.run_folder import run_config
from lmtrain.training.plan import plan_run
from tests.data.published import EXACT, SHAPES, TEXT, published
from tests.helpers import TINY, Lmtrain
from tests.training.helpers import last_hash

OWN = [*TINY[2:], "train.steps=2", "train.eval_tokens=50"]


@pytest.fixture
def folder(folder: Path) -> Path:
    Path("book.txt").write_text("".join(f"{line}\n" for line in TEXT))
    return folder


@pytest.mark.parametrize("name", ["gpt2", "llama2", "words"])
def test_a_run_has_its_tokenizer_in_its_folder(name: str, folder: Path, lmtrain: Lmtrain) -> None:
    Path("given.json").write_text(published(name))
    begun = lmtrain("train", "book.txt", *OWN, "tokenizer.file=given.json")
    assert begun.code == 0, begun.err
    assert " entries (file); " in begun.err
    Path("given.json").unlink()
    shutil.rmtree("data")
    shutil.move("runs", "elsewhere")
    score = lmtrain("eval", "--run", "elsewhere/book", "data.source=book.txt", "--json").json
    assert score["words"] < score["tokens"]
    assert (score["bits_per_byte"] is None) == (name == "words") == (score["unknown_share"] > 0)
    written = lmtrain("generate", "The cat", "--run", "elsewhere/book", "-n", "12", "--seed", "1", "--json").json
    (completion,) = written["completions"]
    assert len(completion["tokens"]) == 12
    assert SHAPES[name][2] not in completion["tokens"]
    assert completion["text"]
    whole = lmtrain("eval", "--run", "elsewhere/book", "--text", "book.txt")
    assert whole.out.splitlines()[1].split()[:2] == (["bits", "per"] if name in EXACT else ["token", "perplexity"])
    assert lmtrain("train", "--resume", "elsewhere/book").code == 0


def test_a_run_that_continues_without_the_field_keeps_its_tokenizer(folder: Path, lmtrain: Lmtrain) -> None:
    Path("given.json").write_text(published("gpt2"))
    Path("own.yaml").write_text("train: {schedule: constant}")
    command = ["train", "-c", "own.yaml", "data.source=book.txt", *OWN, "train.eval_steps=1"]
    assert lmtrain(*command, "tokenizer.file=given.json").code == 0
    assert lmtrain(*command, "train.steps=4").code == 0
    assert run_config(folder / "runs/own").train.steps == 4
    assert lmtrain("generate", "The cat", "--run", "own", "-n", "3").code == 0


def _train(run_dir: Path | None, *overrides: str) -> str:
    plan = plan_run(None, [*overrides], run_dir)
    train_plan(plan)
    return last_hash(plan.run_dir)


@pytest.mark.parametrize("kind", ["word", "bpe", "byte"])
def test_tokens_of_an_earlier_version_are_made_again_with_the_tokenizer_of_the_run(
    kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch, lmtrain: Lmtrain
) -> None:
    """A tokenizer that is trained again has the field, and so another hash."""

    def without_field(description: Description, document: Json) -> bytes:
        return json.dumps(document).encode()

    size = ["tokenizer.vocab_size=300"] if kind == "bpe" else []
    fields = ["data.source=book.txt", *OWN, "train.steps=4", "train.eval_steps=2", f"tokenizer.kind={kind}", *size]
    with monkeypatch.context() as patch:
        patch.setattr(Description, "added_to", without_field)
        whole = _train(None, *fields)
    run = folder / "runs/book"
    stored = run_config(run).tokenizer
    assert "lmtrain" not in json.loads((run / "tokenizer.json").read_text())["model"]
    shutil.rmtree("data")
    shutil.rmtree(max((run / "checkpoints").iterdir()))
    assert _train(run) == whole
    shutil.rmtree("data")
    assert _train(None, *fields) == whole
    assert run_config(run).tokenizer == stored
    shutil.rmtree("data")
    assert lmtrain("eval", "--run", run, "data.source=book.txt").code == 0
    assert len(list(Path("data").glob(f"book-*.{kind}-*"))) == 1
