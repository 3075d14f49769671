"""Text to token ids and back: whole words, byte-level BPE, bytes, or any Hugging Face tokenizer.json.

Whitespace is that of `str.split()` (Unicode whitespace and the separators U+001C to U+001F), by which a corpus counts
its words. A line ends with "\\n" and nothing else; that "\\n" belongs to the line, and each line is encoded by itself.

- word: a line is its words and `<eos>`; the closed vocabulary maps every other word to `<unk>`.
- bpe: byte-level byte-pair encoding (Sennrich et al., 2016; Radford et al., 2019) of the line with its "\\n".
- byte: the UTF-8 bytes of the line with its "\\n" (byte b is token b + 1).
- file: a tokenizer that lmtrain did not train, on the line with its "\\n"; it adds no special tokens.

Except with word, the end-of-text token ends a document. No text is ever encoded to it: the word `<eos>` in a text is an
unknown word, or its five characters.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain, repeat
from pathlib import Path
from typing import Any, Self

import numpy as np
import tokenizers
from tokenizers import pre_tokenizers, trainers

from lmtrain.config.schema import TokenizerConfig
from lmtrain.data import tokenizer_file
from lmtrain.data.local import check_unicode
from lmtrain.data.tokenizer_file import EOS, UNK, Description, Json, Kind, backend_errors
from lmtrain.errors import LmtrainError
from lmtrain.storage.files import sha256_bytes, write_file
from lmtrain.system.messages import escaped

BYTE_SYMBOLS = sorted(pre_tokenizers.ByteLevel.alphabet())
"""The 256 characters that stand for bytes in a byte-level vocabulary."""
_DIRECT = {symbol: ord(symbol) for symbol in BYTE_SYMBOLS if ord(symbol) < 256}
BYTE = _DIRECT | dict(zip(BYTE_SYMBOLS[len(_DIRECT) :], sorted(set(range(256)) - set(_DIRECT.values())), strict=True))
"""The byte of each symbol: printable Latin-1 stands for itself, later symbols for the other bytes in order."""
BYTE_VOCABULARY = {EOS: 0} | {symbol: byte + 1 for symbol, byte in BYTE.items()}

MAX_IDS = 1 << 24
"""Ids that a file may make the rows of an embedding; its entries are limited by its size."""

_LINE = re.compile(r"[^\n]*\n|[^\n]+")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""A byte in a vocabulary of characters that falls back to bytes."""


