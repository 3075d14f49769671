"""Parsers of single files: each uses the value that it reads, or raises LmtrainError, whatever the bytes."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from lmtrain.config import loader as config
from lmtrain.config.schema import TokenizerConfig
from lmtrain.data import local
from lmtrain.data.splits import write_split
from lmtrain.data.tokenizer import Tokenizer
from lmtrain.data.tokenizer_file import Kind
from lmtrain.generation import prompts
from tests.hostile.inputs import Parser

SMALL = [
    "data.sample_tokens=1000",
    "tokenizer.kind=byte",
    "model.context=8",
    "model.dim=4",
    "model.layers=1",
    "model.heads=1",
    "train.threads=1",
    "train.device=cpu",
    "train.precision=fp32",
    "train.batch_size=2",
    "train.steps=2",
    "train.eval_steps=1",
    "train.eval_tokens=20",
    "train.ema=0.9",
    "train.sample_tokens=1",
    "eval.batch_size=256",
    "eval.stride=8",
]
"""Overrides for the smallest run that has every file of a run."""

LINES = ["= One =", "", "the cat sat on the mat", "the dog <unk> é", ""]


def configuration(folder: Path) -> Parser:
    """A configuration file; an accepted one is written and read back."""
    path = folder / "config.yaml"

    def feed(data: bytes) -> None:
        path.write_bytes(data)
        loaded = config.load(path, environment={})
        path.write_text(config.dump(loaded), encoding="utf-8")
        assert config.load(path, environment={}) == loaded

    return Parser([config.dump(config.load(None, SMALL, {})).encode(), b"model: {dim: 8, heads: 1}\n"], feed)


def overrides(folder: Path) -> Parser:
    """Overrides, one per line."""

    def feed(data: bytes) -> None:
        config.load(None, data.decode(errors="surrogateescape").splitlines(), {})

    lines = ["train.lr=1e-3", "train.sample_prompts=[a, b]", "data.source=corpus.txt", "model.dim=8", "run.name=x"]
    return Parser([line.encode() for line in lines], feed)


def _text(suffix: str, seeds: list[bytes], folder: Path) -> Parser:
    path = folder / f"train{suffix}"

    def feed(data: bytes) -> None:
        path.write_bytes(data)
        counts = write_split(folder, "train", local.read_lines([path], "text"), False)
        assert counts["words"] > 0
        assert counts["bytes"] == (folder / "train.txt").stat().st_size

    return Parser(seeds, feed)


def plain(folder: Path) -> Parser:
    """A text file of a corpus."""
    text = "\n".join(LINES)
    seeds = [text.encode(), b"\xef\xbb\xbf" + text.encode(), text.replace("\n", "\r\n").encode()]
    return _text(".tokens", seeds, folder)


def json_lines(folder: Path) -> Parser:
    """A file of JSON lines."""
    return _text(".jsonl", ["".join(json.dumps({"text": line, "id": 1}) + "\n" for line in LINES).encode()], folder)


def parquet(folder: Path) -> Parser:
    """A parquet file, plain and compressed."""
    seeds = []
    for compression, dictionary in (("none", False), ("zstd", True), ("snappy", True)):
        path = folder / "seed.parquet"
        pq.write_table(
            pa.table({"text": LINES, "id": range(len(LINES))}),
            path,
            compression=compression,
            use_dictionary=dictionary,
        )
        seeds.append(path.read_bytes())
    return _text(".parquet", seeds, folder)


def _prompts(suffix: str, seeds: list[bytes], folder: Path) -> Parser:
    path = folder / f"prompts{suffix}"
    every_byte = Tokenizer.train([], TokenizerConfig(kind="byte"))

    def feed(data: bytes) -> None:
        path.write_bytes(data)
        found = list(prompts.read_prompts(path))
        assert found
        for prompt in found:
            assert every_byte.decode(every_byte.encode(prompt.text)) == prompt.text
            assert json.dumps(prompt.id, ensure_ascii=False).encode()

    return Parser(seeds, feed)


def prompt_lines(folder: Path) -> Parser:
    """A file of prompts, one per line."""
    return _prompts(".txt", ["\n".join(LINES).encode(), b"\xef\xbb\xbfone\r\ntwo\r\n"], folder)


def prompt_json(folder: Path) -> Parser:
    """A file of prompts as JSON lines."""
    rows: list[dict[str, object]] = [{"prompt": line, "id": number} for number, line in enumerate(LINES)]
    rows += [{"prompt": "x", "id": "a", "more": [1]}, {"prompt": ""}]
    return _prompts(".jsonl", ["".join(json.dumps(row) + "\n" for row in rows).encode()], folder)


def tokenizer(folder: Path) -> Parser:
    """A tokenizer.json of each kind; an accepted one encodes and decodes."""
    path = folder / "tokenizer.json"
    kinds: tuple[Kind, ...] = ("word", "bpe", "byte")
    seeds = []
    for kind in kinds:
        Tokenizer.train(LINES, TokenizerConfig(kind=kind, vocab_size=270 if kind == "bpe" else None)).save(path)
        seeds.append(path.read_bytes())

    def feed(data: bytes) -> None:
        path.write_bytes(data)
        loaded = Tokenizer.load(path)
        ids = loaded.encode("the cat <eos> \x00é\U0001f600\n")
        assert all(0 <= index < loaded.vocab_size for index in ids)
        assert loaded.decode(ids)

    return Parser(seeds, feed)
