"""The end-of-text and the unknown token of any tokenizer.json that lmtrain did not write."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from lmtrain.data import tokenizer_file
from lmtrain.data.tokenizer_file import Description, Json

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


def describe(path: Path, backend: Tokenizer, document: Json, eos_token: str | None) -> Description:
    """Return the description of a tokenizer.json; its end-of-text token is `eos_token`, or if None one that is found.

    Raises ValueError if it has no such token; the message continues "tokenizer PATH ...".
    """
    vocabulary = backend.get_vocab()
    unk = _unknown(document)
    eos = eos_token or _end_of_text(path, vocabulary, backend, unk)
    if eos not in vocabulary:
        raise ValueError(f"has no token {eos!r}: set tokenizer.eos_token to one that it has")
    return Description(kind="file", eos=eos, unk=unk if unk in vocabulary and unk != eos else None)


def _end_of_text(path: Path, vocabulary: dict[str, int], backend: Tokenizer, unk: str | None) -> str:
    """Return the token that the files beside a tokenizer.json name, or else a common one.

    A special token of such a name comes first: others may be words of the text that the vocabulary was learned from.
    """
    special = [token.content for token in backend.get_added_tokens_decoder().values() if token.special]
    named = [_content(_read_object(path.with_name(name)).get("eos_token")) for name in BESIDE]
    for name in [*named, *(name for name in END_OF_TEXT if name in special), *END_OF_TEXT]:
        if name in vocabulary:
            return name
    # Not the unknown token: unknown words, which it stands for, would then be missing without a notice.
    words = sorted(vocabulary.keys() - {unk}, key=vocabulary.__getitem__)
    listed = ", ".join(([name for name in special if name != unk] or words)[:8])
    raise ValueError(
        "has no common end-of-text token: set tokenizer.eos_token to the token that ends each document, "
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
