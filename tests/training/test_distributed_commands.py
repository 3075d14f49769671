"""The command line in several processes: what only one can do, and mistakes that are said once."""

import json
from pathlib import Path

import pytest

from lmtrain.system import distributed as processes
from tests.conftest import TINY
from tests.training.ranks import commands, said


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("eval", ["eval"]),
        ("generate", ["generate", "The"]),
        ("tokenize", ["tokenize", "sample"]),
        ("download", ["download", "sample"]),
        ("train --profile", ["train", "--profile", *TINY]),
    ],
)
def test_work_for_one_process_is_refused_in_one_sentence(
    folder: Path, log: Path, name: str, arguments: list[str]
) -> None:
    assert commands(2, {0: arguments, 1: arguments}, log) == {0: 2, 1: 2}
    sentence = f"lmtrain: {name} is work for one process: start it without torchrun, which has started several\n"
    assert [said(log, rank) for rank in (0, 1)] == [sentence, ""]
    assert list(folder.iterdir()) == []


def test_one_process_of_one_may_do_all(folder: Path, log: Path) -> None:
    (folder / "text.txt").write_text("some words\n" * 100)
    arguments = ["download", "text.txt", "--quiet"]
    assert commands(1, {0: arguments}, log) == {0: 0}
    assert (folder / "data").is_dir()


def test_a_dry_run_is_the_leaders(folder: Path, log: Path, data_dir: Path, tiny: object, store: object) -> None:
    arguments = ["train", *TINY, f"data.dir={data_dir}", "--dry-run", "--json", "--quiet"]
    assert commands(2, {0: arguments, 1: arguments}, log) == {0: 0, 1: 0}
    assert json.loads(said(log, 0))["steps"] == 12
    assert said(log, 1) == ""
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("mistake", "sentence"),
    [
        ("train.ler=1", "did you mean train.lr?"),
        ("data.source=nowhere/corpus.txt", "nowhere/corpus.txt is no file"),
        ("train.batch_size=6", "train.batch_size=6 can't be shared by 4 processes"),
    ],
)
def test_a_mistake_that_all_meet_is_said_once(log: Path, data_dir: Path, mistake: str, sentence: str) -> None:
    arguments = ["train", *TINY, f"data.dir={data_dir}", mistake, "--quiet"]
    size = 4 if "batch" in mistake else 2
    assert commands(size, dict.fromkeys(range(size), arguments), log) == dict.fromkeys(range(size), 1)
    assert sentence in said(log, 0)
    assert said(log, 0).count("\n") == 1
    assert [said(log, rank) for rank in range(1, size)] == [""] * (size - 1)


def test_a_mistake_of_ones_own_is_said(log: Path) -> None:
    assert commands(2, {0: ["train", "train.ler=1"], 1: ["train", "-c", "here.yaml"]}, log) == {0: 1, 1: 1}
    assert "did you mean train.lr?" in said(log, 0)
    assert said(log, 1).startswith("lmtrain: process 1: configuration here.yaml does not exist")


def test_a_mistake_is_said_where_the_leader_goes_on(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "LEADER_SECONDS", 0.2)
    assert commands(2, {1: ["train", "-c", "here.yaml"]}, log) == {1: 1}
    assert said(log, 1).startswith("lmtrain: process 1: configuration here.yaml does not exist")
    assert said(log, 1).count("\n") == 1
