"""From WikiText's spaced-out words back to text: ` @-@ ` to `-`, ` , ` to `, `, ` ( 24 in ) ` to ` (24 in) `.

Only spaces are taken out, and the `@` signs around a mark: no letter, digit or mark is lost. Whether a space goes is
decided by the word before it, the word after it and the quotation marks that are open in the line, so that text can be
written while it is made. Plain text, whose marks already stand at their words, stays as it is.

What the corpus doesn't say, can't be restored: dashes and slashes keep their spaces (`23 – 38`, `and / or`), and a `'`
after a word that ends in s is taken for a possessive unless a quotation is open.
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
"""What follows the apostrophe of a short form; it belongs to the word before."""
_SHORT_FORMS = frozenset(f"'{ending}" for ending in _ENDINGS) | {"n't", "N'T"}
_NAME_PREFIXES = frozenset("ODLdl")
"""The beginnings of O'Brien, D'Andrade and l'Africaine."""
MARKS = frozenset({"@-@", "@,@", "@.@"})
"""Words that only a corpus of this style has."""


class Detokenizer:
    """Joins words to text as they come. A word must come in one piece."""

    _space: str
    """What stands after the last word, to be written if the next one allows it."""

    def __init__(self) -> None:
        self._start_line()

    def feed(self, text: str) -> str:
        """More text, spaced out; returns what it adds. A space at its end waits for what follows; see `pause`."""
        return "".join(self._add(piece) for piece in _PIECE.findall(text))

    def pause(self) -> str:
        """The space that waits, for text that goes on elsewhere."""
        space = self._space
        self._space = ""
        return space

    def _start_line(self) -> None:
        self._space = ""
        self._before = ""  # the last word
        self._tight = False  # nothing may stand between it and the next
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
        space = "" if self._before and (self._tight or self._leans_left(piece)) else self._space
        self._space = ""
        self._look(piece)
        return space + _JOINED.sub(r"\1", piece) if _JOINED.fullmatch(piece) else space + piece

    def _leans_left(self, word: str) -> bool:
        """Whether no space belongs before `word`, seen from the word itself."""
        if word in _CLOSING or word in _SHORT_FORMS or _JOINED.fullmatch(word):
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

    def _look(self, word: str) -> None:
        """Note what `word` means for the next one."""
        self._tight = word in _OPENING or _JOINED.fullmatch(word) is not None
        if word == "'":
            possessive = bool(self._before) and self._before[-1] in "sS"
            self._tight = self._open_single = not self._open_single and not possessive
        elif word not in _SHORT_FORMS and len(word) > 1 and (word[0] == "'" or word[-1] == "'"):
            self._open_single = word[-1] != "'"
        elif self._before == "'" and word[0].isdigit():
            self._open_single = False  # the '70s
        if word.count('"') % 2:
            self._open_double = not self._open_double
            self._tight = self._tight or (word == '"' and self._open_double)
        if not self._before:
            self._heading = word[0] == "="
        self._before = word


def detokenize(text: str) -> str:
    """Spaced-out text, of one line or many, as plain text; spaces at the ends of lines go."""
    return Detokenizer().feed(text)
