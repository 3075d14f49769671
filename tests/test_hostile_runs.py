"""Hostile run folders: a run resumes, or is rejected with one message, its checkpoints untouched."""

import errno
import json
import os
import re
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import pytest
import torch
import yaml

from lmtrain.config.schema import Config, DataConfig
from lmtrain.data.corpus import download
from lmtrain.data.tokens import TokenStore
from lmtrain.errors import LmtrainError
from lmtrain.model.trained import load_trained
from lmtrain.storage import checkpoint, run_checkpoints, run_folder
from lmtrain.storage.files import MANIFEST
from lmtrain.training.loop import fit
from lmtrain.training.run import Outcome
from tests.hostile.folders import sign, trained_run, unsealed
from tests.hostile.inputs import limited_memory

pytestmark = pytest.mark.timeout(60)  # a run must not wait for a pipe


class Run(NamedTuple):
    folder: Path
    config: Config
    store: TokenStore

    def last(self) -> Path:
        return run_checkpoints.choose(self.folder, "last")

    def resume(self, config: Config | None = None, folder: Path | None = None) -> Outcome:
        target = folder or self.folder
        return fit(config or self.config, self.store, target, resume=True, note=lambda _: None, quiet=True)

    def load(self, weights: str = "auto") -> object:
        return load_trained(self.folder, "last", weights, torch.device("cpu"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(*trained_run(tmp_path_factory.mktemp("run")))


@pytest.fixture
def run(trained: Run, tmp_path: Path) -> Run:
    """A copy of a finished run, beside a file of the user's own."""
    shutil.copytree(trained.folder, tmp_path / "run")
    (tmp_path / "run/.lock").touch()
    (tmp_path / "mine").write_text("mine\n" * 100)
    return trained._replace(folder=tmp_path / "run")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def kept(run: Run) -> dict[str, bytes]:
    """What no failure may change: the checkpoints, and the user's own file."""
    return {name: content for name, content in contents(run.folder.parent).items() if re.match("mine|run/ch", name)}


Damage = Callable[[Run], None]


def of_bytes(name: str, content: bytes) -> Damage:
    def damage(run: Run) -> None:
        (run.folder / name).write_bytes(content)

    return damage


def a_folder(name: str) -> Damage:
    def damage(run: Run) -> None:
        (run.folder / name).rename(run.folder / f"former-{name}")
        (run.folder / name).mkdir()

    return damage


def a_file(name: str) -> Damage:
    def damage(run: Run) -> None:
        (run.folder / name).rename(run.folder / f"former-{name}")
        (run.folder / name).touch()

    return damage


def a_pipe(name: str) -> Damage:
    def damage(run: Run) -> None:
        path = run.folder / name.format(last=run.last().name)
        path.unlink()
        os.mkfifo(path)

    return damage


def a_link(name: str) -> Damage:
    def damage(run: Run) -> None:
        (run.folder / name).unlink()
        (run.folder / name).symlink_to(run.folder.parent / "mine")

    return damage


def no_weights(run: Run) -> None:
    for folder in run_checkpoints.folders(run.folder):
        (folder / "model.safetensors").write_bytes(b"")


def integer_weights(group: str) -> Damage:
    def damage(run: Run) -> None:
        path = run.last() / f"{group}.safetensors"
        path.write_bytes(path.read_bytes().replace(b'"F32"', b'"I32"'))
        sign(run.last(), path.name)

    return damage


def in_manifest(key: str, inner: str | None, value: Any) -> Damage:
    def damage(run: Run) -> None:
        path = run.last() / MANIFEST
        manifest = unsealed(path.read_bytes())
        (manifest if inner is None else manifest[key])[inner or key] = value
        path.write_text(json.dumps(manifest))

    return damage


LOCKS = [("folder", "regular file", a_folder), ("pipe", "regular file", a_pipe), ("link", "symbolic link", a_link)]
RUNS: dict[str, tuple[Damage, str | None]] = {
    "metrics of odd bytes": (of_bytes("metrics.jsonl", b"\0\xff{]\n\n" * 3), None),
    "a state that is not JSON": (of_bytes("state.json", b"\xff"), None),
    "a lock with content": (of_bytes(".lock", b"x"), None),
    **{f"a folder for {name}": (a_folder(name), name) for name in ("metrics.jsonl", "state.json", "config.yaml")},
    **{f"a {kind} for .lock": (make(".lock"), f"run.*: it is .*{word}") for kind, word, make in LOCKS},
    "a file for checkpoints": (a_file("checkpoints"), "checkpoints"),
    **{f"a pipe for {name}": (a_pipe(name), name) for name in ("config.yaml", "metrics.jsonl")},
    **{f"a pipe for {name}": (a_pipe(name), None) for name in ("state.json", "tokenizer.json")},
    **{
        f"a pipe for {name}": (a_pipe(f"checkpoints/{{last}}/{name}"), None) for name in (MANIFEST, "model.safetensors")
    },
    "a link for metrics.jsonl": (a_link("metrics.jsonl"), "metrics.jsonl.*symbolic link"),
    "no good checkpoint": (no_weights, r"step-\d+.*step-\d+.*delete or move this folder, or choose another run.name"),
    **{f"integer {group}": (integer_weights(group), r"torch\.int32 of shape") for group in ("model", "ema")},
    "a step too large": (in_manifest("counters", "step", 10**30), "step"),
    "a step below 0": (in_manifest("counters", "step", -1), "step"),
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
        assert run.resume().status == "finished"
    assert kept(run) == before or not message


@pytest.mark.parametrize("group", ["model", "ema"])
def test_weights_of_another_type_are_rejected(run: Run, group: str) -> None:
    integer_weights(group)(run)
    with pytest.raises(LmtrainError, match=r"torch\.int32 of shape"):
        run.load({"model": "raw", "ema": "auto"}[group])


def change_model(run: Run, field: str, value: int | str) -> None:
    path = run.folder / run_folder.CONFIG
    values = yaml.safe_load(path.read_text())
    values["model"][field] = value
    path.write_text(yaml.safe_dump(values))


@pytest.mark.parametrize("dim", [2**20, 2**10, 8])
def test_a_stored_configuration_cannot_ask_for_memory_that_its_weights_do_not_fill(run: Run, dim: int) -> None:
    change_model(run, "dim", dim)
    manifest = run.last() / MANIFEST
    content = unsealed(manifest.read_bytes())
    del content["model"]  # the first runs have no copy of the model section, and a hostile one can leave it out
    manifest.write_text(json.dumps(content))
    with limited_memory(1 << 30), pytest.raises(LmtrainError, match="does not fit"):
        run.load()


@pytest.mark.parametrize(("field", "value"), [("context", 72), ("position", "alibi"), ("norm", "layer")])
def test_a_changed_model_section_is_rejected(run: Run, field: str, value: int | str) -> None:
    change_model(run, field, value)
    message = rf"config.yaml has model.{field}={value}, .*step-\d+ was trained with {getattr(run.config.model, field)}"
    with pytest.raises(LmtrainError, match=message):
        run.load()
    with pytest.raises(LmtrainError, match=message):
        run.resume(run_folder.run_config(run.folder))


def test_a_model_field_that_a_stored_run_lacks_had_its_default(run: Run) -> None:
    found = checkpoint.load(run.last())
    del found.info["model"]["qk_norm"]
    checkpoint.check_model(found, run.config.model)
    with pytest.raises(LmtrainError, match=r"model\.qk_norm=True, .* was trained with False"):
        checkpoint.check_model(found, run.config.model.model_copy(update={"qk_norm": True}))


def test_a_run_of_another_configuration_is_left_as_it_was(run: Run) -> None:
    (run.last() / "model.safetensors").write_bytes(b"")
    before = contents(run.folder)
    other = run.config.model_copy(update={"model": run.config.model.model_copy(update={"norm": "layer"})})
    with pytest.raises(LmtrainError, match="another configuration"):
        run.resume(other)
    assert contents(run.folder) == before


@pytest.mark.parametrize("name", ["config.yaml", "tokenizer.json", "notes.txt"])
def test_a_folder_that_is_not_a_run_is_left_as_it_was(run: Run, name: str, tmp_path: Path) -> None:
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / name).write_text("mine")
    with pytest.raises(LmtrainError, match=r"gpt2 is not a run folder: .*; choose another run.name or run.dir"):
        run.resume(folder=tmp_path / "gpt2")
    assert contents(tmp_path / "gpt2") == {name: b"mine"}


@pytest.mark.parametrize(
    ("number", "file"),
    [(errno.EACCES, MANIFEST), (errno.EIO, MANIFEST), (errno.EIO, "model.safetensors"), (errno.EMFILE, MANIFEST)],
)
def test_a_checkpoint_that_cannot_be_read_is_not_set_aside(
    run: Run, number: int, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path) -> None:
        if path.name == file:
            raise OSError(number, os.strerror(number))

    before = contents(run.folder)
    monkeypatch.setattr("lmtrain.system.disk.check_regular", fail)
    with pytest.raises(LmtrainError, match=rf"step-\d+/{file} can't be read: {os.strerror(number)}"):
        run.resume()
    assert contents(run.folder) == before


def test_a_checkpoints_folder_that_cannot_be_listed_is_an_error(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: str | Path) -> NoReturn:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    listdir = os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: fail(path) if Path(path).name == "checkpoints" else listdir(path))
    with pytest.raises(LmtrainError, match="checkpoints can't be read: Permission denied"):
        run_checkpoints.folders(run.folder)


def test_a_pipe_in_place_of_a_text_is_rejected(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "own.txt")
    with pytest.raises(LmtrainError, match=r"own.txt can't be read"):
        download(DataConfig(source=str(tmp_path / "own.txt"), dir=tmp_path / "data"))


def test_a_folder_that_cannot_be_locked_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(file: object, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", fail)
    with pytest.raises(LmtrainError, match=r"\(No locks available\): set run.dir"), run_folder.lock(tmp_path):
        pass