class Tokenizer:
    """The tokenizer of a tokenizer.json; made by `train` or `load`.

    `sha256` is the hash of the file's bytes, its identity. `vocab_size` is the largest id plus one; ids below it may be
    unused. `id_type` is the smallest type that ids are stored in. `unk_id` is None if the tokenizer knows all text. If
    `adds_space`, the ids or the `token_bytes` of the first word of a line begin with a space that is not in the text,
    as those of the other words do.
    """

    def __init__(self, content: bytes, backend: tokenizers.Tokenizer, document: Json, description: Description) -> None:
        """Take a file's content, with its description in it, and the library's tokenizer and the document.

        The message of a ValueError continues "tokenizer PATH ...".
        """
        vocabulary = backend.get_vocab()
        if not {description.eos, description.unk} - {None} <= vocabulary.keys():
            raise ValueError("is damaged: its vocabulary lacks its end-of-text or its unknown token")
        if description.kind != "file" and description != Description.of_kind(description.kind):
            raise ValueError(f"is damaged: its field {tokenizer_file.FIELD!r} is not that of kind {description.kind}")
        if description.kind == "byte" and vocabulary != BYTE_VOCABULARY:
            raise ValueError("is damaged: its vocabulary is not that of bytes")
        self.kind: Kind = description.kind
        self.vocab_size = max(vocabulary.values()) + 1
        if self.vocab_size > MAX_IDS:
            raise ValueError(f"has an id above {MAX_IDS:,}, which is too large for a model")
        self.id_type: np.dtype[Any] = np.dtype("<u2" if self.vocab_size <= 2**16 else "<u4")
        self.sha256 = sha256_bytes(content)
        self.eos_token = description.eos
        self.eos_id = vocabulary[description.eos]
        self.unk_token = description.unk
        self.unk_id = None if self.unk_token is None else vocabulary[self.unk_token]
        self._content = content
        self._backend = backend
        if self.kind == "word":
            self._words = {word: index for word, index in vocabulary.items() if word != EOS}
            self.adds_space = True
            return
        byte_level = _is_byte_level(document)
        found_bytes = ((index, _bytes_of(token, byte_level)) for token, index in vocabulary.items())
        self._bytes = {index: content for index, content in found_bytes if content is not None}
        first = self.encode_lines(["a"])[0]
        # What stands for an unknown token before another one: it ends a word.
        self._word = first[-1] if first else self.eos_id
        self.adds_space = bool(first) and self.token_bytes(None, first[0]).startswith(b" ")

    @classmethod
    def train(cls, lines: Iterable[str], config: TokenizerConfig) -> Self:
        """Train on `lines` (without their line ends); the same lines give the same tokenizer.

        `config` has a size if its kind is bpe, whose vocabulary is smaller if no further pair occurs twice in the text.
        Raises LmtrainError if the vocabulary is too large to be stored.
        """
        vocabulary = BYTE_VOCABULARY if config.kind == "byte" else {EOS: 0}
        if config.kind == "word":
            counts = Counter(chain.from_iterable(line.split() for line in lines))
            by_frequency = sorted(counts, key=lambda word: (-counts[word], word))
            words = [word for word in by_frequency if word not in (UNK, EOS)]
            vocabulary = {word: index for index, word in enumerate([UNK, EOS, *words][: config.vocab_size])}
        backend = tokenizer_file.new_backend(config.kind, vocabulary)
        if config.kind == "bpe":
            assert config.vocab_size is not None
            # `<eos>`, the 256 bytes, then merges of pairs that occur at least twice.
            trainer = trainers.BpeTrainer(
                vocab_size=config.vocab_size,
                min_frequency=2,
                special_tokens=[EOS],
                initial_alphabet=BYTE_SYMBOLS,
                show_progress=False,
            )
            backend.train_from_iterator((f"{line}\n" for line in lines), trainer)
        # `<eos>` is not an added token, because the library finds added tokens in any text.
        document: Json = json.loads(backend.to_str()) | {"added_tokens": []}
        description = Description.of_kind(config.kind)
        content = description.added_to(document)
        if len(content) > tokenizer_file.MAX_BYTES:
            size = backend.get_vocab_size()
            raise LmtrainError(f"a vocabulary of {size:,} entries is too large: set tokenizer.vocab_size")
        return cls(content, *tokenizer_file.parse(content), description)

    @classmethod
    def load(cls, path: Path, eos_token: str | None = None) -> Self:
        """Read any tokenizer.json. The description is added to one that lmtrain did not write, with `eos_token` or the
        token that is found.

        Raises LmtrainError if the file is missing or damaged, or if it has no such end-of-text token.
        """
        content = tokenizer_file.read(path)
        try:
            backend, document = tokenizer_file.parse(content)
            description = Description.read(document)
            if description is None:
                description = Description.of_external(backend.get_vocab(), document, eos_token)
                content = description.added_to(document)
            elif eos_token not in (None, description.eos):
                raise ValueError(
                    f"is one of a run, in which {description.eos} ends a text: leave tokenizer.eos_token out"
                )
            return cls(content, backend, document, description)
        except ValueError as error:
            raise LmtrainError(f"tokenizer {path} {error}") from None

    def save(self, path: Path) -> None:
        """Write tokenizer.json, the bytes with the hash `sha256`, to `path`."""
        write_file(path, self._content)

    def encode_lines(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of each text, each a line with its "\\n" or without.

        bpe and file use all cores. Raises LmtrainError if the tokenizer of a file fails.
        """
        if self.kind == "word":
            # Equal to what the tokenizers library does with tokenizer.json, and faster.
            word_id, unk, eos = self._words.get, repeat(self._words[UNK]), [self.eos_id]
            return [[*map(word_id, text.split(), unk)] + eos * text.endswith("\n") for text in texts]
        if self.kind == "byte":
            return [[byte + 1 for byte in text.encode()] for text in texts]
        rows = self._library_ids(texts)
        return [self._spelled_out(row) if self.eos_id in row else row for row in rows]

    def _library_ids(self, texts: list[str]) -> list[list[int]]:
        with backend_errors(LmtrainError, "the tokenizer can't encode the text: "):
            return [encoding.ids for encoding in self._backend.encode_batch_fast(texts, add_special_tokens=False)]

    def _spelled_out(self, ids: list[int]) -> list[int]:
        """`ids` with the two parts of the end-of-text token, its first character and the others, in place of it.

        Some vocabularies, such as T5's, hold it as a word that a text may have.
        """
        parts = chain.from_iterable(self._library_ids([self.eos_token[:1], self.eos_token[1:]]))
        spelled = [index for index in parts if index != self.eos_id]
        return [part for index in ids for part in (spelled if index == self.eos_id else [index])]

    def encode(self, text: str) -> list[int]:
        """Return the ids of a prompt: each "\\n" in it ends a line; the last line needs no end.

        Raises LmtrainError if `text` holds a lone surrogate, which no UTF-8 text can.
        """
        check_unicode(text, "the text")
        return list(chain.from_iterable(self.encode_lines(_LINE.findall(text))))

    def count_unknown(self, text: str, ids: list[int]) -> int:
        """Count the ids of `text` that stand for an unknown word or a part of one.

        With a word tokenizer, a literal `<unk>` in the text is not counted.
        """
        if self.unk_id is None or self.unk_id not in ids:
            return 0
        return ids.count(self.unk_id) - (text.split().count(UNK) if self.kind == "word" else 0)

    def knows(self, word: str) -> bool:
        """Whether `word` is one of a word vocabulary; `<unk>` is, `<eos>` is not."""
        return self.kind == "word" and word in self._words

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, its lines joined; bytes that are not UTF-8 become U+FFFD.

        word: words joined by spaces, `<eos>` as line end. bpe and byte: the inverse of `encode`; the end-of-text token
        is empty. file: what its own decoder makes of each line; other special tokens are text.
        """
        before = [self.eos_id, *ids]
        return b"".join(map(self.token_bytes, before, ids)).decode("utf-8", errors="replace")

    def token_bytes(self, before: int | None, id: int) -> bytes:  # noqa: A002 -- the field's term
        """Return what `id` adds to a text whose last token is `before`, in UTF-8; it may be a part of a character.

        After the end-of-text token a text begins. If the token before is not known (None), it is taken to end a word,
        so that a space comes before the next one.
        """
        if id == self.eos_id:
            return b"\n" if self.kind == "word" else b""
        if self.kind == "word":
            return (b"" if before == self.eos_id else b" ") + self.token(id).encode()
        return self._bytes[id] if id in self._bytes else self._decoded(before, id).encode()

    def _decoded(self, before: int | None, id: int) -> str:  # noqa: A002 -- the field's term
        """What `id` adds to the library's text of `before`."""
        before = self._word if before is None else before
        token_before = self._bytes.get(before) or (self._backend.id_to_token(before) or "").encode()
        if before == self.eos_id or b"\n" in token_before:  # a line begins
            return self._library_text([id])
        return self._library_text([before, id])[len(self._library_text([before])) :]

    def _library_text(self, ids: list[int]) -> str:
        with backend_errors(LmtrainError, "the tokenizer can't decode its ids: "):
            return self._backend.decode(ids, skip_special_tokens=False)

    def token(self, id: int) -> str:  # noqa: A002 -- the field's term
        """Return a token in readable form, with control characters and incomplete UTF-8 escaped."""
        text = self._backend.id_to_token(id) or ""
        if self.kind == "word":
            return text
        if id in self._bytes and id != self.eos_id:
            text = self._bytes[id].decode("utf-8", errors="backslashreplace")
        return escaped(text)


def _is_byte_level(document: Json) -> bool:
    """Whether the characters of the vocabulary stand for bytes: its decoder, or without one its pre-tokenizer, says."""
    return '"ByteLevel"' in json.dumps(document.get("decoder") or document.get("pre_tokenizer"))


def _bytes_of(token: str, byte_level: bool) -> bytes | None:
    """The bytes that a token stands for; None if they depend on the tokens before it."""
    if byte_level and BYTE.keys() >= set(token):
        return bytes(BYTE[symbol] for symbol in token)
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes.fromhex(byte[1]) if byte else None
