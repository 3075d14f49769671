"""Hostile files: whatever they hold, lmtrain uses them or refuses them in one sentence, in little memory.

scripts/fuzz feeds the same parsers for as long as one likes.
"""

import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmtrain.data.corpus import open_corpus
from lmtrain.errors import LmtrainError
from lmtrain.storage import checkpoint
from lmtrain.storage.files import MANIFEST
from lmtrain.storage.tensor_files import Stored
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
GetParser = Callable[[str], Parser]


@pytest.fixture(scope="module")
def parser(tmp_path_factory: pytest.TempPathFactory) -> GetParser:
    """Each parser, made once."""
    made: dict[str, Parser] = {}

    def get(name: str) -> Parser:
        if name not in made:
            made[name] = PARSERS[name](tmp_path_factory.mktemp(name))
        return made[name]

    return get


def check(feed: Callable[[bytes], None], data: bytes) -> str:
    """Feed within the limit of memory: `accepted` or `refused`."""
    with limited_memory(MEMORY):
        kind, detail = attempt(feed, data)
    assert kind != "crashed", detail
    assert "\n" not in detail
    assert len(detail) < 2_000
    return kind


@pytest.mark.parametrize("name", PARSERS)
def test_what_lmtrain_writes_it_accepts(parser: GetParser, name: str) -> None:
    kinds = [check(parser(name).feed, seed) for seed in parser(name).seeds]
    assert kinds == ["accepted"] * len(kinds)


@pytest.mark.parametrize("name", PARSERS)
def test_edited_files_are_used_or_refused(parser: GetParser, name: str) -> None:
    seeds, feed = parser(name).seeds, parser(name).feed
    kinds: set[str] = set()

    @settings(max_examples=60, derandomize=True, deadline=None, database=None)
    @given(number=st.integers(0, len(seeds) - 1), edits=EDITS)
    def search(number: int, edits: list[tuple[int, int, bytes]]) -> None:
        kinds.add(check(feed, edited(seeds[number], edits)))

    search()
    assert "refused" in kinds


@pytest.mark.parametrize("name", PARSERS)
def test_arbitrary_bytes_are_used_or_refused(parser: GetParser, name: str) -> None:
    feed = parser(name).feed
    kinds = {check(feed, bytes([number % 10]) + fragment) for number, fragment in enumerate([b"", *FRAGMENTS])}
    assert "refused" in kinds


@pytest.mark.parametrize("name", ["tokenizer", "corpus", "tokens", "checkpoint"])
def test_json_with_one_odd_value_is_used_or_refused(parser: GetParser, name: str) -> None:
    first = b"" if name == "tokenizer" else b"\0"
    document = json.loads(parser(name).seeds[0].removeprefix(first))
    every = {"tokenizer": 1, "checkpoint": 13}.get(name, 3)
    kinds = [check(parser(name).feed, first + data) for data in islice(variants(document), 0, None, every)]
    assert kinds.count("refused") > len(kinds) // 3


