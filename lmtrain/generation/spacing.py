"""WikiText's spaced words to plain text (`Detokenizer`), and prompts and stop strings to spaced words (`respace`).

`well @-@ known` is printed as `well-known`, `1950 ,` as `1950,`, `( 24 in )` as `(24 in)`, `wasn 't` as `wasn't`. The
corpus was tokenized in the style of the Moses tokenizer with aggressive hyphens (Koehn et al., 2007). In both
directions only spaces, and the `@` signs around a mark, are removed or added: no letter, digit or mark is lost.
"""

import re
from collections.abc import Callable, Iterator

from lmtrain.data.local import with_newlines
from lmtrain.data.tokenizer import Tokenizer

_PIECE = re.compile(r"\n|[^\S\n]+|\S+")
_JOINED = re.compile(r"@([^\w\s])@")
_APOSTROPHE = "\N{RIGHT SINGLE QUOTATION MARK}"
_CLOSING = frozenset({*",.;:?!%)]}", "..", "...", "....", *"\u2026\u201d\u00bb\u00b0", _APOSTROPHE})
"""No space before these: among them the ellipsis, closing quotation marks and the degree sign."""
_OPENING = frozenset({*"([{$#", *"\u00a3\u20ac\u00a5\u20b9", *"\u201c\u2018\u00ab"})
"""No space after these: among them pound, euro, yen, rupee and opening quotation marks."""
_ENDINGS = frozenset({*"stmdSTMD", "re", "ve", "ll", "RE", "VE", "LL"})
"""What follows the apostrophe of a contraction, which is joined to the word before."""
_CONTRACTIONS = frozenset(f"'{ending}" for ending in _ENDINGS) | {"n't", "N'T"}
_MARKS = frozenset({"@-@", "@,@", "@.@"})
"""Words that show that a corpus is in this style."""
_LONGEST_WORD = 8
"""Units that a word of the vocabulary may consist of, such as the six of `J.R.R.`"""
_UNIT = re.compile(r"<unk>|\.{3,}|(?:[^\W\d_]\.){2,}|[^\W_]+|.")
"""An ellipsis, initials, a run of letters and digits, or a single mark."""


class Detokenizer:
    """Joins words to text, incrementally. A word must be fed in one piece.

    Whether a space is removed depends on the word before it, the word after it and the open quotation marks in the
    line, so that text can be printed while it is generated. Plain text, whose marks are joined to their words, is
    unchanged. Spaces that the corpus added around dashes and slashes can't be told from others, and stay (`23 – 38`,
    `and / or`), as do those in names and headings (`O 'Brien`, `= = Part = =`). A `'` after a word that ends in s is
    read as a possessive unless a quotation is open.
    """

    _space: str
    """The whitespace after the last word, written if the next one allows it."""

    def __init__(self) -> None:
        self._start_line()

    def feed(self, text: str) -> str:
        """Add spaced text, and return it as plain text. A space at its end is held back; see `pause`."""
        return "".join(self._add(piece) for piece in _PIECE.findall(text))

    def pause(self) -> None:
        """Drop the space that is held back."""
        self._space = ""

    def _start_line(self) -> None:
        self._space = ""
        self._before = ""  # the last word
        self._tight = False  # whether the next word is joined to it
        self._open_double = False
        self._open_single = False

    def _add(self, piece: str) -> str:
        if piece == "\n":
            self._start_line()
            return piece
        if piece.isspace():
            self._space += piece
            return ""
        space = "" if self._before and (self._tight or self._joins(piece)) else self._space
        self._space = ""
        self._remember(piece)
        joined = _JOINED.fullmatch(piece)
        return space + (joined[1] if joined else piece)

    def _joins(self, word: str) -> bool:
        """Return whether `word` is joined to the word before it."""
        if word in _CLOSING or word in _CONTRACTIONS or _JOINED.fullmatch(word):
            return True
        if word == '"':
            return self._open_double
        if word == "'":
            return self._open_single or self._before[-1] in "sS"
        return self._before == _APOSTROPHE and word in _ENDINGS

    def _remember(self, word: str) -> None:
        """Update the state that the next word's spacing depends on."""
        self._tight = word in _OPENING or _JOINED.fullmatch(word) is not None
        if word == "'":
            possessive = bool(self._before) and self._before[-1] in "sS"
            self._tight = self._open_single = not self._open_single and not possessive
        if word.count('"') % 2:
            self._open_double = not self._open_double
            self._tight = word == '"' and self._open_double
        self._before = word


def changes_spacing(tokenizer: Tokenizer) -> bool:
    """Whether texts are converted from and to the corpus's spacing: for a vocabulary in WikiText's style, with
    punctuation as words, ` @-@ ` and the like."""
    return any(map(tokenizer.knows, _MARKS))


def in_corpus_spacing(tokenizer: Tokenizer, text: str) -> str:
    """Return the text with line ends as in every corpus, and in the spacing of the model's corpus."""
    text = with_newlines(text)
    return respace(text, tokenizer.knows) if changes_spacing(tokenizer) else text


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
            elif (word == "-" or is_number) and known(f"@{word}@"):
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
