"""Documents that come twice, and the table that knows them."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmtrain.config.schema import DataConfig
from lmtrain.data import unique
from lmtrain.data.corpus import corpus_folder, download
from lmtrain.data.local import row_lines
from lmtrain.data.unique import Seen, unseen


@given(st.lists(st.integers(1, 5_000), max_size=400))
def test_a_table_is_a_set(values: list[int]) -> None:
    seen, reference = Seen(), set[int]()
    for value in values:
        assert seen.add(value.to_bytes(8, "little")) == (value not in reference)
        reference.add(value)


def test_a_table_grows_within_its_bounds() -> None:
    seen = Seen()
    for number in range(20_000):
        assert seen.add(((number + 1) * 0x9E3779B97F4A7C15 % 2**64).to_bytes(8, "little"))
        assert number < 1_000 or 8 * len(seen._table) <= 16.1 * (number + 1)
    assert seen.count == 20_000


TEXT = st.text("ab\n\u00e9", max_size=4)


@given(st.lists(TEXT, max_size=12), st.lists(TEXT, max_size=5), st.integers(1, 8))
def test_the_first_of_equal_documents_stays(rows: list[str], before: list[str], size: int) -> None:
    seen = Seen()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unique, "_IN_MEMORY", size)
        assert list(unseen(row_lines(before), seen, keep_all=True)) == list(row_lines(before))
        found = list(unseen(row_lines(rows), seen))
    known = {tuple(row_lines([row])) for row in before}
    expected: list[tuple[str, bool]] = []
    for row in rows:
        if (document := tuple(row_lines([row]))) not in known:
            expected += document
            known.add(document)
    assert found == expected


def test_text_without_documents_passes() -> None:
    assert list(unseen(iter([("a", False), ("a", False)]), Seen())) == [("a", False), ("a", False)]


def test_what_is_held_out_is_left_out_of_training(tmp_path: Path) -> None:
    folder = tmp_path / "text"
    folder.mkdir()
    for split, rows in {"train": ["a b", "c\nd", "a b", "held out", "c"], "valid": ["held out", "held out"]}.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    data = DataConfig(source=str(folder), dir=tmp_path / "data", deduplicate=True)
    made = download(data)
    assert list(made.lines("train")) == ["a b", "c", "d", "c"]
    assert made.document_starts("train").tolist() == [0, 1, 3]
    assert list(made.lines("valid")) == ["held out", "held out"]
    plain = data.model_copy(update={"deduplicate": False})
    assert corpus_folder(plain) != corpus_folder(data)
    assert len(list(download(plain).lines("train"))) == 6
