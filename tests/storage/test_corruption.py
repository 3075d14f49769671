"""Damage to a checkpoint: it is rejected, and a restart uses the one before; or what is read is unchanged."""

import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from lmtrain.errors import LmtrainError
from lmtrain.storage import checkpoint, run_checkpoints, run_folder
from lmtrain.storage.files import MANIFEST
from tests.helpers import Content, content, read

GROUPS = ("model", "optimizer", "ema")
OFFSETS = 300


def save(run_dir: Path, step: int) -> Path:
    """A checkpoint as training writes it, of a model with two parameters."""
    torch.manual_seed(step)
    model = torch.nn.Linear(24, 12)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 24)).square().mean().backward()
    optimizer.step()
    moments = {
        f"{name}/{key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }
    weights = dict(model.state_dict())
    averages = {name: value * 0.9 for name, value in weights.items()}
    info = {
        "score": 4.5 - step,
        "counters": {"step": step, "best": 3.5, "best_step": step, "stale": 2, "scaler": {"scale": 65536.0}},
        "seconds": 12.25,
        "machine": {"processor": "A processor", "threads": 1},
    }
    return checkpoint.save(run_dir, step, {"model": weights, "optimizer": moments, "ema": averages}, info)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    for step in (1, 2):
        save(tmp_path, step)
    return tmp_path


def same(left: Content, right: Content) -> bool:
    """Equal tensors, bit for bit, and every entry of `right` in `left`."""
    return all(left.info.get(key) == value for key, value in right.info.items()) and all(
        left.tensors[group].keys() == named.keys()
        and all(torch.equal(left.tensors[group][name], value) for name, value in named.items())
        for group, named in right.tensors.items()
    )


def outcome(run_dir: Path, original: Content) -> str:
    """What reading the damaged checkpoint gives: rejected, unchanged, or WRONG."""
    try:
        return "unchanged" if same(read(original.folder), original) else "WRONG"
    except LmtrainError as error:
        return "rejected" if str(original.folder) in str(error) else "WRONG message"


def restart(run_dir: Path, bad: Path, before: Content) -> str:
    """What a restart does with the damaged checkpoint; its folder then gets its name back."""
    notes: list[str] = []
    aside = bad.with_name(f"{bad.name}.damaged")
    with run_folder.lock(run_dir):
        found = run_checkpoints.last(run_dir, notes.append)
    if found is None or not same(content(found), before) or found.folder != before.folder:
        return "WRONG"
    if len(notes) != 1 or aside.name not in notes[0] or not aside.is_dir() or bad.exists():
        return "not set aside"
    aside.rename(bad)
    return "the one before"


def changed(content: bytes, offset: int, value: int) -> bytes:
    return content[:offset] + bytes([value]) + content[offset + 1 :]


def header_size(content: bytes) -> int:
    """Bytes before the tensors in a safetensors file: a length, and JSON of that length."""
    return 8 + int.from_bytes(content[:8], "little")


def test_every_bit_of_the_manifest(run_dir: Path, record_property: Callable[[str, object], None]) -> None:
    before, original = (read(folder) for folder in run_checkpoints.folders(run_dir))
    path = original.folder / MANIFEST
    sound = path.read_bytes()
    found: Counter[str] = Counter()
    restarts: Counter[str] = Counter()
    for offset, byte in enumerate(sound):
        for bit in range(8):
            path.write_bytes(changed(sound, offset, byte ^ 1 << bit))
            result = outcome(run_dir, original)
            found[result] += 1
            if result == "rejected" and bit == offset % 8:
                restarts[restart(run_dir, original.folder, before)] += 1
    path.write_bytes(sound)
    record_property("damages", found.total())
    assert found.keys() == {"rejected", "unchanged"}
    assert found["rejected"] > 20 * found["unchanged"]
    assert restarts.keys() == {"the one before"}
    assert restarts.total() > 500


@pytest.mark.parametrize("entry", ['"score": 2.5', '"step": 2', '"stale": 2', '"threads": 1'])
def test_a_changed_number_in_the_manifest_is_found(run_dir: Path, entry: str) -> None:
    folder = run_checkpoints.folders(run_dir)[-1]
    manifest = (folder / MANIFEST).read_text()
    assert manifest.count(entry) >= 1
    (folder / MANIFEST).write_text(manifest.replace(entry, entry[:-1] + "3"))
    with pytest.raises(LmtrainError, match="is damaged or was changed"):
        checkpoint.load(folder)
    best = run_checkpoints.best_folder(run_dir)
    assert best is not None
    assert best.name == "step-00000001"


def test_every_byte_of_the_headers(run_dir: Path, record_property: Callable[[str, object], None]) -> None:
    before, original = (read(folder) for folder in run_checkpoints.folders(run_dir))
    generator = random.Random(0)
    found: Counter[str] = Counter()
    for group in GROUPS:
        path = original.folder / f"{group}.safetensors"
        sound = path.read_bytes()
        for offset in range(header_size(sound)):
            path.write_bytes(changed(sound, offset, sound[offset] ^ 1 << generator.randrange(8)))
            found[outcome(run_dir, original)] += 1
            found[restart(run_dir, original.folder, before)] += 1
        path.write_bytes(sound)
    record_property("damages", found["rejected"])
    assert found.keys() == {"rejected", "the one before"}
    assert found["rejected"] > 500


def damages(path: Path, twin: Path, offset: int, generator: random.Random) -> Iterator[Callable[[], object]]:
    """Ways to damage the file from this offset on; `twin` is the file of this name in another checkpoint."""
    sound = path.read_bytes()
    length = generator.randrange(1, 400)
    zeroed = sound[:offset] + bytes(len(sound[offset : offset + length])) + sound[offset + length :]
    yield lambda: path.write_bytes(changed(sound, offset, sound[offset] ^ 1 << generator.randrange(8)))
    yield lambda: path.write_bytes(zeroed)
    yield lambda: path.write_bytes(sound[:offset])
    yield lambda: path.write_bytes(sound + generator.randbytes(length))
    yield path.unlink
    yield lambda: shutil.copyfile(twin, path)


def test_damage_anywhere_in_the_tensors(run_dir: Path, record_property: Callable[[str, object], None]) -> None:
    before, original = (read(folder) for folder in run_checkpoints.folders(run_dir))
    generator = random.Random(1)
    found: Counter[str] = Counter()
    for number in range(OFFSETS):
        name = f"{GROUPS[number % len(GROUPS)]}.safetensors"
        path, twin = original.folder / name, before.folder / name
        sound = path.read_bytes()
        offset = generator.randrange(header_size(sound), len(sound))
        for damage in damages(path, twin, offset, generator):
            damage()
            if path.exists() and path.read_bytes() == sound:
                found["no damage"] += 1  # what was zeroed was zero
                continue
            found[outcome(run_dir, original)] += 1
            found[restart(run_dir, original.folder, before)] += 1
            path.write_bytes(sound)
    record_property("damages", found["rejected"])
    assert found.keys() <= {"rejected", "the one before", "no damage"}
    assert found["rejected"] > 5.9 * OFFSETS
    assert found["the one before"] == found["rejected"]


def test_a_manifest_of_another_step_or_none(run_dir: Path) -> None:
    before, original = (read(folder) for folder in run_checkpoints.folders(run_dir))
    path = original.folder / MANIFEST
    for damage in (lambda: shutil.copyfile(before.folder / MANIFEST, path), path.unlink, lambda: path.write_bytes(b"")):
        damage()
        assert outcome(run_dir, original) == "rejected"
        assert restart(run_dir, original.folder, before) == "the one before"


def test_a_manifest_without_a_hash_is_read(run_dir: Path) -> None:
    """Manifests had no hash of their own at first."""
    original = read(run_checkpoints.folders(run_dir)[-1])
    path = original.folder / MANIFEST
    lines = path.read_text().splitlines()
    assert lines[-2].startswith('  "sha256": ')
    path.write_text("\n".join([*lines[:-3], lines[-3].rstrip(","), "}"]))
    found = read(original.folder)
    assert found.info == original.info
    assert same(found, original)


def test_hashes_left_unchecked_would_be_found(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = read(run_checkpoints.folders(run_dir)[-1])
    path = original.folder / "model.safetensors"
    sound = path.read_bytes()
    path.write_bytes(changed(sound, len(sound) - 2, sound[-2] ^ 1))
    assert outcome(run_dir, original) == "rejected"
    monkeypatch.setattr(checkpoint, "has_hash", lambda *_: True)
    assert outcome(run_dir, original) == "WRONG"
