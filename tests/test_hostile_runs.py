"""Hostile run folders: a run resumes, or is rejected with one message, its checkpoints untouched."""

import errno
import json
import os
import re
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import Mock

import pytest
import yaml

import lmtrain
from lmtrain.config.schema import Config, DataConfig
from lmtrain.data.corpus import make_corpus
from lmtrain.errors import LmtrainError
from lmtrain.storage import run_checkpoints, run_folder
from lmtrain.storage.files import MANIFEST
from lmtrain.training import opening
from lmtrain.training.finished import Outcome
from lmtrain.training.loop import fit
from tests.helpers import contents
from tests.hostile import Run, limited_memory, sign, trained_run, unsealed

pytestmark = pytest.mark.timeout(60)  # a run must not wait for a pipe


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return trained_run(tmp_path_factory.mktemp("run"))


@pytest.fixture
def run(trained: Run, tmp_path: Path) -> Run:
    """A copy of a run that was killed while it was finally scored, beside a file of the user's own."""
    shutil.copytree(trained.folder, tmp_path / "run")
    run_folder.write_state(tmp_path / "run", "running")
    (tmp_path / "run/.lock").touch()
    (tmp_path / "mine").write_text("mine\n" * 100)
    return trained._replace(folder=tmp_path / "run")


def last(run: Run) -> Path:
    return run_checkpoints.choose(run.folder, "last")


def resume(run: Run, config: Config | None = None) -> Outcome:
    return fit(config or run.config, run.store, run.folder)


def load(run: Run, weights: str = "auto") -> object:
    return lmtrain.load(run.folder, checkpoint="last", weights=weights, device="cpu").model


def kept(run: Run) -> dict[str, bytes]:
    """What no failure may change: the checkpoints, and the user's own file."""
    return {name: content for name, content in contents(run.folder.parent).items() if re.match("mine|run/ch", name)}


Damage = Callable[[Run], None]


def replaced(name: str, make: Callable[[Path], object]) -> Damage:
    """Something else in the place of a file or a folder of the run or of its last checkpoint."""

    def damage(run: Run) -> None:
        path = run.folder / name.format(last=last(run).name)
        path.rename(path.with_name(f"former-{path.name}"))
        make(path)

    return damage


def with_bytes(name: str, content: bytes) -> Damage:
    return replaced(name, lambda path: path.write_bytes(content))


def a_link(path: Path) -> None:
    path.symlink_to(path.parent.parent / "mine")


def a_hard_link(path: Path) -> None:
    path.hardlink_to(path.parent.parent / "mine")


def no_weights(run: Run) -> None:
    for folder in run_checkpoints.folders(run.folder):
        (folder / "model.safetensors").write_bytes(b"")


def integer_weights(group: str) -> Damage:
    def damage(run: Run) -> None:
        path = last(run) / f"{group}.safetensors"
        path.write_bytes(path.read_bytes().replace(b'"F32"', b'"I32"'))
        sign(path)

    return damage


def in_manifest(key: str, inner: str | None, value: Any) -> Damage:
    def damage(run: Run) -> None:
        manifest = unsealed(last(run))
        (manifest if inner is None else manifest[key])[inner or key] = value
        (last(run) / MANIFEST).write_text(json.dumps(manifest))

    return damage


RUNS: dict[str, tuple[Damage, str | None]] = {
    "metrics of odd bytes": (with_bytes("metrics.jsonl", b"\0\xff{]\n\n" * 3), None),
    "a state that is not JSON": (with_bytes("state.json", b"\xff"), None),
    "a lock with content": (with_bytes(".lock", b"x"), None),
    **{f"a folder for {name}": (replaced(name, Path.mkdir), name) for name in ("metrics.jsonl", "state.json")},
    "a file for checkpoints": (replaced("checkpoints", Path.touch), "checkpoints"),
    **{f"a pipe for {name}": (replaced(name, os.mkfifo), name) for name in ("config.yaml", "metrics.jsonl")},
    **{
        f"a pipe for {name}": (replaced(name, os.mkfifo), None)
        for name in ("state.json", "tokenizer.json", "checkpoints/{last}/manifest.json")
    },
    "a pipe for tensors": (replaced("checkpoints/{last}/model.safetensors", os.mkfifo), None),
    "a pipe for .lock": (replaced(".lock", os.mkfifo), "run.*: it is .*regular file"),
    "a link for .lock": (replaced(".lock", a_link), "run.*: it is .*symbolic link"),
    "a link for metrics.jsonl": (replaced("metrics.jsonl", a_link), "metrics.jsonl.*symbolic link"),
    "a hard link for metrics.jsonl": (replaced("metrics.jsonl", a_hard_link), "metrics.jsonl.*hard link"),
    "no undamaged checkpoint": (
        no_weights,
        r"step-\d+.*step-\d+.*delete or move this folder, or choose another run.name",
    ),
    **{f"integer {group}": (integer_weights(group), r"torch\.int32 of shape") for group in ("model", "ema")},
    "a step too large": (in_manifest("counters", "step", 10**30), "step"),
    "a step below 0": (in_manifest("counters", "step", -1), "step"),
    "another step than the folder's": (in_manifest("step", None, 7), None),
    "a score too large": (in_manifest("score", None, 10**400), None),
    "a best score that is NaN": (in_manifest("counters", "best", float("nan")), "best"),
    "a scaler of another kind": (in_manifest("counters", "scaler", {"scale": "x"}), "scaler"),
    "endless seconds": (in_manifest("seconds", None, float("inf")), "seconds"),
    "too many bytes of metrics": (in_manifest("metrics_bytes", None, 2**70), "metrics_bytes"),
    "bytes of metrics below 0": (in_manifest("metrics_bytes", None, -1), "metrics_bytes"),
    "threads of another kind": (in_manifest("threads", None, "x"), "threads"),
}
"""What is wrong with a run, and what the message names; None: it resumes to its end."""


