"""From WikiText's spaced words to plain text: ` @-@ ` to `-`, ` , ` to `, `, ` ( 24 in ) ` to ` (24 in) `.

Only spaces are removed, and the `@` signs around a mark: no letter, digit or mark is lost. Whether a space is removed
depends on the word before it, the word after it and the open quotation marks in the line, so that text can be printed
while it is generated. Plain text, whose marks are joined to their words, is unchanged.

Spaces that the corpus added around dashes and slashes can't be told from others, and stay (`23 – 38`, `and / or`). A
`'` after a word that ends in s is read as a possessive unless a quotation is open.
"""

import re

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
_NAME_PREFIXES = frozenset("ODLdl")
"""The beginnings of O'Brien, D'Andrade and l'Africaine."""
MARKS = frozenset({"@-@", "@,@", "@.@"})
"""Words that show that a corpus is in this style."""


class Detokenizer:
    """Joins words to text, incrementally. A word must be fed in one piece."""

    _space: str
    """The white space after the last word, written if the next one allows it."""

    def __init__(self) -> None:
        self._start_line()

    def feed(self, text: str) -> str:
        """Add spaced text, and return it as plain text. A space at its end is held back; see `pause`."""
        return "".join(self._add(piece) for piece in _PIECE.findall(text))

    def pause(self) -> str:
        """Return the space that is held back, if another detokenizer continues the text."""
        space = self._space
        self._space = ""
        return space

    def _start_line(self) -> None:
        self._space = ""
        self._before = ""  # the last word
        self._tight = False  # whether the next word is joined to it
        self._open_double = False
        self._open_single = False
        self._heading = False

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
        return space + _JOINED.sub(r"\1", piece) if _JOINED.fullmatch(piece) else space + piece

    def _joins(self, word: str) -> bool:
        """Return whether `word` is joined to the word before it."""
        if word in _CLOSING or word in _CONTRACTIONS or _JOINED.fullmatch(word):
            return True
        if word == '"':
            return self._open_double
        if word == "'":
            return self._open_single or self._before[-1] in "sS"
        if word[0] == "'" and word[1].isalpha():
            return self._before in _NAME_PREFIXES
        if self._before == _APOSTROPHE:
            return word in _ENDINGS
        return self._heading and set(word) == {"="} == set(self._before)

    def _remember(self, word: str) -> None:
        """Update the state that the next word's spacing depends on."""
        self._tight = word in _OPENING or _JOINED.fullmatch(word) is not None
        if word == "'":
            possessive = bool(self._before) and self._before[-1] in "sS"
            self._tight = self._open_single = not self._open_single and not possessive
        elif word not in _CONTRACTIONS and len(word) > 1 and (word[0] == "'" or word[-1] == "'"):
            self._open_single = word[-1] != "'"
        elif self._before == "'" and word[0].isdigit():
            self._open_single = False  # the '70s
        if word.count('"') % 2:
            self._open_double = not self._open_double
            self._tight = self._tight or (word == '"' and self._open_double)
        if not self._before:
            self._heading = word[0] == "="
        self._before = word
