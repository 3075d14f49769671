"""Hostile files: whatever they hold, lmtrain uses them or rejects them with one message, in little memory.

scripts/fuzz feeds the same parsers for as long as one likes; what it found is in the tables here and in FRAGMENTS.
"""

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmtrain.data.corpus import open_corpus
from lmtrain.errors import LmtrainError
from lmtrain.storage import checkpoint, run_checkpoints
from lmtrain.storage.files import MANIFEST
from tests.hostile.folders import sign, unsealed
from tests.hostile.inputs import FRAGMENTS, Parser, attempt, edited, limited_memory, variants
from tests.hostile.parsers import PARSERS

ROOT = Path(__file__).parent.parent
MEMORY = 1 << 30
EDITS = st.lists(
    st.tuples(st.integers(0, 1 << 14), st.integers(0, 40), st.binary(max_size=8) | st.sampled_from(FRAGMENTS))
    | st.tuples(st.integers(0, 1 << 14), st.just(4), st.binary(min_size=4, max_size=4)),
    min_size=1,
    max_size=6,
)
JSON = {"tokenizer": 1, "corpus": 3, "tokens": 3, "checkpoint": 13}
"""The parsers whose first seed is a JSON document, and how many of its variants are skipped between two."""


def feed(parser: Parser, data: bytes) -> str:
    """`accepted` or `rejected`, within the memory limit and with one short line."""
    with limited_memory(MEMORY):
        kind, detail = attempt(parser.feed, data)
    assert kind != "crashed", (detail, data[:200])
    assert "\n" not in detail
    assert len(detail) < 2_000
    return kind


def hostile_inputs(name: str, seeds: list[bytes]) -> Iterator[bytes]:
    """Fragments, and valid JSON in which one value is odd."""
    for number, fragment in enumerate([b"", *FRAGMENTS]):
        yield bytes([number % 10]) + fragment
    if name in JSON:
        first = b"" if name == "tokenizer" else seeds[0][:1]
        for data in islice(variants(json.loads(seeds[0].removeprefix(first))), 0, None, JSON[name]):
            yield first + data
    if name == "checkpoint":
        first, header = seeds[-1][:1], json.loads(seeds[-1][1:])
        one, other = header["embedding.weight"], header["norm.weight"]
        for data in islice(variants(header), 0, None, 31):
            yield first + data
        yield first + json.dumps({**header, "more": one}).encode()
        yield first + json.dumps(header)[:-1].encode() + b', "embedding.weight": ' + json.dumps(other).encode() + b"}"


@pytest.mark.parametrize("name", PARSERS)
def test_a_parser_accepts_what_lmtrain_writes_and_uses_or_rejects_everything_else(name: str, tmp_path: Path) -> None:
    parser = PARSERS[name](tmp_path)
    assert {feed(parser, seed) for seed in parser.seeds} == {"accepted"}
    kinds = [feed(parser, data) for data in hostile_inputs(name, parser.seeds)]
    assert kinds.count("rejected") > len(kinds) // 3 or name not in JSON
    assert "rejected" in kinds
    kinds.clear()

    @settings(max_examples=60, derandomize=True, deadline=None, database=None)
    @given(number=st.integers(0, len(parser.seeds) - 1), edits=EDITS)
    def search(number: int, edits: list[tuple[int, int, bytes]]) -> None:
        kinds.append(feed(parser, edited(parser.seeds[number], edits)))

    search()
    assert "rejected" in kinds


def tensor_file(entry: dict[str, Any]) -> bytes:
    """A safetensors file of four bytes of data, with this entry for its tensor `w`."""
    header = json.dumps({"w": entry}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(4)


TENSOR_FILES = {
    **{
        f"{dtype} {shape} {ends}": tensor_file({"dtype": dtype, "shape": shape, "data_offsets": ends})
        for dtype, shape, ends in (
            ("F32", [0, 2**62], [0, 0]),
            ("F32", [2**63, 0], [0, 0]),
            ("F32", [2**32, 2**32], [0, 0]),
            ("F32", [1], [2**63, 2**63 + 4]),
            ("F32", [1] * 100, [0, 4]),
            ("F4", [8], [0, 4]),
            ("F8_E8M0", [4], [0, 4]),
            ("C64", [0], [0, 0]),
        )
    },
    **{
        f"header of {length} bytes": struct.pack("<Q", length) + b"{" * 1000
        for length in (100_000_000, 2**40, 2**63, 2**64 - 1)
    },
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small checkpoint of a run in tmp_path."""
    return checkpoint.save(tmp_path, 1, {"model": {"w": torch.zeros(1)}}, {"score": None})


@pytest.mark.parametrize("name", TENSOR_FILES)
def test_a_hostile_tensor_file_is_rejected_in_little_memory(name: str, folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(TENSOR_FILES[name])
    sign(folder, "model.safetensors")
    with limited_memory(64 << 20), pytest.raises((LmtrainError, ValueError)):  # ValueError: of another shape or type
        checkpoint.check_fit(checkpoint.load(folder).tensors["model"], {"w": torch.zeros(1)})


@pytest.mark.parametrize("name", ["x" * 300, "a\0b", "\ud800", "", ".", "sub/../../x", "/etc/passwd", "\x1b[2J\n"])
def test_a_manifest_with_a_name_outside_its_folder_is_rejected(folder: Path, name: str) -> None:
    manifest = unsealed((folder / MANIFEST).read_bytes())
    manifest["files"][name] = {"bytes": 1, "sha256": "0" * 64}
    (folder / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(LmtrainError) as caught:
        checkpoint.load(folder)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("score", ["x", [], float("nan")])
def test_a_score_of_another_kind_does_not_hide_the_other_checkpoints(tmp_path: Path, score: Any) -> None:
    for step, found in enumerate((1.0, score, 1.0), start=1):
        checkpoint.save(tmp_path, step, {"model": {"w": torch.zeros(1)}}, {"score": found})
    assert run_checkpoints.best_folder(tmp_path) == tmp_path / "checkpoints/step-00000001"


def test_folders_whose_names_have_no_step_are_not_checkpoints(folder: Path, tmp_path: Path) -> None:
    for name in ("step-²", "step-x", "step-", "step-" + "9" * 200):
        (tmp_path / "checkpoints" / name).mkdir()
    assert run_checkpoints.folders(tmp_path) == [folder]
    for which in ("²", "9" * 5_000, "-1", ""):
        with pytest.raises(LmtrainError, match="neither best, last nor a step number"):
            run_checkpoints.choose(tmp_path, which)


def test_a_pipe_in_place_of_a_manifest_is_rejected(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / MANIFEST)
    with pytest.raises(LmtrainError, match="no regular file"):
        open_corpus(tmp_path)


def test_the_fuzzer_counts_its_inputs_and_saves_those_that_crash(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "fuzz"), "planted", "--inputs", "200", "--crashes", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    result = json.loads(done.stdout)
    assert (result["parser"], result["inputs"]) == ("planted", 200)
    assert result["accepted"] + result["crashes"] == 200
    kept = [path.read_bytes() for path in tmp_path.iterdir()]
    assert kept
    assert all(b"!" in data for data in kept)
