"""From plain text to WikiText's spaced-out words, the way back from `detokenizer`: `1950,` to `1950 ,`, `well-known` to
`well @-@ known`, `(24 in)` to `( 24 in )`, `wasn't` to `wasn 't` or `was n't`.

Where a text may be taken apart follows the Moses tokenizer with its aggressive hyphens (Koehn et al., 2007), in whose
style the corpus is; which of these places count, the vocabulary decides. Only spaces are added, and the `@` signs
around a mark.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

LONGEST = 100
"""Characters; longer pieces between spaces are no words, and are left alone."""
_UNK = "<unk>"
_PIECE = re.compile(r"\S+")
_UNIT = re.compile(rf"{_UNK}|[^\W_]+?(?=n't|N'T)|[^\W_]+|\.{{3,}}|.")
"""What is never taken apart: a run of letters and digits, a mark, an ellipsis. The n of n't is one as well."""


@dataclass(frozen=True)
class _Unit:
    """A part of a piece, and its place in the words that the piece is taken apart into."""

    text: str
    alone: str | None
    """The word that it is by itself, None where it can't be one."""
    begins: bool = True
    """Whether a longer word may begin with it,"""
    ends: bool = True
    """or end with it."""
    short: bool = False
    """A word that begins with it is the end of a short form, which must be a known one."""


def respace(text: str, known: Callable[[str], bool]) -> str:
    """`text` with spaces where the corpus has them; `known` says whether a word is in the vocabulary.

    A piece between spaces that is known stays as it is, so what is spaced out stays so. Of the ways to take another
    one apart, that is chosen which has the fewest unknown words, then the fewest characters in them, then the fewest
    words, then the longest words in front. A hyphen at the end of the text is taken for one inside a word.
    """
    return _PIECE.sub(lambda piece: _apart(piece[0], known, at_end=piece.end() == len(text)), text)


def _apart(piece: str, known: Callable[[str], bool], *, at_end: bool) -> str:
    if known(piece) or len(piece) > LONGEST:
        return piece
    texts = _UNIT.findall(piece)
    word_to_come = ["x"] if at_end and texts[-1] == "-" and known("@-@") else []
    units = [_unit([*texts, *word_to_come], place, known) for place in range(len(texts))]
    # From each place on, the last one first: unknown words, their characters, all words; and the text itself.
    best: dict[int, tuple[tuple[int, int, int], str]] = {len(units): ((0, 0, 0), "")}
    for start in reversed(range(len(units))):
        for word, end in _words(units, start, known):
            if end not in best:
                continue
            unknown = not known(word)
            (words_unknown, characters, words), rest = best[end]
            cost = (words_unknown + unknown, characters + unknown * len(word), words + 1)
            if start not in best or cost <= best[start][0]:
                best[start] = cost, f"{word} {rest}"
    return best[0][1].rstrip()


def _words(units: Sequence[_Unit], start: int, known: Callable[[str], bool]) -> Iterator[tuple[str, int]]:
    """The words that may begin at a place, from short to long, and the places after them."""
    unit = units[start]
    if unit.alone is not None:
        yield unit.alone, start + 1
    if not unit.begins:
        return
    word = unit.text
    for end in range(start + 2, len(units) + 1):
        word += units[end - 1].text
        if units[end - 1].ends and (known(word) or not unit.short):
            yield word, end


def _unit(texts: Sequence[str], place: int, known: Callable[[str], bool]) -> _Unit:
    """The rules, mark by mark."""
    text, before = texts[place], texts[place - 1] if place else ""
    after = texts[place + 1] if place + 1 < len(texts) else ""
    inner = _is_word(before) and _is_word(after)
    if inner and (text == "-" or (text in {",", "."} and _is_number(before[-1]) and _is_number(after[0]))):
        mark = f"@{text}@"  # well @-@ known, 1 @,@ 250
        return _Unit(text, mark if known(mark) else None, begins=False, ends=False)
    if text == "." and _is_word(after):  # About.com, .50
        return _Unit(text, None, begins=not inner, ends=False)
    if text == "." and len(before) == 1 and before.isalpha() and place > 1 and texts[place - 2] == ".":  # J.R.R.
        return _Unit(text, None, begins=False)
    if text == "'" and inner:  # it 's, O 'Brien
        return _Unit(text, None, ends=False, short=True)
    if text in {"n", "N"} and after == "'" and before[:1].isalnum():  # was n't, wasn 't
        return _Unit(text, None, short=True)
    return _Unit(text, text)


def _is_word(text: str) -> bool:
    return text == _UNK or text[:1].isalnum()


def _is_number(edge: str) -> bool:
    """Whether this first or last character is a digit's, or `<unk>`'s, which may stand for a number."""
    return edge.isdecimal() or edge in "<>"
