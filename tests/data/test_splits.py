"""What is cut off a text to be held out: how much, where, and in how much memory."""

import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from lmtrain.data import splits as normal
from lmtrain.data.splits import Lines, cut_split

SHARES = {"train": 0.9, "valid": 0.05, "test": 0.05}


def cut(folder: Path, lines: Lines) -> dict[str, dict[str, int]]:
    return cut_split(folder, lines, SHARES, lambda _: None, progress=False)


def test_documents_too_long_to_hold_one_out_are_cut_by_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(normal, "HELD_OUT", 100)
    counts = cut(tmp_path, (("a", number % 1_000 == 0) for number in range(30_000)))
    found = {split: (own["lines"], own["documents"], own["bytes"]) for split, own in counts.items()}
    assert found == {"train": (29_900, 30, 59_800), "valid": (50, 1, 100), "test": (50, 1, 100)}
    assert load_starts(tmp_path / "train.docs.npy").tolist() == list(range(0, 30_000, 1_000))


@pytest.mark.parametrize(("lines", "most", "held_out"), [(20, 2, 1), (37, 2, 1), (1_000, 33, 3)])
def test_each_split_has_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: int, most: int, held_out: int
) -> None:
    monkeypatch.setattr(normal, "HELD_OUT", most)  # bytes, of which a line has 11
    cut(tmp_path, ((f"{number:010}", False) for number in range(lines)))
    found = {split: [int(line) for line in normal.read_lines(tmp_path / f"{split}.txt")] for split in SHARES}
    assert [len(found["valid"]), len(found["test"])] == [held_out, held_out]
    assert found["train"] + found["valid"] + found["test"] == list(range(lines))


def test_to_cut_takes_memory_for_what_is_cut_off_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(normal, "HELD_OUT", 100)
    monkeypatch.setattr(normal, "_BLOCK", 1 << 16)
    write = normal.write_split

    def written(folder: Path, split: str, lines: Any, progress: bool, called: str | None = None) -> dict[str, int]:
        counts = write(folder, split, lines, progress, called)
        if split == "train":
            tracemalloc.start()
        return counts

    monkeypatch.setattr(normal, "write_split", written)
    try:
        cut(tmp_path, (("a", False) for _ in range(400_000)))
        assert tracemalloc.get_traced_memory()[1] < 1_600_000  # a block, the buffers of files; not 8 bytes a line
    finally:
        tracemalloc.stop()
