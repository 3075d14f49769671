"""Hostile files: whatever they hold, lmtrain uses them or rejects them with one message, in little memory."""

import ast
import json
import random
import shutil
import struct
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

import lmtrain
from lmtrain.config import loader
from lmtrain.config.schema import TokenizerConfig
from lmtrain.data import local
from lmtrain.data.corpus import open_corpus
from lmtrain.data.order import SampleOrder
from lmtrain.data.splits import write_split
from lmtrain.data.tokenizer import Tokenizer
from lmtrain.data.tokenizing import tokenize
from lmtrain.data.tokens import open_store
from lmtrain.errors import LmtrainError
from lmtrain.generation.complete import complete
from lmtrain.generation.options import Options
from lmtrain.storage import checkpoint, run_checkpoints
from lmtrain.storage.files import MANIFEST
from lmtrain.training.train_state import new_state, restore
from tests.data.helpers import CONFIGS, parquet
from tests.data.published import SHAPES, published
from tests.hostile import (
    FRAGMENTS,
    SMALL,
    Run,
    edited,
    limited_memory,
    sealed,
    sign,
    tensor_file,
    trained_run,
    unsealed,
    variants,
)

MEMORY = 1 << 30
MOST_VARIANTS = 100
EDITS = 40
LINES = ["= One =", "", "the cat sat on the mat", "the dog <unk> é", ""]
TEXT = "\n".join(LINES).encode()


def use_config(path: Path) -> None:
    loaded = loader.load(path, environment={})
    path.write_text(loader.dump(loaded), encoding="utf-8")
    assert loader.load(path, environment={}) == loaded


def use_text(path: Path) -> None:
    counts = write_split(path.parent, "train", local.read_lines([path], "text"), "the text")
    assert counts["words"] > 0
    assert counts["bytes"] == (path.parent / "train.txt").stat().st_size


def use_tokenizer(path: Path) -> None:
    Tokenizer.load(path).save(path)
    loaded = Tokenizer.load(path)
    ids = loaded.encode("the cat <eos> \x00é\U0001f600\n")
    assert all(0 <= index < loaded.vocab_size for index in ids)
    assert loaded.decode(ids) or loaded.kind == "file"


FILES: dict[str, tuple[Callable[[Path], None], list[bytes]]] = {
    "config.yaml": (use_config, [loader.dump(loader.load(None, SMALL, {})).encode(), b"model: {dim: 8, heads: 1}\n"]),
    "own.tokens": (use_text, [TEXT, b"\xef\xbb\xbf" + TEXT, TEXT.replace(b"\n", b"\r\n")]),
    "own.jsonl": (use_text, ["".join(json.dumps({"text": line}) + "\n" for line in LINES).encode()]),
    "own.parquet": (
        use_text,
        [parquet(LINES, compression="none", use_dictionary=False), parquet(LINES, compression="zstd")],
    ),
    "tokenizer.json": (use_tokenizer, [Tokenizer.train(LINES, config)._content for config in CONFIGS.values()]),
    **{f"{name}.json": (use_tokenizer, [published(name).encode()]) for name in SHAPES},
}
"""Files that stand alone: a function that uses the content or raises LmtrainError, and valid contents."""


def use_corpus(run: Run) -> None:
    opened = open_corpus(run.corpus.folder)
    stores = run.folder.parent / "stores"
    shutil.rmtree(stores, ignore_errors=True)
    tokenize(open_corpus(shutil.copytree(opened.folder, stores / opened.folder.name)), TokenizerConfig())


def use_store(run: Run) -> None:
    opened = open_store(run.store.folder)
    assert opened.sha256
    for name in opened.splits:
        split = opened.split(name)
        assert not split.tokens or (split.words > 0 and split.bytes > 0)
        if split.tokens > 2:
            inputs, targets = SampleOrder(split.tokens, 2, 2, 1).batch(split.ids, 0, 3)
            assert int(torch.cat((inputs, targets)).max()) < opened.tokenizer.vocab_size