def test_a_safetensors_header_with_one_odd_value_is_used_or_refused(parser: GetParser) -> None:
    seed = parser("checkpoint").seeds[-1]
    header = json.loads(seed[1:])
    one, other = header["embedding.weight"], header["norm.weight"]
    odd = [*islice(variants(header), 0, None, 31), json.dumps({**header, "more": one}).encode()]
    odd += [json.dumps(header)[:-1].encode() + b', "embedding.weight": ' + json.dumps(other).encode() + b"}"]
    kinds = [check(parser("checkpoint").feed, seed[:1] + data) for data in odd]
    assert kinds.count("refused") > len(kinds) // 2


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [0, 2**62], "data_offsets": [0, 0]},
        {"dtype": "F32", "shape": [2**63, 0], "data_offsets": [0, 0]},
        {"dtype": "F32", "shape": [2**32, 2**32], "data_offsets": [0, 0]},
        {"dtype": "F32", "shape": [1], "data_offsets": [2**63, 2**63 + 4]},
        {"dtype": "F32", "shape": [1] * 100, "data_offsets": [0, 4]},
        {"dtype": "F4", "shape": [8], "data_offsets": [0, 4]},
        {"dtype": "F8_E8M0", "shape": [4], "data_offsets": [0, 4]},
        {"dtype": "C64", "shape": [0], "data_offsets": [0, 0]},
    ],
    ids=str,
)
def test_tensors_that_lie_about_themselves_are_refused(entry: dict[str, Any], tmp_path: Path) -> None:
    folder = checkpoint.save(tmp_path, 1, {"model": {"w": torch.zeros(1)}}, {"score": None})
    header = json.dumps({"w": entry}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    sign(folder, "model.safetensors")
    with limited_memory(MEMORY), pytest.raises(LmtrainError):
        checkpoint.check_fit(_ours(checkpoint.load(folder)), {"w": torch.zeros(1)})


def _ours(found: checkpoint.Checkpoint) -> dict[str, Stored]:
    """The weights, where all of one group could be read; what then does not fit is refused as well."""
    if found.tensors["model"]["w"].shape != (1,):
        raise LmtrainError("another shape")
    return found.tensors["model"]


def test_a_header_of_100_megabytes_takes_no_more_memory_than_it_has(tmp_path: Path) -> None:
    folder = checkpoint.save(tmp_path, 1, {"model": {"w": torch.zeros(1)}}, {"score": None})
    for length in (100_000_000, 2**40, 2**63, 2**64 - 1):
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", length) + b"{" * 1000)
        sign(folder, "model.safetensors")
        with limited_memory(64 << 20), pytest.raises(LmtrainError, match="not a safetensors file"):
            checkpoint.load(folder)


@pytest.mark.parametrize("damage", [{"score": "x"}, {"score": []}, {"score": float("nan")}])
def test_a_score_of_another_kind_does_not_hide_the_other_checkpoints(tmp_path: Path, damage: dict[str, Any]) -> None:
    for step in (1, 2, 3):
        checkpoint.save(
            tmp_path, step, {"model": {"w": torch.zeros(1)}}, {"score": 1.0, **(damage if step == 2 else {})}
        )
    assert checkpoint.best_folder(tmp_path) == tmp_path / "checkpoints/step-00000001"


def test_folders_with_names_of_no_step_are_no_checkpoints(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 1, {"model": {"w": torch.zeros(1)}}, {"score": None})
    for name in ("step-²", "step-x", "step-", "step-" + "9" * 200):
        (tmp_path / "checkpoints" / name).mkdir()
    assert [folder.name for folder in checkpoint.folders(tmp_path)] == ["step-00000001"]
    for which in ("²", "9" * 5_000, "-1", ""):
        with pytest.raises(LmtrainError, match="neither best, last nor a step number"):
            checkpoint.choose(tmp_path, which)


@pytest.mark.parametrize("name", ["x" * 300, "a\0b", "\ud800", "", ".", "sub/../../x", "/etc/passwd", "\x1b[2J\n"])
def test_a_manifest_that_names_no_file_of_its_folder_is_refused(parser: GetParser, name: str, tmp_path: Path) -> None:
    folder = checkpoint.save(tmp_path, 1, {"model": {"w": torch.zeros(1)}}, {"score": None})
    manifest = unsealed((folder / MANIFEST).read_bytes())
    manifest["files"][name] = {"bytes": 1, "sha256": "0" * 64}
    (folder / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(LmtrainError) as caught:
        checkpoint.load(folder)
    assert str(caught.value).isprintable()


def test_a_pipe_in_place_of_a_manifest_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / MANIFEST)
    with pytest.raises(LmtrainError, match="has no manifest"):
        open_corpus(tmp_path)


def test_the_fuzzer_counts_what_it_tries_and_keeps_what_crashes(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "fuzz"), "planted", "--inputs", "200", "--crashes", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    result = json.loads(done.stdout)
    assert (result["parser"], result["inputs"]) == ("planted", 200)
    assert result["accepted"] + result["crashes"] == 200
    kept = [path.read_bytes() for path in tmp_path.iterdir()]
    assert kept
    assert all(b"!" in data for data in kept)
