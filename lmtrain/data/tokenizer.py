"""Text to token ids and back: whole words, byte-level BPE or bytes, each stored as one Hugging Face tokenizer.json.

Whitespace is that of `str.split()` (Unicode whitespace and the separators U+001C to U+001F), by which a corpus counts
its words. A line ends with "\\n" and nothing else; that "\\n" belongs to the line.

- word: a line is its words and `<eos>`; the closed vocabulary maps every other word to `<unk>`.
- bpe: byte-level byte-pair encoding (Sennrich et al., 2016; Radford et al., 2019) of the line with its "\\n".
- byte: the UTF-8 bytes of the line with its "\\n" (byte b is token b + 1).

With bpe and byte, `<eos>` ends a document. No text is ever encoded to `<eos>`: the word `<eos>` in a text is an unknown
word, or its five characters. Only a vocabulary and merges are taken from a file; the rest is built here.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, repeat
from pathlib import Path
from typing import Any, Self

import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from lmtrain.config.schema import TokenizerConfig
from lmtrain.data import tokenizer_file
from lmtrain.data.tokenizer_file import BYTE, BYTE_SYMBOLS, BYTE_VOCABULARY, EOS, UNK, Kind, Merges
from lmtrain.errors import LmtrainError
from lmtrain.storage.files import sha256_bytes, write_file

_PIECE = 1 << 16

_WORD_END = re.compile(r"\S(?= )")
_LINE = re.compile(r"[^\n]*\n|[^\n]+")


class Tokenizer:
    """A trained tokenizer; made by `train` or `load`.

    `sha256` is the hash of the bytes of its tokenizer.json, its identity. `line_end_ids` are the ids that end a
    line. `unk_id` is None unless the kind is word.
    """

    def __init__(self, kind: Kind, vocabulary: dict[str, int], merges: Merges, content: bytes) -> None:
        self.kind: Kind = kind
        self.vocab_size = len(vocabulary)
        self.eos_id = vocabulary[EOS]
        self.unk_id = vocabulary[UNK] if kind == "word" else None
        self.sha256 = sha256_bytes(content)
        self._content = content
        self._tokens = sorted(vocabulary, key=vocabulary.__getitem__)
        if kind == "word":
            self._words = {word: index for word, index in vocabulary.items() if word != EOS}
            self.line_end_ids = frozenset({self.eos_id})
            return
        self._bytes = [b"" if token == EOS else bytes(BYTE[symbol] for symbol in token) for token in self._tokens]
        self.line_end_ids = frozenset(index for index, token in enumerate(self._bytes) if b"\n" in token)
        if kind == "bpe":
            self._bpe = _build_bpe(vocabulary, merges)

    @classmethod
    def train(cls, lines: Iterable[str], config: TokenizerConfig) -> Self:
        """Train on `lines` (without their line ends); the same lines give the same tokenizer. `config` is resolved: it
        has a kind, and a size with bpe.

        A bpe vocabulary is smaller than configured where no further pair occurs twice in the text.
        Raises LmtrainError when the vocabulary is too large to be stored.
        """
        if config.kind == "auto":
            raise ValueError("the kind of the tokenizer is not resolved")
        if config.kind == "word":
            return cls.of_words(Counter(chain.from_iterable(map(str.split, lines))), config)
        if config.kind == "byte":
            return cls._made("byte", BYTE_VOCABULARY, [])
        texts = pieces((f"{line}\n" for line in lines), config.kind)
        if config.vocab_size is None:
            raise ValueError("the size of the vocabulary is not resolved")
        vocabulary, merges = _train_bpe(texts, config.vocab_size)
        return cls._made("bpe", vocabulary, merges)

    @classmethod
    def of_words(cls, counts: Mapping[str, int], config: TokenizerConfig) -> Self:
        """The word tokenizer of a text with these counts of words: `<unk>`, `<eos>`, then words by descending frequency
        and alphabetically among equals, `tokenizer.vocab_size` entries at most. Raises as `train` does."""
        ordered = sorted(counts.keys() - {UNK, EOS}, key=lambda word: (-counts[word], word))
        vocabulary = {word: index for index, word in enumerate([UNK, EOS, *ordered][: config.vocab_size])}
        return cls._made("word", vocabulary, [])

    @classmethod
    def _made(cls, kind: Kind, vocabulary: dict[str, int], merges: Merges) -> Self:
        content = tokenizer_file.content(kind, vocabulary, merges)
        if len(content) > tokenizer_file.MOST_BYTES:
            raise LmtrainError(f"a vocabulary of {len(vocabulary):,} entries is too large: set tokenizer.vocab_size")
        return cls(kind, vocabulary, merges, content)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a tokenizer.json that `save` wrote.

        Raises LmtrainError when it is missing, damaged, or not written by lmtrain.
        """
        return cls(*tokenizer_file.read(path))

    def save(self, path: Path) -> None:
        """Write tokenizer.json, the bytes with the hash `sha256`, to `path`."""
        write_file(path, self._content)

    def encode_pieces(self, texts: list[str]) -> list[list[int]]:
        """The ids of each text, a line with its "\\n" or a part of one (see `pieces`); bpe runs on all cores."""
        if self.kind == "word":
            # Equal to what the tokenizers library does with tokenizer.json, and faster.
            word_id, unk, eos = self._words.get, repeat(self._words[UNK]), [self.eos_id]
            return [[*map(word_id, text.split(), unk)] + eos * text.endswith("\n") for text in texts]
        if self.kind == "byte":
            return [[byte + 1 for byte in text.encode()] for text in texts]
        return [encoding.ids for encoding in self._bpe.encode_batch_fast(texts, add_special_tokens=False)]

    def encode(self, text: str) -> list[int]:
        """The ids of a prompt: each "\\n" in it ends a line; its last line need not end.

        Raises LmtrainError when `text` holds a lone surrogate, which no UTF-8 text can.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise LmtrainError(
                f"the text has a lone surrogate at character {error.start}: it is not Unicode text, so remove it"
            ) from None
        return list(chain.from_iterable(self.encode_pieces(list(pieces(_LINE.findall(text), self.kind)))))

    def replaced(self, text: str, ids: list[int]) -> int:
        """How many words of `text`, whose ids these are, `<unk>` replaces, its own literal `<unk>` not counted."""
        if self.unk_id is None or self.unk_id not in ids:
            return 0
        return ids.count(self.unk_id) - text.split().count(UNK)

    def knows(self, word: str) -> bool:
        """Whether `word` is one of a word vocabulary; `<unk>` is, `<eos>` is not."""
        return self.kind == "word" and word in self._words

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD.

        word: words joined by spaces, `<eos>` as line end. bpe and byte: the inverse of `encode`; `<eos>` is empty.
        """
        if any(not 0 <= index < self.vocab_size for index in ids):
            raise ValueError(f"a token id outside 0..{self.vocab_size - 1}")
        if self.kind != "word":
            return b"".join([self._bytes[index] for index in ids]).decode("utf-8", errors="replace")
        words = ["\n" if index == self.eos_id else self._tokens[index] for index in ids]
        return re.sub(" ?\n ?", "\n", " ".join(words))

    def piece(self, before: int | None, id: int) -> bytes:  # noqa: A002 -- the field's term
        """What `id` adds to a text whose last token is `before`, in UTF-8; with bpe and byte it may be a part of a
        character. Joined, the pieces of `ids` are `decode(ids)`, with a space before a first word (`before` = None).
        """
        if self.kind != "word":
            return self._bytes[id]
        if id == self.eos_id:
            return b"\n"
        return (b"" if before == self.eos_id else b" ") + self._tokens[id].encode()

    def token(self, id: int) -> str:  # noqa: A002 -- the field's term
        """One token in readable form, with control characters and incomplete UTF-8 escaped."""
        if self.kind == "word" or id == self.eos_id:
            return self._tokens[id]
        text = self._bytes[id].decode("utf-8", errors="backslashreplace")
        return "".join(symbol if symbol.isprintable() else symbol.encode("unicode_escape").decode() for symbol in text)