def use_checkpoint(run: Run) -> None:
    restore(new_state(run.config, run.store), checkpoint.load(run_checkpoints.choose(run.folder, "last")))


def use_weights(run: Run) -> None:
    try:
        use_checkpoint(run)
    finally:
        use_run(run)


def use_run(run: Run) -> None:
    trained = lmtrain.load(run.folder, checkpoint="last", weights="auto", device="cpu")
    for beams in (1, 2):
        (found,) = complete(trained.model, trained.tokenizer, ["the"], Options(max_tokens=2, beams=beams))
        assert len(found.completions[0].ids) == 2


FOLDERS: dict[str, tuple[Callable[[Run], None], list[str]]] = {
    "corpus": (use_corpus, [MANIFEST, "train.txt", "train.docs.npy"]),
    "store": (use_store, [MANIFEST, "train.bin", "tokenizer.json"]),
    "checkpoint": (use_weights, [MANIFEST, "model.safetensors"]),
    "checkpoint of the optimizer": (use_checkpoint, ["optimizer.safetensors"]),
    "run": (use_run, ["config.yaml"]),
}
"""Folders: a function that uses the content or raises LmtrainError, and the files that are changed."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return trained_run(tmp_path_factory.mktemp("hostile"))


def result(path: Path, data: bytes, use: Callable[[], None], *, signed: bool) -> str:
    """`accepted` or `rejected`, within the memory limit and with one short line, of a file with this content."""
    path.write_bytes(sealed(data) if signed and path.name == MANIFEST else data)
    if signed and path.name != MANIFEST:
        sign(path)
    message = ""
    try:
        with limited_memory(MEMORY):
            use()
    except LmtrainError as error:
        message = str(error)
    assert "\n" not in message
    assert len(message) < 2_000
    return "rejected" if message else "accepted"


def hostile_inputs(name: str, seeds: list[bytes]) -> Iterator[bytes]:
    """Fragments; valid contents with edits; and JSON, or a header in JSON, in which one value is odd."""
    yield from (b"", *FRAGMENTS)
    choice, seed = random.Random(0), seeds[0]
    yield from (edited(choice.choice(seeds), choice) for _ in range(EDITS))
    if name.endswith(".json"):
        found = [json.dumps(document).encode() for document in variants(json.loads(seed))]
    elif name.endswith(".safetensors"):
        end = 8 + struct.unpack("<Q", seed[:8])[0]
        found = [tensor_file(document, seed[end:]) for document in variants(json.loads(seed[8:end]))]
    else:
        return
    yield from islice(found, 0, None, -(-len(found) // MOST_VARIANTS))


def attack(path: Path, seeds: list[bytes], use: Callable[[], None], *, signed: bool = False) -> set[str]:
    """What became of everything else than what lmtrain wrote, which is accepted: it is accepted or rejected."""
    assert {result(path, seed, use, signed=signed) for seed in seeds} == {"accepted"}
    return {result(path, data, use, signed=signed) for data in hostile_inputs(path.name, seeds)}


@pytest.mark.parametrize("name", FILES)
def test_any_file_is_used_or_rejected(name: str, tmp_path: Path) -> None:
    use, seeds = FILES[name]
    assert "rejected" in attack(tmp_path / name, seeds, lambda: use(tmp_path / name))


@pytest.mark.parametrize(("place", "name"), [(place, name) for place in FOLDERS for name in FOLDERS[place][1]])
def test_a_folder_with_any_content_of_a_file_is_used_or_rejected(run: Run, place: str, name: str) -> None:
    last = run_checkpoints.choose(run.folder, "last")
    folder = {"corpus": run.corpus.folder, "store": run.store.folder, "run": run.folder}.get(place, last)
    shutil.copytree(folder, folder.with_name("sound"))
    signed = place != "run"  # whoever changes a file can compute its hash, too
    seed = json.dumps(unsealed(folder)).encode() if name == MANIFEST else (folder / name).read_bytes()
    try:
        assert "rejected" in attack(folder / name, [seed], lambda: FOLDERS[place][0](run), signed=signed)
    finally:
        shutil.rmtree(folder)
        folder.with_name("sound").rename(folder)


@pytest.mark.parametrize("name", ["../sample/train", "x", "train\x1b]0;x\x07"])
def test_the_splits_of_a_corpus_have_no_other_names(run: Run, name: str, tmp_path: Path) -> None:
    """A name with a path in it would let a corpus say which file is written when it is tokenized."""
    folder = shutil.copytree(run.corpus.folder, tmp_path / "sample")
    manifest = unsealed(folder)
    manifest["splits"][name] = manifest["splits"]["train"]
    (folder / MANIFEST).write_bytes(sealed(json.dumps(manifest).encode()))
    with pytest.raises(LmtrainError, match="is damaged: splits"):
        open_corpus(folder)


WATCHED = ("pickle.", "exec", "compile", "socket.", "subprocess.", "os.system", "os.exec", "os.spawn", "os.posix_spawn")


def test_no_file_that_is_read_can_run_code_or_use_the_network(run: Run, tmp_path: Path) -> None:
    uses = [partial(use, run) for use, _ in FOLDERS.values()]
    for name, (use_file, (content, *_)) in FILES.items():
        (tmp_path / name).write_bytes(content)
        uses.append(partial(use_file, tmp_path / name))
    events: list[str] = []
    watching = True

    def hook(event: str, _arguments: tuple[Any, ...]) -> None:
        if watching and event.startswith(WATCHED):
            caller = sys._getframe(1).f_code
            harmless = caller.co_filename.startswith("<frozen importlib") or caller.co_filename == ast.__file__
            if not harmless:  # numpy parses the header of an array by ast.literal_eval, which executes nothing
                events.append(f"{event} from {caller.co_filename}:{caller.co_name}")

    for use in uses:
        use()  # lazy imports run code too
    sys.addaudithook(hook)
    for use in uses:
        use()
    found = list(events)
    exec("pass")
    watching = False  # a hook can't be removed
    assert found == []
    assert any(event.startswith("exec") for event in events)


TENSORS = [
    ("w", "F32", [0, 2**62], [0, 0]),
    ("w", "F32", [2**63, 0], [0, 0]),
    ("w", "F32", [2**32, 2**32], [0, 0]),
    ("w", "F32", [1], [2**63, 2**63 + 4]),
    ("w", "F32", [1] * 100, [0, 4]),
    ("w", "F4", [8], [0, 4]),
    ("w", "F8_E8M0", [4], [0, 4]),
    ("w", "C64", [0], [0, 0]),
    ("w[0:0/0]", "F32", [0, 2**62], [0, 0]),
    ("w[3:1/1]", "F32", [1], [0, 4]),
    ("w[0:1/999999999999999]", "F32", [1], [0, 4]),
    ("w[1:1/1]", "F32", [0], [0, 0]),
    ("w[0:1/1]", "F32", [], [0, 4]),
]
"""What a file may say that should have a tensor `w` with one number."""
TENSOR_FILES = [
    *(
        tensor_file({name: {"dtype": dtype, "shape": shape, "data_offsets": ends}}, bytes(min(4, ends[1])))
        for name, dtype, shape, ends in TENSORS
    ),
    *(struct.pack("<Q", length) + b"{" * 1000 for length in (100_000_000, 2**40, 2**63, 2**64 - 1)),
]


@pytest.mark.parametrize("number", range(len(TENSOR_FILES)))
def test_a_hostile_tensor_file_is_rejected_in_little_memory(number: int, tmp_path: Path) -> None:
    folder = checkpoint.save(tmp_path, 1, {"model": {"w": torch.zeros(1)}}, {"score": None})
    (folder / "model.safetensors").write_bytes(TENSOR_FILES[number])
    sign(folder / "model.safetensors")
    with limited_memory(64 << 20), pytest.raises((LmtrainError, ValueError)):  # ValueError: of another shape or type
        checkpoint.check_shapes(checkpoint.load(folder).tensors["model"], {"w": torch.zeros(1)})
