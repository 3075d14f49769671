"""The splits of a corpus: what is written and counted, and what is cut off a text to be held out."""

import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmtrain.data import local, splits
from lmtrain.data.splits import Lines, cut_split, write_split
from lmtrain.errors import LmtrainError

SPLITS = ("train", "valid", "test")


def cut(folder: Path, lines: Lines) -> dict[str, dict[str, int]]:
    return cut_split(folder, lines, SPLITS, "the text")


@settings(max_examples=60)
@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0\n\r\ufeff")), min_size=1))
def test_any_text_round_trips(tmp_path_factory: pytest.TempPathFactory, lines: list[str]) -> None:
    lines = [*lines, "word"]
    folder = tmp_path_factory.mktemp("text")
    (folder / "source.txt").write_bytes("\n".join(lines).encode())
    counts = write_split(folder, "train", local.read_lines([folder / "source.txt"], "text"), "the text")
    assert (folder / "train.txt").read_bytes().decode() == "".join(f"{line}\n" for line in lines)
    assert counts["words"] == sum(len(line.split()) for line in lines)
    assert counts["bytes"] == (folder / "train.txt").stat().st_size


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("word \u00a0\x1c" * 3, ["word \u00a0\x1c", "word \u00a0\x1c", "word \u00a0\x1c"]),
        ("a b\tc" + "d" * 20 + " e ", ["a b\t", "cddddddddd", "dddddddddd", "d e "]),
        ("東" * 20, ["東" * 10, "東" * 10]),
    ],
)
def test_a_long_line_is_broken_after_whitespace_if_there_is_any(
    tmp_path: Path, line: str, parts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(splits, "MAX_LINE", 10)
    monkeypatch.setattr(splits, "_PART", re.compile(splits._PART.pattern.replace(str(1 << 17), "10")))
    counts = write_split(tmp_path, "train", [("short", True), (line, True), ("", False)], "the text")
    assert (tmp_path / "train.txt").read_text().split("\n") == ["short", *parts, "", ""]
    assert counts["lines"] == 2 + len(parts)
    assert np.load(tmp_path / "train.docs.npy").tolist() == [0, 1]


def test_a_text_of_one_long_line_is_split(tmp_path: Path) -> None:
    line = " ".join(map(str, range(500_000)))
    counts = cut(tmp_path, [(line, False)])
    assert sum(own["words"] for own in counts.values()) == 500_000
    assert "".join((tmp_path / f"{split}.txt").read_text() for split in SPLITS).replace("\n", "") == line


def test_documents_too_long_to_hold_one_out_are_cut_by_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splits, "HELD_OUT", 100)
    counts = cut(tmp_path, (("a", number % 1_000 == 0) for number in range(30_000)))
    found = {split: (own["lines"], own["documents"], own["bytes"]) for split, own in counts.items()}
    assert found == {"train": (29_900, 30, 59_800), "valid": (50, 1, 100), "test": (50, 1, 100)}
    assert np.load(tmp_path / "train.docs.npy").tolist() == list(range(0, 30_000, 1_000))


@pytest.mark.parametrize(
    ("lengths", "unit", "held_out"),
    [
        ([10] * 40, "documents", (20, 20)),
        ([*[10] * 38, 18, 11], "documents", (20, 29)),
        ([*[10] * 38, 200, 10], "lines", (29, 30)),
        ([*[10] * 38, 10, 600], "lines", (50, 49)),
        ([600, *[10] * 39], "lines", (50, 49)),
    ],
)
def test_documents_of_very_different_lengths_are_cut_by_lines(
    tmp_path: Path, lengths: list[int], unit: str, held_out: tuple[int, int], notes: list[str]
) -> None:
    counts = cut(tmp_path, (("a word", line == 0) for length in lengths for line in range(length)))
    assert (counts["valid"]["lines"], counts["test"]["lines"]) == held_out
    assert sum(own["lines"] for own in counts.values()) == sum(lengths)
    assert f"the {unit} are split" in notes[0]


@pytest.mark.parametrize(
    "lines", [["two words"], ["word"] * 19, [*["word"] * 40, "word " * 5], ["x" * 1_000, " y" * 30]]
)
def test_a_text_without_a_place_for_a_cut_is_rejected(tmp_path: Path, lines: list[str]) -> None:
    with pytest.raises(LmtrainError, match=r"^the text can't be split, since .*: break its lines, .* fold -s"):
        cut(tmp_path, ((line, False) for line in lines))
