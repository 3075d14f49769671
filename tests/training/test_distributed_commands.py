"""The command line in several processes: errors are reported once."""

from pathlib import Path

import pytest

import lmtrain
from lmtrain.errors import LmtrainError
from lmtrain.system import distributed
from tests.helpers import TINY
from tests.training.ranks import Ranks, Say, commands


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


@pytest.mark.parametrize(
    ("size", "arguments", "status", "message"),
    [
        (2, ["train", *TINY, "train.ler=1"], 2, "did you mean train.lr (Peak learning rate)?"),
        (4, ["train", *TINY, "train.batch_size=6"], 1, "train.batch_size=6 can't be divided among 4 processes"),
    ],
)
def test_an_error_of_all_processes_is_reported_once(
    folder: Path,
    tmp_path: Path,
    data_dir: Path,
    store: object,
    size: int,
    arguments: list[str],
    status: int,
    message: str,
) -> None:
    """And messages, as of the recipe of the last case, only by the main process."""
    given = [*arguments, f"data.dir={data_dir}"]
    ranks = commands(size, dict.fromkeys(range(size), given), tmp_path / "log")
    assert ranks.end() == [status] * size
    assert ranks.output(0).count("lmtrain: ") == 1
    assert message in ranks.output(0).splitlines()[-1]
    assert [ranks.output(rank) for rank in range(1, size)] == [""] * (size - 1)
    assert not (folder / "runs").exists()


@pytest.mark.parametrize("main_fails", [True, False])
def test_an_error_of_one_process_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, main_fails: bool) -> None:
    monkeypatch.setattr(distributed, "MAIN_REPORT_SECONDS", 5.0 if main_fails else 0.2)
    given = {0: ["train", "train.ler=1"]} if main_fails else {}
    ranks = commands(2, given | {1: ["train", "-c", "here.yaml"]}, tmp_path / "log")
    assert ranks.end() == ([2, 1] if main_fails else [1])
    assert ranks.output(1).startswith("lmtrain: process 1: configuration here.yaml does not exist")
    assert ranks.output(1).count("\n") == 1


def test_several_runs_are_trained_one_after_another(tmp_path: Path, data_dir: Path, store: object) -> None:
    """Under a torchrun that has started one program of two processes. Between the two, a run fails."""

    def program(say: Say) -> None:
        given = [*TINY, "train.steps=2", f"data.dir={data_dir}"]
        first = lmtrain.train(*given, "run.name=a")
        with pytest.raises(LmtrainError, match="can't be divided"):
            lmtrain.train(*given, "train.batch_size=2")
        say(f"{first.folder.name} {lmtrain.train(*given, 'run.name=b').folder.name}")

    ranks = Ranks(2, dict.fromkeys(range(2), program), tmp_path / "log")
    assert [child.hear() for child in ranks.children] == ["a b", "a b"]
    assert ranks.end() == [0, 0]
