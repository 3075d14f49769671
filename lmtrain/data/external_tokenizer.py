"""The end-of-text and the unknown token of any tokenizer.json that lmtrain did not write."""

from tokenizers import Tokenizer

from lmtrain.data.tokenizer_file import Description, Json

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


def describe(backend: Tokenizer, document: Json, eos_token: str | None) -> Description:
    """Return the description of a tokenizer.json; its end-of-text token is `eos_token`, or if None one that is found.

    Raises ValueError if it has no such token; the message continues "tokenizer PATH ...".
    """
    vocabulary = backend.get_vocab()
    unk = _unknown(document)
    eos = eos_token or _end_of_text(vocabulary, backend, unk)
    if eos not in vocabulary:
        raise ValueError(f"has no token {eos!r}: set tokenizer.eos_token to one that it has")
    return Description(kind="file", eos=eos, unk=unk if unk in vocabulary and unk != eos else None)


def _end_of_text(vocabulary: dict[str, int], backend: Tokenizer, unk: str | None) -> str:
    """Return the token with a common name; a special one comes first, since others may be words of a text."""
    special = [token.content for token in backend.get_added_tokens_decoder().values() if token.special]
    for name in [*(name for name in END_OF_TEXT if name in special), *END_OF_TEXT]:
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
    return model.get("unk_token")
