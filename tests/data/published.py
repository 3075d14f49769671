"""The tokenizer.json of tokenizers in the shapes of published ones, trained on a few lines with the library."""

import json
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from lmtrain.data.tokenizer import Tokenizer
from tests.data.helpers import LINES, write

TEXT = [*LINES, "It 's 1,234 cats; doesn't the CAT sit?  Two  spaces", "The river ran past the old mill."] * 3
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]
Library = tokenizers.Tokenizer


def gpt2() -> Library:
    made = Library(models.BPE(continuing_subword_prefix="", end_of_word_suffix=""))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.ByteLevel(trim_offsets=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(TEXT, trainer)
    made.add_special_tokens(["<|endoftext|>"])
    made.enable_truncation(5)
    return made


def llama2() -> Library:
    made = Library(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    special = ["<unk>", "<s>", "</s>"]
    made.train_from_iterator(
        [line for line in TEXT if line.isascii()],
        trainers.BpeTrainer(vocab_size=380, special_tokens=special + BYTE_TOKENS, show_progress=False),
    )
    document = json.loads(made.to_str())
    document["added_tokens"] = document["added_tokens"][: len(special)]
    document["pre_tokenizer"] = None
    made = Library.from_str(json.dumps(document))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(steps)
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return made


def t5() -> Library:
    made = Library(models.Unigram())
    made.normalizer = normalizers.NFKC()
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    made.decoder = decoders.Metaspace()
    special = ["<pad>", "</s>", "<unk>"]
    made.train_from_iterator(
        [line for line in TEXT if line.isascii()],
        trainers.UnigramTrainer(vocab_size=60, special_tokens=special, unk_token="<unk>", show_progress=False),
    )
    made.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    made.enable_padding(length=32, pad_token="<pad>")
    return made


def bert() -> Library:
    made = Library(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    made.train_from_iterator(
        [line for line in TEXT if line.isascii()],
        trainers.WordPieceTrainer(vocab_size=90, special_tokens=special, show_progress=False),
    )
    ends = [("[CLS]", 2), ("[SEP]", 3)]
    made.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    return made


def words() -> Library:
    """WordLevel, as many examples train it: without a decoder."""
    made = Library(models.WordLevel(unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["[UNK]", "[PAD]", "[EOS]"]
    trainer = trainers.WordLevelTrainer(vocab_size=30, special_tokens=special, show_progress=False)
    made.train_from_iterator(TEXT, trainer)
    return made


SHAPES: dict[str, tuple[Callable[[], Library], str, str | None]] = {
    "gpt2": (gpt2, "<|endoftext|>", None),
    "llama2": (llama2, "</s>", "<unk>"),
    "t5": (t5, "</s>", "<unk>"),
    "bert": (bert, "[SEP]", "[UNK]"),
    "words": (words, "[EOS]", "[UNK]"),
}
"""Each shape with its end-of-text and its unknown token."""
EXACT = ("gpt2", "llama2")
"""Those that restore a text."""


@cache
def published(name: str) -> str:
    """The tokenizer.json of a shape."""
    return str(SHAPES[name][0]().to_str())


def tokenizer_of(folder: Path, document: Any, eos_token: str | None = None) -> Tokenizer:
    """The tokenizer that is read from a tokenizer.json with this text, or of this document."""
    text = document if isinstance(document, str) else json.dumps(document)
    return Tokenizer.load(write(folder / "tokenizer.json", text), eos_token)


@cache
def as_given(name: str) -> Tokenizer:
    """The tokenizer that lmtrain makes of a shape."""
    with tempfile.TemporaryDirectory() as folder:
        return tokenizer_of(Path(folder), published(name))


@cache
def reference(name: str) -> Library:
    """The library's tokenizer, which encodes whole texts and finds no special token in them."""
    made = Library.from_str(published(name))
    made.no_truncation()
    made.no_padding()
    made.encode_special_tokens = True
    return made
