"""Hostile run folders: a run goes on, or is refused in one sentence."""

import errno
import json
import os
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import yaml

from lmtrain.config.schema import Config, DataConfig
from lmtrain.data.corpus import download
from lmtrain.data.tokens import TokenStore
from lmtrain.errors import LmtrainError
from lmtrain.model.trained import load_trained
from lmtrain.storage import checkpoint
from lmtrain.storage.files import MANIFEST
from lmtrain.training.loop import fit
from tests.hostile.folders import sign, trained_run, unsealed
from tests.hostile.inputs import limited_memory

MEMORY = 1 << 30


Run = tuple[Path, Config, TokenStore]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return trained_run(tmp_path_factory.mktemp("run"))


@pytest.fixture
def run(trained: Run, tmp_path: Path) -> Run:
    """A copy of the run, with its configuration and its data."""
    shutil.copytree(trained[0], tmp_path / "run")
    return tmp_path / "run", trained[1], trained[2]


@pytest.mark.parametrize("dim", [2**20, 2**10, 8])
def test_a_stored_configuration_can_not_ask_for_memory_that_its_weights_do_not_fill(run: Run, dim: int) -> None:
    path = run[0] / checkpoint.CONFIG
    values = yaml.safe_load(path.read_text())
    values["model"]["dim"] = dim
    path.write_text(yaml.safe_dump(values))
    manifest = checkpoint.choose(run[0], "last") / MANIFEST
    content = unsealed(manifest.read_bytes())
    del content["model"]  # as runs before it was there, and hostile ones, have none
    manifest.write_text(json.dumps(content))
    with limited_memory(MEMORY), pytest.raises(LmtrainError, match="does not fit"):
        load_trained(run[0], "last", "auto", torch.device("cpu"))


@pytest.mark.parametrize("group", ["model", "ema"])
def test_weights_of_another_type_are_refused(run: Run, group: str) -> None:
    folder = checkpoint.choose(run[0], "last")
    path = folder / f"{group}.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"F32"', b'"I32"'))
    sign(folder, path.name)
    weights = {"model": "raw", "ema": "auto"}[group]
    with pytest.raises(LmtrainError, match=r"is torch\.int32 of shape"):
        load_trained(run[0], "last", weights, torch.device("cpu"))
    with pytest.raises(LmtrainError, match=r"is torch\.int32 of shape"):
        fit(run[1], run[2], run[0], resume=True, note=lambda _: None, quiet=True)


RESUMED = {
    "metrics of odd bytes": ("metrics.jsonl", b"\0\xff{]\n\n" * 3),
    "no state": ("state.json", b"\xff"),
    "no lock": (".lock", b"x"),
}


@pytest.mark.parametrize("name", RESUMED)
def test_a_run_goes_on_whatever_its_logs_hold(run: Run, name: str) -> None:
    file, content = RESUMED[name]
    (run[0] / file).write_bytes(content)
    assert fit(run[1], run[2], run[0], resume=True, note=lambda _: None, quiet=True).status == "finished"


@pytest.mark.parametrize("name", ["metrics.jsonl", "state.json", "config.yaml", "tensorboard", ".lock", "checkpoints"])
def test_a_run_with_a_folder_for_a_file_or_a_file_for_a_folder_is_refused(run: Run, name: str) -> None:
    (run[0] / name).rename(run[0] / f"former-{name}")
    if name in ("tensorboard", "checkpoints"):
        (run[0] / name).touch()
    else:
        (run[0] / name).mkdir()
    with pytest.raises(LmtrainError):
        fit(run[1], run[2], run[0], resume=True, note=lambda _: None, quiet=True)


PIPES = {
    ".lock": "can't write .*it is no regular file",
    "config.yaml": "config.yaml can't be read: it is no regular file",
    "metrics.jsonl": "can't write .*metrics.jsonl: it is no regular file",
    "state.json": None,
    "tokenizer.json": None,
    "checkpoints/{last}/manifest.json": None,
    "checkpoints/{last}/model.safetensors": None,
}
"""What a run says of a pipe in place of each of its files; None: it goes on, having written another."""


