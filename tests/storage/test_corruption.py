"""Damage to a checkpoint: it is rejected, and a restart uses the one before; or what is read is unchanged."""

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmtrain.errors import LmtrainError
from lmtrain.storage import run_checkpoints
from lmtrain.storage.files import MANIFEST
from tests.storage.helpers import GROUPS, read, restart, save

PLACES = 100


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    for step in (1, 2):
        save(tmp_path, step)
    return tmp_path


def damages(name: str, sound: bytes, twin: bytes) -> Iterator[bytes | None]:
    """What damage may make of a file; None: it is missing. `twin` is the file of this name in another checkpoint."""
    generator = random.Random(0)

    def flipped(offset: int) -> bytes:
        return sound[:offset] + bytes([sound[offset] ^ 1 << generator.randrange(8)]) + sound[offset + 1 :]

    header = len(sound) if name == MANIFEST else 8 + int.from_bytes(sound[:8], "little")
    yield from (None, b"", twin)
    yield from (flipped(offset) for offset in range(header))
    for _ in range(PLACES):
        offset, length = generator.randrange(len(sound)), generator.randrange(1, 100)
        yield flipped(offset)
        yield sound[:offset] + bytes(len(sound[offset : offset + length])) + sound[offset + length :]
        yield sound[:offset]
        yield sound + generator.randbytes(length)


def outcome(bad: Path, before: str, original: str) -> str:
    """What reading the damaged checkpoint gives, and then a restart; after that the folder has its name again."""
    try:
        return "unchanged" if read(bad) == original else "WRONG"
    except LmtrainError as error:
        if str(bad) not in str(error):
            return f"WRONG message: {error}"
    restarted, notes = restart(bad.parent.parent)
    aside = bad.with_name(f"{bad.name}.damaged")
    if restarted != before or len(notes) != 1 or aside.name not in notes[0] or bad.exists():
        return f"WRONG restart: {notes}"
    aside.rename(bad)
    return "rejected"


@pytest.mark.parametrize("name", [MANIFEST, *(f"{group}.safetensors" for group in GROUPS)])
def test_a_damaged_file_is_rejected_and_the_checkpoint_before_is_used(run_dir: Path, name: str) -> None:
    older, newest = run_checkpoints.folders(run_dir)
    before, original, path = read(older), read(newest), newest / name
    sound, twin = path.read_bytes(), (older / name).read_bytes()
    found: Counter[str] = Counter()
    for content in damages(name, sound, twin):
        if content is None:
            path.unlink()
        else:
            path.write_bytes(content)
        if content != sound:
            found[outcome(newest, before, original)] += 1
    unchanged = found.pop("unchanged", 0)  # a blank of the manifest, or the name of its hash
    assert unchanged == 0 or (name == MANIFEST and unchanged < found["rejected"] / 20)
    assert found.keys() == {"rejected"}
    assert found["rejected"] > 3 * PLACES