def pieces(texts: Iterable[str], kind: Kind) -> Iterator[str]:
    """Cut long texts, so that a corpus of one single line is encoded in bounded memory too.

    A cut falls between a word and the space after it, where every kind of tokenizer has a boundary. Only a bpe or byte
    text without such a place in the next 65,536 characters is cut elsewhere.
    """
    for text in texts:
        start = 0
        while len(text) - start > 2 * _PIECE:
            match = _WORD_END.search(text, start + _PIECE, len(text) if kind == "word" else start + 2 * _PIECE)
            cut = match.end() if match else len(text) if kind == "word" else start + 2 * _PIECE
            yield text[start:cut]
            start = cut
        if start < len(text):
            yield text[start:]


def _train_bpe(texts: Iterable[str], size: int) -> tuple[dict[str, int], Merges]:
    """`<eos>`, the 256 bytes, then merges of pairs that occur at least twice; `size` entries at most."""
    model = _build_bpe({EOS: 0}, [])
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        min_frequency=2,
        special_tokens=[EOS],
        initial_alphabet=BYTE_SYMBOLS,
        show_progress=False,
    )
    model.train_from_iterator(texts, trainer)
    trained = json.loads(model.to_str())["model"]
    return trained["vocab"], [(left, right) for left, right in trained["merges"]]


def _build_bpe(vocabulary: dict[str, int], merges: Merges) -> Any:
    """The Hugging Face tokenizer that encodes bpe."""
    model = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    return model
