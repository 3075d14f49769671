"""From plain text to WikiText's spaced words, for prompts and stop strings: `1950,` to `1950 ,`, `well-known` to
`well @-@ known`, `(24 in)` to `( 24 in )`, `wasn't` to `wasn 't`.

The corpus was tokenized in the style of the Moses tokenizer with aggressive hyphens (Koehn et al., 2007). Only spaces
are added, and the `@` signs around a mark.
"""

import re
from collections.abc import Callable, Iterator

from lmtrain.data.tokenizer import Tokenizer
from lmtrain.generation.detokenizer import MARKS

_LONGEST_WORD = 8
"""Units that a word of the vocabulary may consist of, such as the six of `J.R.R.`"""
_UNIT = re.compile(r"<unk>|\.{3,}|(?:[^\W\d_]\.){2,}|[^\W_]+|.")
"""An ellipsis, initials, a run of letters and digits, or a single mark."""


def has_wikitext_spacing(tokenizer: Tokenizer) -> bool:
    """Return whether the vocabulary is in WikiText's style: punctuation as words, with ` @-@ ` and the like."""
    return any(map(tokenizer.knows, MARKS))


def in_corpus_spacing(tokenizer: Tokenizer, text: str, raw: bool) -> str:
    """Return the text in the spacing of the model's corpus; unchanged if `raw`."""
    return respace(text, tokenizer.knows) if has_wikitext_spacing(tokenizer) and not raw else text


def respace(text: str, known: Callable[[str], bool]) -> str:
    """Return `text` with spaces where the corpus has them; `known` says whether a word is in the vocabulary.

    A piece between spaces is unchanged if it is known, so spaced text stays as it is. Any other piece is split into
    units, and the longest runs of units that are known words are joined again. A hyphen at the end of `text` is
    treated as one inside a word.
    """
    if re.search(r"\w-$", text) and not known(text.rsplit(maxsplit=1)[-1]):
        return respace(f"{text}x", known).removesuffix("x").removesuffix(" ")
    return re.sub(r"\S+", lambda piece: piece[0] if known(piece[0]) else " ".join(_words(piece[0], known)), text)


def _words(piece: str, known: Callable[[str], bool]) -> Iterator[str]:
    units = _UNIT.findall(piece)
    start = 0
    while start < len(units):
        end = start + 1
        word = units[start]
        if _is_between_words(units, start):
            before, after = units[start - 1][-1], units[end][0]
            is_number = (before.isdecimal() or before == ">") and (after.isdecimal() or after == "<")  # or <unk>
            if word == "'":  # it 's, O 'Brien
                word += units[end]
                end += 1
            elif (word == "-" or (word in {",", "."} and is_number)) and known(f"@{word}@"):
                word = f"@{word}@"
        else:
            for longer in range(min(len(units), start + _LONGEST_WORD), end, -1):
                if units[longer - 1] != "-" and known("".join(units[start:longer])):
                    word, end = "".join(units[start:longer]), longer
                    break
        yield word
        start = end


def _is_between_words(units: list[str], place: int) -> bool:
    neighbors = units[place - 1 : place] + units[place + 1 : place + 2]
    return len(neighbors) == 2 and all(unit == "<unk>" or unit[0].isalnum() for unit in neighbors)