@pytest.mark.parametrize("name", RUNS)
def test_a_hostile_run_resumes_or_is_rejected_and_its_checkpoints_are_untouched(run: Run, name: str) -> None:
    damage, message = RUNS[name]
    damage(run)
    before = kept(run)
    with pytest.raises(LmtrainError, match=message) if message else nullcontext():
        assert resume(run).status == "finished"
    assert kept(run) == before or not message


def test_the_checkpoint_that_a_run_resumes_from_is_not_deleted(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    in_manifest("counters", "step", 1)(run)
    before = kept(run)
    monkeypatch.setattr(opening, "RunMonitor", Mock(side_effect=LmtrainError("the disk is full")))
    with pytest.raises(LmtrainError, match="the disk is full"):
        resume(run)
    assert kept(run) == before


@pytest.mark.parametrize(("group", "weights"), [("model", "raw"), ("ema", "auto")])
def test_weights_of_another_type_are_rejected(run: Run, group: str, weights: str) -> None:
    integer_weights(group)(run)
    with pytest.raises(LmtrainError, match=r"torch\.int32 of shape"):
        load(run, weights)


@pytest.mark.parametrize(
    "fields",
    [
        *({"dim": dim} for dim in (2**20, 2**10, 8)),
        {"attention": "global", "attention_globals": 2**26},
        {"embed_dim": 2**20},
    ],
)
def test_a_stored_configuration_cannot_ask_for_memory_that_its_weights_do_not_fill(
    run: Run, fields: dict[str, Any]
) -> None:
    path = run.folder / run_folder.CONFIG
    values = yaml.safe_load(path.read_text())
    values["model"] |= fields
    path.write_text(yaml.safe_dump(values))
    with limited_memory(1 << 30), pytest.raises(LmtrainError, match="does not fit"):
        load(run)


@pytest.mark.parametrize(("section", "field", "value"), [("model", "norm", "layer"), ("train", "steps", 1)])
def test_a_run_of_another_configuration_is_left_as_it_was(run: Run, section: str, field: str, value: Any) -> None:
    (last(run) / "model.safetensors").write_bytes(b"")
    before = contents(run.folder)
    with pytest.raises(LmtrainError, match=r"another (configuration|budget)"):
        resume(run, run.config.with_fields(**{section: {field: value}}))
    assert contents(run.folder) == before


@pytest.mark.parametrize("name", ["config.yaml", "tokenizer.json", "notes.txt"])
def test_a_folder_that_is_not_a_run_is_left_as_it_was(run: Run, name: str, tmp_path: Path) -> None:
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / name).write_text("mine")
    with pytest.raises(LmtrainError, match=r"gpt2 is not a run folder: .*; choose another run.name or run.dir"):
        resume(run._replace(folder=tmp_path / "gpt2"))
    assert contents(tmp_path / "gpt2") == {name: b"mine"}


@pytest.mark.parametrize(
    ("number", "file"),
    [(errno.EACCES, MANIFEST), (errno.EIO, MANIFEST), (errno.EIO, "model.safetensors"), (errno.EMFILE, MANIFEST)],
)
def test_a_checkpoint_that_cannot_be_read_is_not_set_aside(
    run: Run, number: int, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    unreadable = last(run) / file

    def fail(path: Path) -> None:
        if path == unreadable:
            raise OSError(number, os.strerror(number))

    before = contents(run.folder)
    monkeypatch.setattr("lmtrain.system.disk.check_regular", fail)
    with pytest.raises(LmtrainError, match=rf"step-\d+/{file} can't be read: {os.strerror(number)}"):
        resume(run)
    assert contents(run.folder) == before


def test_a_folder_that_cannot_be_listed_is_an_error(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path) -> NoReturn:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    unreadable = {run.folder / "checkpoints", run.folder.parent}
    iterdir = Path.iterdir
    monkeypatch.setattr(Path, "iterdir", lambda path: fail(path) if path in unreadable else iterdir(path))
    with pytest.raises(LmtrainError, match="checkpoints can't be read: Permission denied"):
        run_checkpoints.folders(run.folder)
    with pytest.raises(LmtrainError, match=f"{run.folder.parent} can't be read: Permission denied"):
        run_folder.find_run(None, run.folder.parent)
    assert run_folder.find_run(run.folder, run.folder.parent) == run.folder


def test_a_pipe_in_place_of_a_text_is_rejected(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "own.txt")
    with pytest.raises(LmtrainError, match=r"own.txt can't be read: it is not a regular file"):
        make_corpus(DataConfig(source=str(tmp_path / "own.txt"), dir=tmp_path / "data"))
    (tmp_path / "more.txt").write_text("words of the text\n")
    with pytest.raises(LmtrainError, match=r"own.txt can't be read: it is not a regular file"):
        make_corpus(DataConfig(source=str(tmp_path), dir=tmp_path / "data"))


def test_a_folder_that_cannot_be_locked_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fcntl.flock", Mock(side_effect=OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))))
    with pytest.raises(LmtrainError, match=r"\(No locks available\): set run.dir"), run_folder.lock(tmp_path):
        pass
