"""tokenizer.json: a Hugging Face file with a field of lmtrain's own, by which lmtrain recognizes it.

`"model": {..., "lmtrain": {"kind": "bpe", "eos": "<eos>", "unk": null}}`: the kind, and the tokens that end a text and
stand for unknown parts of it. The tokenizers library reads such a file and ignores the field.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Self

import tokenizers
from pydantic import BaseModel, ValidationError
from tokenizers import decoders, models, normalizers, pre_tokenizers

from lmtrain.errors import LmtrainError
from lmtrain.storage.files import read_errors

Kind = Literal["word", "bpe", "byte", "file"]
"""`file`: a tokenizer that lmtrain did not train."""
Json = dict[str, Any]

UNK, EOS = "<unk>", "<eos>"
MAX_BYTES = 64 << 20
FIELD = "lmtrain"
END_OF_TEXT = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "</s>",
    "<eos>",
    "<|eos|>",
    "<EOS>",
    "[EOS]",
    "[SEP]",
)
"""Names of the end-of-text token in published vocabularies."""

_SPACE = r"\t-\r\x1c-\x20\x{85}\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}"
_LITERAL_EOS = f"(?<![^{_SPACE}]){EOS}(?![^{_SPACE}])"


class Description(BaseModel, strict=True):
    """What the field says."""

    kind: Kind
    eos: str
    unk: str | None

    @classmethod
    def of_kind(cls, kind: Kind) -> Self:
        """Return the description of a tokenizer of this kind, which lmtrain trains."""
        return cls(kind=kind, eos=EOS, unk=UNK if kind == "word" else None)

    @classmethod
    def of_external(cls, vocabulary: Mapping[str, int], document: Json, eos_token: str | None) -> Self:
        """Return the description of a document that lmtrain did not write; its end-of-text token is `eos_token`, or if
        None one with a common name, first a special one: others may be words of a text, such as the HTML tag `</s>`.

        Raises ValueError if it has no such token; the message continues "tokenizer PATH ...".
        """
        unk = _unknown(document)
        special = {token["content"] for token in document.get("added_tokens", ()) if token["special"]}
        common = (name for names in (special, vocabulary) for name in END_OF_TEXT if name in names)
        eos = eos_token or next(common, None)
        if eos is None:
            raise ValueError(
                "has no common end-of-text token: set tokenizer.eos_token to the token that ends each document"
            )
        if eos not in vocabulary:
            raise ValueError(f"has no token {eos!r}: set tokenizer.eos_token to one that it has")
        return cls(kind="file", eos=eos, unk=unk if unk in vocabulary and unk != eos else None)

    @classmethod
    def read(cls, document: Json) -> Self | None:
        """Return what a document says in lmtrain's field; None if lmtrain did not write it."""
        if FIELD not in document["model"]:
            kind = _earlier_kind(document)
            return None if kind is None else cls.of_kind(kind)
        try:
            return cls.model_validate(document["model"][FIELD])
        except ValidationError:
            raise ValueError(f"is damaged: its field {FIELD!r} is not one that lmtrain wrote") from None

    def added_to(self, document: Json) -> bytes:
        """Return the content of a tokenizer.json: `document` with this description."""
        model = {FIELD: self.model_dump(), **document["model"]}
        return json.dumps(document | {"model": model}, ensure_ascii=False, separators=(",", ":")).encode()


def new_backend(kind: Kind, vocabulary: dict[str, int]) -> tokenizers.Tokenizer:
    """Return the library's tokenizer of a kind that lmtrain trains, without merges.

    `<eos>` is an entry of the vocabulary and not an added token, because added tokens are found in any text.
    """
    if kind == "word":
        backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, UNK))
        backend.normalizer = normalizers.Sequence(
            [normalizers.Replace(tokenizers.Regex(_LITERAL_EOS), UNK), normalizers.Replace("\n", f" {EOS} ")]
        )
        backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(f"[{_SPACE}]+"), "removed")
        return backend
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind == "bpe")
    backend.decoder = decoders.ByteLevel()
    return backend


def read(path: Path) -> bytes:
    """Return the bytes of a tokenizer.json. Raises LmtrainError if it is missing, unreadable or too large."""
    with read_errors(path):
        if not path.is_file():
            raise LmtrainError(f"tokenizer {path} is not a file: give the path of a tokenizer.json")
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise LmtrainError(f"tokenizer {path} is larger than {MAX_BYTES >> 20} MiB: it is not one")
    return content


def parse(content: bytes) -> tuple[tokenizers.Tokenizer, Json]:
    """Return the library's tokenizer, without truncation, padding and dropout, and the JSON document.

    Raises ValueError if `content` is not a tokenizer.json; the message continues "tokenizer PATH ...".
    """
    with backend_errors(ValueError, "is damaged, or not a Hugging Face tokenizer.json: "):
        backend = tokenizers.Tokenizer.from_buffer(content)
        document = json.loads(content)
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True
    if getattr(backend.model, "dropout", None) is not None:
        backend.model.dropout = None
    return backend, document


@contextmanager
def backend_errors(raised: type[Exception], message: str) -> Iterator[None]:
    """Raise `raised` in place of what the library raises: an Exception, or a PanicException, which is not one."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise raised(message + " ".join(str(error).split())[:200]) from None


def _unknown(document: Json) -> str | None:
    """The token that the model itself puts in place of what it does not know."""
    model = document["model"]
    if isinstance(model.get("vocab"), list):  # Unigram
        index = model.get("unk_id")
        return None if index is None else str(model["vocab"][index][0])
    return model.get("unk_token")


def _earlier_kind(document: Json) -> Kind | None:
    """The kind of a file that an earlier version wrote, without the field; its parts and first tokens tell."""
    vocabulary = document["model"].get("vocab")
    kinds: tuple[Kind, ...] = ("word", "bpe", "byte")
    for kind in kinds if isinstance(vocabulary, dict) else ():
        first = {token: index for index, token in enumerate([UNK, EOS] if kind == "word" else [EOS])}
        own = json.loads(new_backend(kind, first).to_str())
        same = all(document.get(part) == own[part] for part in ("normalizer", "pre_tokenizer", "added_tokens"))
        if same and document["model"].get("type") == own["model"]["type"] and first.items() <= vocabulary.items():
            return kind
    return None
