"""A token store whose files or manifest were damaged, changed or forged is refused when it is opened."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmtrain.data.tokens import TokenStore, open_store
from lmtrain.errors import LmtrainError
from lmtrain.storage.files import MANIFEST, sha256_bytes
from tests.data.test_tokens import DOCUMENTS, flip, make, make_corpus


@settings(max_examples=100)
@given(name=st.sampled_from(["train-00000.npy", "train-00000.docs.npy", "tokenizer.json", MANIFEST]), data=st.data())
def test_truncated_and_changed_files_are_refused(
    name: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp() / "damaged"
    if not folder.exists():
        make(folder)
    store = open_store(next(folder.glob("tiny.word-*")))
    path = store.folder / name
    sound = path.read_bytes()
    position = data.draw(st.integers(0, len(sound) - 1))
    try:
        if name != MANIFEST and data.draw(st.booleans()):
            flip(path, position)
        else:
            # The manifest without its last byte, a newline, is whole.
            path.write_bytes(sound[: min(position, len(sound) - 2)])
        with pytest.raises(LmtrainError):
            open_store(store.folder)
    finally:
        path.write_bytes(sound)


def forge(store: TokenStore, name: str, content: bytes, **changes: Any) -> None:
    """Change a file of a store and its manifest so that sizes and hashes agree."""
    (store.folder / name).write_bytes(content)
    manifest = store.manifest | changes
    manifest["files"] = manifest["files"] | {name: {"bytes": len(content), "sha256": sha256_bytes(content)}}
    (store.folder / MANIFEST).write_text(json.dumps(manifest))


@pytest.mark.parametrize("shape", [(17,), (19,), (2**62,), (2, 9), (-1,)])
def test_headers_that_lie_about_the_shape_are_refused(shape: tuple[int, ...], tmp_path: Path) -> None:
    store = make(tmp_path)
    header = f"{{'descr': '<u2', 'fortran_order': False, 'shape': {shape}, }}".ljust(117).encode() + b"\n"
    ids = (store.folder / "train-00000.npy").read_bytes()
    forge(store, "train-00000.npy", ids[:10] + header + ids[128:])
    with pytest.raises(LmtrainError, match="isn't an array of 18 uint16"):
        open_store(store.folder)


@pytest.mark.parametrize("size", [0, 1, 10, 127, 128, 129, 163, 165])
def test_arrays_of_other_lengths_are_refused_even_with_matching_hashes(size: int, tmp_path: Path) -> None:
    store = make(tmp_path)
    ids = (store.folder / "train-00000.npy").read_bytes()
    assert len(ids) == 164
    forge(store, "train-00000.npy", (ids + b"\0")[:size])
    with pytest.raises(LmtrainError, match="isn't an array of 18 uint16"):
        open_store(store.folder)


def test_ids_and_documents_out_of_range_are_refused(tmp_path: Path) -> None:
    store = make(tmp_path)
    ids, documents = ((store.folder / name).read_bytes() for name in ("train-00000.npy", "train-00000.docs.npy"))
    forge(store, "train-00000.npy", ids[:-2] + np.uint16(store.tokenizer.vocab_size).tobytes())
    with pytest.raises(LmtrainError, match="out of range"):
        open_store(store.folder)
    for wrong in (18, 12, -1, 2**63 - 1):
        forge(store, "train-00000.npy", ids)
        forge(store, "train-00000.docs.npy", documents[:-8] + np.int64(wrong).tobytes())
        with pytest.raises(LmtrainError, match="out of range"):
            open_store(store.folder)


def test_the_tokenizer_of_another_store_is_refused(tmp_path: Path) -> None:
    store, other = make(tmp_path), make(tmp_path / "other", documents={"train": [["other words"]]})
    forge(store, "tokenizer.json", (other.folder / "tokenizer.json").read_bytes())
    with pytest.raises(LmtrainError, match="isn't the tokenizer of this store"):
        open_store(store.folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"splits": None},
        {"splits": {"../train": {}}},
        {"splits": {"train": {"tokens": "18"}}},
        {"corpora_sha256": 3},
        {"vocab_size": True},
        {"vocab_size": 10**30},
    ],
)
def test_manifests_of_another_shape_are_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    store = make(tmp_path)
    (store.folder / MANIFEST).write_text(json.dumps(store.manifest | changes))
    with pytest.raises(LmtrainError, match="damaged"):
        open_store(store.folder)


def test_other_folders_are_refused(tmp_path: Path) -> None:
    make_corpus(tmp_path / "tiny", DOCUMENTS)
    with pytest.raises(LmtrainError, match="has format"):
        open_store(tmp_path / "tiny")
    with pytest.raises(LmtrainError, match=r"no manifest\.json"):
        open_store(tmp_path / "none")
