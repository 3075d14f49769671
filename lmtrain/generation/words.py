"""Words that a prompt has and the model lacks; words to ban and to favour, as token ids."""

import math
from collections.abc import Iterable

from lmtrain.data.tokenizer import Tokenizer
from lmtrain.errors import UsageError


def unseen_words(tokenizer: Tokenizer, prompt: str) -> list[str]:
    """The words of a prompt that the model reads as `<unk>`, each of them once."""
    if tokenizer.unk_id is None:
        return []
    words = dict.fromkeys(prompt.split())
    return [word for word in words if word != "<unk>" and tokenizer.encode(word) == [tokenizer.unk_id]]


def banned_ids(tokenizer: Tokenizer, words: Iterable[str], allow_unknown: bool) -> frozenset[int]:
    """The tokens that are not produced: those of `words`, and `<unk>` unless `allow_unknown`."""
    banned = {index for word in words for index in _ids(tokenizer, word, "--ban")}
    if tokenizer.unk_id is not None and not allow_unknown:
        banned.add(tokenizer.unk_id)
    return frozenset(banned)


def bias_of_ids(tokenizer: Tokenizer, bias: Iterable[tuple[str, float]]) -> dict[int, float]:
    """Each token's number; of two for one token the later counts."""
    numbers: dict[int, float] = {}
    for word, number in bias:
        if not math.isfinite(number):
            raise UsageError(f"--bias {word}={number} is no finite number: use --ban {word} to exclude a word")
        numbers |= dict.fromkeys(_ids(tokenizer, word, "--bias"), number)
    return numbers


def _ids(tokenizer: Tokenizer, word: str, option: str) -> list[int]:
    """The token or tokens that are `word` and nothing else: in bpe with a space before it, and without.

    Raises UsageError where there is none.
    """
    if not word:
        raise UsageError(f"{option} is empty: give it a word, or leave it out")
    if tokenizer.kind == "word":
        ids = tokenizer.encode(word)
        if len(ids) != 1:
            raise UsageError(f"{option} {word!r} is {len(ids)} words: give it once for each word")
        if ids[0] == tokenizer.unk_id and word != "<unk>":
            raise UsageError(f"{option} {word!r} is not in the vocabulary, so the model can't produce it: leave it out")
        return ids
    spellings = [tokenizer.encode(text) for text in {word, f" {word}"}]
    if found := [ids[0] for ids in spellings if len(ids) == 1]:
        return found
    raise UsageError(
        f"{option} {word!r} is {min(map(len, spellings))} tokens of this {tokenizer.kind} vocabulary, and only "
        "what is one token can be banned or favoured: leave it out"
    )
