"""Checkpoints: what is read is what was written, and which of them is chosen."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from lmtrain.config.schema import Config
from lmtrain.errors import LmtrainError
from lmtrain.storage import checkpoint, run_checkpoints, run_folder, tensor_files
from tests.helpers import flip_bit, state_hash
from tests.storage.helpers import leftovers


def _save(run_dir: Path, step: int, score: Any = None) -> Path:
    torch.manual_seed(step)
    tensors = {"model": {"w": torch.randn(3, 4), "b": torch.zeros(2)}, "optimizer": {"w/step": torch.tensor(1.0)}}
    return checkpoint.save(run_dir, step, tensors, {"score": score, "counters": {"step": step}})


def test_a_file_of_tensors_is_as_the_library_writes_it() -> None:
    torch.manual_seed(0)
    values = [torch.randn(3, 4), torch.randn(4, 3).T, torch.tensor(2.5), torch.zeros(0, 5), torch.randn(7)[::2]]
    named = {f"{number}/é": value for number, value in enumerate(values)}
    assert b"".join(tensor_files.serialize(named)) == safetensors.torch.save(
        {name: value.contiguous() for name, value in named.items()}
    )
    mixed = {f"t{number}": torch.arange(number + 1).to(dtype) for number, dtype in enumerate(tensor_files._DTYPES)}
    content = b"".join(tensor_files.serialize(named | mixed))
    entries = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    assert all(entries[name]["data_offsets"][0] % value.itemsize == 0 for name, value in (named | mixed).items())
    found = safetensors.torch.load(content)
    assert found.keys() == named.keys() | mixed.keys()
    assert all(torch.equal(found[name], value) for name, value in (named | mixed).items())
    assert all(found[name].dtype == value.dtype for name, value in mixed.items())
    assert b"".join(tensor_files.serialize({})) == safetensors.torch.save({})


@pytest.mark.parametrize("file", ["manifest.json", "model.safetensors"])
def test_a_changed_bit_in_any_byte_is_found(tmp_path: Path, file: str) -> None:
    folder, rejected = _save(tmp_path, 1, 2.0), 0
    sound, expected = (folder / file).read_bytes(), state_hash(checkpoint.load(folder))
    for place in range(len(sound)):
        (folder / file).write_bytes(sound)
        flip_bit(folder / file, place)
        try:
            assert state_hash(checkpoint.load(folder)) == expected  # the name of the manifest's hash has changed
        except LmtrainError:
            rejected += 1
    assert rejected >= len(sound) - len("sha256")


def test_pruning_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    for step, score in enumerate((3.0, 1.0, 2.0, None, 4.0), start=1):
        _save(tmp_path, step, score)
    run_checkpoints.prune(tmp_path, 2)
    assert [folder.name for folder in run_checkpoints.folders(tmp_path)] == [f"step-{step:08}" for step in (2, 4, 5)]
    assert leftovers(tmp_path) == []


def test_best_of_equals_is_the_first_and_unscored_ones_come_last(tmp_path: Path) -> None:
    assert run_checkpoints.best_folder(tmp_path) is None
    _save(tmp_path, 1)
    newest = _save(tmp_path, 2)
    assert run_checkpoints.best_folder(tmp_path) == newest
    first = _save(tmp_path, 3, 2.0)
    _save(tmp_path, 4, 2.0)
    _save(tmp_path, 5)
    assert run_checkpoints.best_folder(tmp_path) == first


def _trained(run_dir: Path) -> list[Path]:
    """Checkpoints of which that of step 2 is the best."""
    return [_save(run_dir, step, score) for step, score in ((1, 3.0), (2, 1.0), (3, 2.0))]


@pytest.mark.parametrize("file", ["manifest.json", "model.safetensors"])
def test_a_damaged_best_is_named_or_an_error(tmp_path: Path, file: str, notes: list[str]) -> None:
    _, best, newest = _trained(tmp_path)
    (best / file).write_bytes((best / file).read_bytes()[:-5])
    assert run_checkpoints.load_chosen(tmp_path, None).folder == newest
    assert len(notes) == 1
    assert str(best / file) in notes[0]
    assert f"{newest.name} is used instead" in notes[0]
    assert run_checkpoints.choose(tmp_path, "best") == best
    assert run_checkpoints.best_folder(tmp_path) == newest
    with pytest.raises(LmtrainError, match=f"{best.name}/{file} .*: choose another checkpoint"):
        run_checkpoints.load_chosen(tmp_path, "best")
    for folder in run_checkpoints.folders(tmp_path):
        (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(LmtrainError, match="no checkpoint is undamaged"):
        run_checkpoints.load_chosen(tmp_path, None)


@pytest.mark.parametrize("which", [None, "best", "last"])
def test_a_checkpoint_that_is_replaced_while_it_is_read_is_not_damage(
    tmp_path: Path, which: str | None, monkeypatch: pytest.MonkeyPatch, notes: list[str]
) -> None:
    """As by a run that is being trained: it saves a better one and deletes the old one."""
    old, load = _save(tmp_path, 1, 2.0), checkpoint.load

    def replaced(folder: Path, *arguments: Any, **options: Any) -> Any:
        if folder == old and old.exists():
            _save(tmp_path, 2, 1.0)
            shutil.rmtree(old)
        return load(folder, *arguments, **options)

    monkeypatch.setattr(run_checkpoints, "load", replaced)
    found = run_checkpoints.load_chosen(tmp_path, which)
    assert (found.folder.name, notes) == ("step-00000002", [])


def test_a_damaged_manifest_may_be_that_of_the_best(tmp_path: Path) -> None:
    first, best, newest = _trained(tmp_path)
    (newest / "manifest.json").write_bytes(b"{}")
    (first / "manifest.json").write_bytes(b"{}")
    assert run_checkpoints.best_first(tmp_path) == [newest, first, best]


def test_choosing_by_name(tmp_path: Path) -> None:
    _save(tmp_path, 3, 1.0)
    _save(tmp_path, 10, 2.0)
    assert run_checkpoints.choose(tmp_path, "best").name == "step-00000003"
    assert run_checkpoints.choose(tmp_path, "last").name == "step-00000010"
    assert run_checkpoints.choose(tmp_path, "10").name == "step-00000010"
    _save(tmp_path, 99_999_999)
    _save(tmp_path, 100_000_000)
    assert run_checkpoints.choose(tmp_path, "last").name == "step-100000000"
    with pytest.raises(LmtrainError, match="its checkpoints: 3, 10, 99999999, 100000000"):
        run_checkpoints.choose(tmp_path, "4")


def test_a_run_is_found_by_path_by_name_or_as_the_latest(tmp_path: Path, tiny: Config) -> None:
    with pytest.raises(LmtrainError, match="train one with"):
        run_folder.find_run(None, tmp_path)
    with pytest.raises(LmtrainError, match="not a run folder"):
        run_folder.find_run(tmp_path, tmp_path)
    assert not run_folder.has_checkpoint(tmp_path / ("a" * 5_000))
    for name in ("missing", "a" * 5_000):
        with pytest.raises(LmtrainError, match=rf"there is no run {name}: train one with `lmtrain train`$"):
            run_folder.find_run(Path(name), tmp_path)
    for name in ("older", "newer"):
        run_folder.create_run(tmp_path / name, tiny)
        _save(tmp_path / name, 1)
        run_folder.write_state(tmp_path / name, "finished")
    os.utime(tmp_path / "older" / run_folder.STATE, (1, 1))
    assert run_folder.find_run(None, tmp_path).name == "newer"
    (tmp_path / "older" / run_folder.STATE).unlink()
    assert run_folder.find_run(None, tmp_path).name == "newer"
    for number in range(12):
        shutil.copytree(tmp_path / "older", tmp_path / "many" / f"run-{number:02}")
    with pytest.raises(LmtrainError, match=r"no run x; the runs in .*: run-00, .*, run-09, \.\.\. \(12 runs\)$"):
        run_folder.find_run(Path("x"), tmp_path / "many")
    assert run_folder.run_config(tmp_path / "newer") == tiny
    shutil.move(tmp_path / "newer", tmp_path / "elsewhere")
    assert checkpoint.load(run_checkpoints.choose(tmp_path / "elsewhere", "best"))


@pytest.mark.parametrize("score", ["x", [], float("nan")])
def test_a_score_of_another_kind_does_not_hide_the_other_checkpoints(tmp_path: Path, score: Any) -> None:
    for step, found in enumerate((1.0, score, 1.0), start=1):
        _save(tmp_path, step, found)
    assert run_checkpoints.best_folder(tmp_path) == tmp_path / "checkpoints/step-00000001"


def test_a_run_of_which_all_checkpoints_were_set_aside_does_not_start_over(tmp_path: Path) -> None:
    folder = _save(tmp_path, 1)
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[::-1])
    with pytest.raises(LmtrainError, match=r"no undamaged checkpoint \(.*model\.safetensors is damaged .*\): step"):
        run_checkpoints.last(tmp_path)
    folder.rename(f"{folder}.damaged")
    with pytest.raises(
        LmtrainError, match=r"has no undamaged checkpoint: step-00000001\.damaged can't be resumed from"
    ):
        run_checkpoints.last(tmp_path)


def test_folders_whose_names_have_no_step_are_not_checkpoints(tmp_path: Path) -> None:
    folder = _save(tmp_path, 1)
    for name in ("step-²", "step-x", "step-", "step-" + "9" * 200):
        (tmp_path / "checkpoints" / name).mkdir()
    assert run_checkpoints.folders(tmp_path) == [folder]
    for which in ("²", "9" * 5_000, "-1", ""):
        with pytest.raises(LmtrainError, match="neither best, last nor a step number"):
            run_checkpoints.choose(tmp_path, which)


def test_damaged_checkpoints_of_one_step_get_names_of_their_own(tmp_path: Path) -> None:
    for _ in range(3):
        folder = tmp_path / "step-00000001"
        folder.mkdir()
        run_checkpoints.set_aside([(folder, LmtrainError("damaged"))])
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-00000001.damaged{n}" for n in ("", 2, 3)]


@pytest.mark.usefixtures("folder")
def test_a_path_is_found_before_a_run_of_that_name(tiny: Config) -> None:
    for path in ("book", "runs/book"):
        run_folder.create_run(Path(path), tiny)
    assert run_folder.find_run(Path("book"), Path("runs")) == Path("book")


def test_a_run_named_by_a_path_without_its_name_has_one(
    tmp_path: Path, tiny: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_folder.create_run(tmp_path / "book", tiny)
    monkeypatch.chdir(tmp_path / "book/checkpoints")
    for path in ("..", "../checkpoints/.."):
        assert run_folder.find_run(Path(path), Path("runs")) == tmp_path / "book"
    monkeypatch.chdir(tmp_path / "book")
    assert run_folder.find_run(Path(), Path("runs")) == tmp_path / "book"


def test_pruning_keeps_the_best_whose_files_are_complete(tmp_path: Path) -> None:
    best, *_ = [_save(tmp_path, step, float(step)) for step in (1, 2, 3, 4)]
    (best / "model.safetensors").write_bytes(b"")
    run_checkpoints.prune(tmp_path, 1)
    assert {"step-00000002", "step-00000004"} <= {folder.name for folder in run_checkpoints.folders(tmp_path)}


def test_the_latest_run_is_one_with_a_checkpoint(tmp_path: Path, tiny: Config) -> None:
    for name in ("trained", "begun"):
        run_folder.create_run(tmp_path / name, tiny)
    _save(tmp_path / "trained", 1)
    run_folder.write_state(tmp_path / "begun", "running")
    assert run_folder.find_run(None, tmp_path).name == "trained"
