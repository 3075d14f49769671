"""Parsers of folders: each uses the value that it reads, or raises LmtrainError, whatever the bytes.

Hashes in a manifest are updated to match the bytes, so that the code after the check of the hashes is reached.
"""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lmtrain.config import loader as config
from lmtrain.config.schema import Config, TokenizerConfig
from lmtrain.data.corpus import FORMAT as CORPUS_FORMAT
from lmtrain.data.corpus import download, open_corpus
from lmtrain.data.order import SampleOrder, batch
from lmtrain.data.tokenizing import tokenize
from lmtrain.data.tokens import TokenStore, open_store
from lmtrain.generation.complete import complete
from lmtrain.generation.options import Options
from lmtrain.model.trained import load_trained
from lmtrain.storage import checkpoint, run_checkpoints, run_folder
from lmtrain.storage.files import MANIFEST, new_folder, sha256_bytes, verify
from lmtrain.training.loop import fit
from lmtrain.training.state import new_training, restore
from tests.hostile.files import LINES, SMALL
from tests.hostile.inputs import Parser

HEADER = "+header"
"""Ends the name of a safetensors file of which only the header is fed: its length and the tensors stay valid."""


def _nothing(_message: str) -> None:
    pass


def corpus(folder: Path) -> Parser:
    """The files of a corpus folder; an accepted one is tokenized."""
    made = folder / "corpus"
    text = "".join(f"{line}\n" for line in LINES).encode()
    counts = {"lines": len(LINES), "words": 13, "bytes": len(text), "documents": 1}
    with new_folder(made, CORPUS_FORMAT, {"name": "corpus", "splits": {"train": counts, "valid": counts}}) as temporary:
        for split in ("train", "valid"):
            (temporary / f"{split}.txt").write_bytes(text)
            np.save(temporary / f"{split}.docs.npy", np.zeros(1, np.int64))

    def use() -> None:
        opened = open_corpus(made)
        verify(made, opened.manifest)
        tokenize([opened], TokenizerConfig(), folder / "stores", force=True, note=_nothing, progress=False)

    return _files(made, [MANIFEST, "train.txt", "train.docs.npy"], made, use)


def tokens(folder: Path) -> Parser:
    """The files of a token store; an accepted one gives batches."""
    source = folder / "text"
    source.mkdir()
    for split in ("train", "valid"):
        (source / f"{split}.txt").write_text("\n".join(LINES), encoding="utf-8")
    data = config.load(None, [f"data.source={source}", f"data.dir={folder / 'data'}"], {})
    store = tokenize([download(data.data)], data.tokenizer, data.data.dir, note=_nothing, progress=False).folder

    def use() -> None:
        opened = open_store(store)
        assert opened.sha256
        for name in opened.splits:
            split = opened.split(name)
            assert not split.tokens or (split.words > 0 and split.bytes > 0)
            if split.tokens > 2:
                inputs, targets = batch(split.ids, SampleOrder(split.tokens, 2, "causal", 1).starts(0, 3), 2, "causal")
                assert int(torch.cat((inputs, targets)).max()) < opened.tokenizer.vocab_size

    return _files(store, [MANIFEST, "train-00000.npy", "train-00000.docs.npy", "tokenizer.json"], store, use)


def checkpoints(folder: Path) -> Parser:
    """The files of a checkpoint; from an accepted one, training resumes and the model generates."""
    run, settings, store = trained_run(folder)
    training = new_training(settings, store, _nothing)
    last = run_checkpoints.choose(run, "last")

    def use() -> None:
        try:
            restore(training, checkpoint.load(last))
        finally:
            _generate(run)

    groups = [f"{group}.safetensors" for group in ("model", "optimizer", "ema")]
    return _files(last, [MANIFEST, *groups, *(name + HEADER for name in groups)], last, use)


def runs(folder: Path) -> Parser:
    """The other files of a run folder: it is found as the latest run, and its model generates."""
    run, _, _ = trained_run(folder)

    def use() -> None:
        found = run_folder.find_run(None, run.parent)
        assert run_checkpoints.best_folder(found) is not None
        _generate(found)

    names = [run_folder.CONFIG, run_folder.TOKENIZER, run_folder.STATE, run_folder.METRICS]
    return _files(run, names, None, use)


def trained_run(folder: Path) -> tuple[Path, Config, TokenStore]:
    """A trained run, its configuration and its token store."""
    settings = config.load(None, [*SMALL, f"data.dir={folder / 'data'}"], {})
    store = tokenize([download(settings.data)], settings.tokenizer, settings.data.dir, note=_nothing, progress=False)
    fit(settings, store, folder / "runs" / "default", resume=False, note=_nothing, quiet=True)
    return folder / "runs" / "default", settings, store


def _generate(run: Path) -> None:
    trained = load_trained(run, "last", "auto", torch.device("cpu"))
    for beams in (1, 2):
        (found,) = complete(trained.model, trained.tokenizer, ["the"], Options(max_tokens=2, beams=beams))
        assert len(found.completions[0].ids) == 2


def _files(folder: Path, names: list[str], signed: Path | None, use: Callable[[], None]) -> Parser:
    """A parser of the files `names` in `folder`: the first byte of the input chooses one, the rest is its content.

    The manifest in `signed` is updated, unless the manifest itself is fed.
    """
    valid = {name: (folder / name).read_bytes() for name in names if not name.endswith(HEADER)}

    def feed(data: bytes) -> None:
        choice = names[data[0] % len(names)] if data else names[0]
        name, content = choice.removesuffix(HEADER), data[1:]
        if choice.endswith(HEADER):
            content = struct.pack("<Q", len(content)) + content + _split(valid[name])[1]
        (folder / name).write_bytes(content)
        if signed is not None and name != MANIFEST:
            sign(signed, name)
        try:
            use()
        finally:
            (folder / name).write_bytes(valid[name])
            if signed is not None:
                (signed / MANIFEST).write_bytes(valid[MANIFEST])

    def seed(name: str) -> bytes:
        if name == MANIFEST:
            return json.dumps(unsealed(valid[name])).encode()
        return _split(valid[name.removesuffix(HEADER)])[0] if name.endswith(HEADER) else valid[name]

    return Parser([bytes([number]) + seed(name) for number, name in enumerate(names)], feed)


def sign(folder: Path, name: str) -> None:
    """Update the entry of the file `name` in the manifest of `folder`."""
    content = (folder / name).read_bytes()
    manifest = unsealed((folder / MANIFEST).read_bytes())
    manifest["files"][name] = {"bytes": len(content), "sha256": sha256_bytes(content)}
    (folder / MANIFEST).write_text(json.dumps(manifest))


def unsealed(manifest: bytes) -> dict[str, Any]:
    """A manifest without its own hash, so that it can be changed."""
    document: dict[str, Any] = json.loads(manifest)
    document.pop("sha256", None)
    return document


def _split(data: bytes) -> tuple[bytes, bytes]:
    """The header and the tensors of a safetensors file."""
    (length,) = struct.unpack("<Q", data[:8])
    return data[8 : 8 + length], data[8 + length :]
