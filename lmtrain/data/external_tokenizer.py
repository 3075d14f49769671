"""`tokenizer.file`: any tokenizer.json, to which the names of the end-of-text and the unknown token are added.

With these names in it (see `tokenizer_file`), the file in a token store and in a run is complete by itself.
"""

import json
from pathlib import Path
from typing import Any

from lmtrain.data import tokenizer_file
from lmtrain.data.tokenizer import Tokenizer
from lmtrain.data.tokenizer_file import Description, Json
from lmtrain.errors import LmtrainError

BESIDE = ("tokenizer_config.json", "special_tokens_map.json")
"""The files beside a published tokenizer.json that name its special tokens, the first one first."""
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
_CANDIDATES = 8


def load_external(path: Path, eos_token: str | None) -> Tokenizer:
    """Return the tokenizer of any tokenizer.json; its end-of-text token is `eos_token`, or if None one that is found.

    A file that lmtrain wrote is used as it is. Raises LmtrainError if the file is missing, if it is not a
    tokenizer.json, or if it has no such end-of-text token.
    """
    content = tokenizer_file.read(path)
    try:
        backend, document = tokenizer_file.parse(content)
        description = tokenizer_file.description(document)
        if description is None:
            vocabulary = backend.get_vocab()
            eos, unk = eos_token or _end_of_text(path, vocabulary, backend), _unknown(document)
            if eos not in vocabulary:
                raise ValueError(f"has no token {eos!r}: set tokenizer.eos_token to one that it has")
            added = Description(kind="file", eos=eos, unk=unk if unk in vocabulary and unk != eos else None)
            return Tokenizer(tokenizer_file.described(document, added))
        if eos_token not in (None, description.eos):
            raise ValueError(f"is one of a run, in which {description.eos} ends a text: leave tokenizer.eos_token out")
        return Tokenizer(content)
    except ValueError as error:
        raise LmtrainError(f"tokenizer {path} {error}") from None


def _end_of_text(path: Path, vocabulary: dict[str, int], backend: Any) -> str:
    """Return the token that the files beside a tokenizer.json name, or else one of a usual name.

    A special token of such a name comes first: others may be words of the text that the vocabulary was learned from.
    """
    special = [token.content for token in backend.get_added_tokens_decoder().values() if token.special]
    named = [_content(_read_object(path.with_name(name)).get("eos_token")) for name in BESIDE]
    for name in [*named, *(name for name in END_OF_TEXT if name in special), *END_OF_TEXT]:
        if name in vocabulary:
            return name
    listed = ", ".join((special or sorted(vocabulary, key=vocabulary.__getitem__))[:_CANDIDATES])
    raise ValueError(
        "has no end-of-text token of a usual name: set tokenizer.eos_token to the token that is to end each document, "
        f"such as {listed}"
    )


def _unknown(document: Json) -> str | None:
    """The token that the model itself puts in place of what it does not know."""
    model = document["model"]
    if isinstance(model.get("vocab"), list):  # Unigram
        index = model.get("unk_id")
        return None if index is None else str(model["vocab"][index][0])
    return _content(model.get("unk_token"))


def _read_object(path: Path) -> Json:
    """The JSON object in a file beside tokenizer.json; empty if there is none."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(tokenizer_file.read(path))
    except (ValueError, RecursionError):
        raise ValueError(f"can't be used: {path.name} beside it is damaged; set tokenizer.eos_token") from None
    return value if isinstance(value, dict) else {}


def _content(token: Any) -> str | None:
    """The text of a token, which is stored as it is or in an object with its options."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None
