"""The splits of a corpus: what is written and counted, and what is cut off a text to be held out."""

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


def test_very_long_line_counts_its_words(tmp_path: Path) -> None:
    line = "word \u00a0\x1c" * 400_000
    counts = write_split(tmp_path, "train", iter([(line, False)]), "the text")
    assert counts["words"] == len(line.split()) == 400_000


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


LONG = [f"w{number:03}" for number in range(400)]


@pytest.mark.parametrize(
    ("lines", "train"),
    [
        ([" ".join(LONG)], 360),
        (["\t".join(LONG)], 360),
        ([LONG[0], "", " ".join(LONG[1:])], 359),
        ([*LONG[:20], " ".join(LONG[20:])], 360),
        ([*(" ".join(LONG[first : first + 10]) for first in range(0, 340, 10)), " ".join(LONG[340:])], 360),
    ],
    ids=["one-line", "tabs", "few-lines", "one-line-that-is-most-of-the-text", "one-that-is-a-seventh"],
)
def test_long_lines_are_cut_between_words(tmp_path: Path, lines: list[str], train: int, notes: list[str]) -> None:
    counts = cut(tmp_path, ((line, False) for line in lines))
    text = {split: (tmp_path / f"{split}.txt").read_text() for split in SPLITS}
    assert [text[split].split() for split in SPLITS] == [LONG[:train], LONG[train : train + 20], LONG[train + 20 :]]
    assert [text["valid"].count("\n"), text["test"].count("\n")] == [1, 1]
    for split, own in text.items():
        assert own.endswith("\n")
        found = {"lines": own.count("\n"), "words": len(own.split()), "bytes": len(own.encode()), "documents": 1}
        assert counts[split] == found
    assert notes == ["no validation split: the words are split, in order, into 90% train, 5% valid, 5% test"]


def test_lines_too_long_to_hold_one_out_are_cut_between_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splits, "HELD_OUT", 20)
    counts = cut(tmp_path, ((" ".join(LONG[first : first + 10]), False) for first in range(0, 400, 10)))
    assert {split: own["words"] for split, own in counts.items()} == {"train": 392, "valid": 4, "test": 4}


def test_a_text_without_a_place_for_a_cut_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(LmtrainError, match=r"^the train split, cut from the text at a space .* has no words: give it"):
        cut(tmp_path, [("x" * 1_000 + " y" * 30, False)])


def test_documents_keep_their_lines_where_words_are_cut(tmp_path: Path) -> None:
    parts = [LONG[:340], LONG[340:375], LONG[375:390], LONG[390:]]
    counts = cut(tmp_path, ((" ".join(words), True) for words in parts))
    assert [counts[split]["documents"] for split in SPLITS] == [2, 2, 2]
    starts = [np.load(tmp_path / f"{split}.docs.npy").tolist() for split in SPLITS]
    assert starts == [[0, 1], [0, 1], [0, 1]]
    assert (tmp_path / "valid.txt").read_text().split("\n")[1].split() == LONG[375:380]
