"""The command line in several processes: what is for one process only, and errors that are reported once."""

import json
from pathlib import Path

import pytest

from lmtrain.system import distributed
from tests.helpers import TINY
from tests.training.ranks import commands, output


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
def test_work_for_one_process_is_rejected(folder: Path, log: Path, name: str, arguments: list[str]) -> None:
    assert commands(2, {0: arguments, 1: arguments}, log) == {0: 2, 1: 2}
    message = f"lmtrain: {name} runs in one process: start it without torchrun, which has started several\n"
    assert [output(log, rank) for rank in (0, 1)] == [message, ""]
    assert list(folder.iterdir()) == []


def test_a_single_launched_process_may_do_everything(folder: Path, log: Path) -> None:
    (folder / "text.txt").write_text("some words\n" * 100)
    assert commands(1, {0: ["download", "text.txt", "--quiet"]}, log) == {0: 0}
    assert (folder / "data").is_dir()


def test_only_the_main_process_prints_a_dry_run(folder: Path, log: Path, data_dir: Path, store: object) -> None:
    arguments = ["train", *TINY, f"data.dir={data_dir}", "--dry-run", "--json", "--quiet"]
    assert commands(2, {0: arguments, 1: arguments}, log) == {0: 0, 1: 0}
    assert json.loads(output(log, 0))["steps"] == 12
    assert output(log, 1) == ""
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("train.ler=1", "did you mean train.lr?"),
        ("train.batch_size=6", "train.batch_size=6 can't be shared by 4 processes"),
    ],
)
def test_an_error_of_all_processes_is_reported_once(log: Path, data_dir: Path, mistake: str, message: str) -> None:
    arguments = ["train", *TINY, f"data.dir={data_dir}", mistake, "--quiet"]
    size = 4 if "batch" in mistake else 2
    status = 1 if "batch" in mistake else 2
    assert commands(size, dict.fromkeys(range(size), arguments), log) == dict.fromkeys(range(size), status)
    assert message in output(log, 0)
    assert output(log, 0).count("\n") == 1
    assert [output(log, rank) for rank in range(1, size)] == [""] * (size - 1)


@pytest.mark.parametrize("main_fails", [True, False])
def test_an_error_of_one_process_is_reported(log: Path, monkeypatch: pytest.MonkeyPatch, main_fails: bool) -> None:
    monkeypatch.setattr(distributed, "MAIN_REPORT_SECONDS", 5.0 if main_fails else 0.2)
    mine = {1: ["train", "-c", "here.yaml"]}
    given = {0: ["train", "train.ler=1"]} | mine if main_fails else mine
    assert commands(2, given, log) == {rank: 1 if rank else 2 for rank in given}
    assert output(log, 1).startswith("lmtrain: process 1: configuration here.yaml does not exist")
    assert output(log, 1).count("\n") == 1