@pytest.mark.parametrize("name", [".lock", "metrics.jsonl"])
def test_a_link_in_place_of_a_file_that_is_written_is_rejected(run: Run, name: str, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine\n" * 100)
    (run[0] / name).unlink(missing_ok=True)
    (run[0] / name).symlink_to(tmp_path / "mine")
    with pytest.raises(LmtrainError, match=r"it is a symbolic link \(move it away\)"):
        fit(run[1], run[2], run[0], resume=True, note=lambda _: None, quiet=True)
    assert (tmp_path / "mine").read_text() == "mine\n" * 100


@pytest.mark.parametrize(("field", "value"), [("context", 72), ("position", "alibi"), ("norm", "layer")])
def test_a_changed_model_section_is_rejected(run: Run, field: str, value: int | str) -> None:
    path = run[0] / checkpoint.CONFIG
    values = yaml.safe_load(path.read_text())
    values["model"][field] = value
    path.write_text(yaml.safe_dump(values))
    sentence = rf"config.yaml has model.{field}={value}, and .*step-\d+ was trained with {getattr(run[1].model, field)}"
    with pytest.raises(LmtrainError, match=sentence):
        load_trained(run[0], "last", "auto", torch.device("cpu"))
    with pytest.raises(LmtrainError, match=sentence):
        fit(checkpoint.run_config(run[0]), run[2], run[0], resume=True, note=lambda _: None, quiet=True)


def test_a_model_field_that_came_later_had_its_default(run: Run) -> None:
    found = checkpoint.load(checkpoint.choose(run[0], "last"))
    del found.info["model"]["qk_norm"]
    checkpoint.check_model(found, run[1].model)
    with pytest.raises(LmtrainError, match=r"model\.qk_norm=True, and .* was trained with False"):
        checkpoint.check_model(found, run[1].model.model_copy(update={"qk_norm": True}))


def _everything(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_run_without_a_good_checkpoint_is_not_started_over(run: Run) -> None:
    damaged = checkpoint.folders(run[0])
    for folder in damaged:
        (folder / "model.safetensors").write_bytes(b"")
    (run[0] / ".lock").touch()
    before = _everything(run[0])
    for _ in range(2):
        with pytest.raises(LmtrainError) as caught:
            fit(run[1], run[2], run[0], resume=True, note=lambda _: None, quiet=True)
    assert all(folder.name in str(caught.value) for folder in damaged)
    assert str(caught.value).endswith("delete or move this folder, or choose another run.name")
    assert _everything(run[0]) == before


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.EMFILE])
@pytest.mark.parametrize("file", [MANIFEST, "model.safetensors"])
def test_a_checkpoint_that_can_not_be_read_is_not_set_aside(
    run: Run, number: int, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        if path.name == file:
            raise OSError(number, os.strerror(number))

    (run[0] / ".lock").touch()
    before = _everything(run[0])
    monkeypatch.setattr("lmtrain.system.disk.check_regular", refuse)
    with pytest.raises(LmtrainError, match=rf"step-\d+/{file} can't be read: {os.strerror(number)}"):
        fit(run[1], run[2], run[0], resume=True, note=lambda _: None, quiet=True)
    assert _everything(run[0]) == before


def test_a_checkpoints_folder_that_can_not_be_listed_starts_nothing_over(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: str | Path) -> NoReturn:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    listed = os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: refuse(path) if Path(path).name == "checkpoints" else listed(path))
    with pytest.raises(LmtrainError, match="checkpoints can't be read: Permission denied"):
        checkpoint.folders(run[0])


def test_nothing_is_set_aside_where_the_configuration_is_another(run: Run) -> None:
    (checkpoint.choose(run[0], "last") / "model.safetensors").write_bytes(b"")
    (run[0] / ".lock").touch()
    before = _everything(run[0])
    other = run[1].model_copy(update={"model": run[1].model.model_copy(update={"norm": "layer"})})
    with pytest.raises(LmtrainError, match="started with another configuration"):
        fit(other, run[2], run[0], resume=True, note=lambda _: None, quiet=True)
    assert _everything(run[0]) == before


@pytest.mark.parametrize("name", ["config.yaml", "tokenizer.json", "notes.txt"])
def test_a_folder_that_is_no_run_is_left_alone(run: Run, name: str, tmp_path: Path) -> None:
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / name).write_text("mine")
    with pytest.raises(LmtrainError, match=r"gpt2 is not a run folder: .*; choose another run.name or run.dir"):
        fit(run[1], run[2], tmp_path / "gpt2", resume=True, note=lambda _: None, quiet=True)
    assert _everything(tmp_path / "gpt2") == {name: b"mine"}


@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", PIPES)
def test_a_pipe_in_place_of_a_file_keeps_no_run_waiting(run: Run, name: str) -> None:
    path, sentence = run[0] / name.format(last=checkpoint.choose(run[0], "last").name), PIPES[name]
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(LmtrainError, match=sentence) if sentence else nullcontext():
        assert fit(run[1], run[2], run[0], resume=True, note=lambda _: None, quiet=True).status == "finished"


@pytest.mark.timeout(30)
def test_a_pipe_in_place_of_a_text_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "own.txt")
    with pytest.raises(LmtrainError, match=r"own.txt can't be read: it is no regular file"):
        download(DataConfig(source=str(tmp_path / "own.txt"), dir=tmp_path / "data"))


def test_a_folder_that_can_not_be_locked_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(file: object, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", refuse)
    with (
        pytest.raises(LmtrainError, match=r"can't be locked .*\(No locks available\): set run.dir"),
        checkpoint.lock(tmp_path),
    ):
        pass


ODD_COUNTERS = [
    ("counters", "step", 10**30),
    ("counters", "step", -1),
    ("counters", "best", float("nan")),
    ("counters", "scaler", {"scale": "x"}),
    ("seconds", None, float("inf")),
    ("metrics_bytes", None, 2**70),
    ("metrics_bytes", None, -1),
    ("threads", None, "x"),
]


@pytest.mark.parametrize(("key", "inner", "value"), ODD_COUNTERS, ids=str)
def test_counters_that_can_not_be_are_refused(run: Run, key: str, inner: str | None, value: Any) -> None:
    path = checkpoint.choose(run[0], "last") / MANIFEST
    manifest = unsealed(path.read_bytes())
    if inner is None:
        manifest[key] = value
    else:
        manifest[key][inner] = value
    path.write_text(json.dumps(manifest))
    with pytest.raises(LmtrainError, match=f"{inner or key} in its manifest|can't be gone on from"):
        fit(run[1], run[2], run[0], resume=True, note=lambda _: None, quiet=True)
