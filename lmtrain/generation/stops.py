"""Where a text ends before its full length: at a line, a sentence, a document, or a stop string.

All is looked for in the end of the text alone, as much of it as the longest match can reach back, so that a token costs
the same after ten tokens and after ten thousand. Text is compared in UTF-8: a match may lie across tokens, and a
character too.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from lmtrain.data.tokenizer import Tokenizer
from lmtrain.generation.options import StopKind
from lmtrain.generation.search import IsEnd

SENTENCE_MARKS = (".", "?", "!")
_SENTENCE = re.compile(rb"""[.!?](?:["')\]]|\xe2\x80[\x99\x9d]){0,3}(?=\s)""")
_SENTENCE_REACH = 11  # a mark, three signs of three bytes that close, a space


@dataclass(frozen=True)
class Ending:
    """Why a text is over, and how many bytes at its end don't belong to it."""

    reason: str
    cut: int = 0


class Stops:
    """The rule by which texts end, from the ids generated so far alone.

    line: with the token that ends a line, which belongs to the text.
    sentence: word-level, with the token `.`, `?` or `!` (an abbreviation such as `Mr.` is one token, and ends
    nothing); otherwise after one of these marks and what closes behind it (`."`), when a space follows, so that
    abbreviations that a space follows do end it. A sentence ends with its line at the latest.
    document: word-level, before the next heading `= Title =`; otherwise with `<eos>`, which is no text. A text in bpe
    or bytes that ends at a line or a sentence ends there too.
    A stop string: the text ends before the first of them to be complete.

    `end_ids` end a text by themselves; `is_end` knows the rest, None where there is nothing more. `held` are the stop
    strings as bytes, and whatever else may be cut off later: text that ends in the beginning of one isn't certain yet.
    """

    def __init__(self, tokenizer: Tokenizer, kind: StopKind = "none", strings: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._kind = kind
        self._strings = [(string, string.encode()) for string in strings]
        self._ends = {} if kind == "none" else _ends(tokenizer, kind)
        self._title = kind == "document" and tokenizer.knows("=")
        self._sentence = tokenizer.kind != "word" and kind == "sentence"
        self._mark = tokenizer.encode("=")[0] if self._title else None
        self._reach = max([len(content) for _, content in self._strings], default=0)
        if self._sentence:
            self._reach = max(self._reach, _SENTENCE_REACH)
        self.end_ids = frozenset(self._ends)
        self.is_end: IsEnd | None = None
        if self._reach or self._title:
            self.is_end = lambda ids: self._in_text(ids) is not None
        self.held = [content for _, content in self._strings] + ([b"\n= "] if self._title else [])

    def ending(self, ids: Sequence[int]) -> Ending | None:
        """How the text `ids`, not empty, ends; None where it goes on."""
        found = self._in_text(ids)
        if found is None and ids[-1] in self._ends:
            return Ending(self._ends[ids[-1]])
        return found

    def _in_text(self, ids: Sequence[int]) -> Ending | None:
        if self._title and len(ids) > 2 and self._begins_document(ids):
            return Ending("document", sum(len(self._tokenizer.piece(ids[i - 1], ids[i])) for i in (-2, -1)))
        if not self._reach:
            return None
        tail, last = self._tail(ids)
        new = len(tail) - last
        places = [(tail.find(content, max(0, new - len(content) + 1)), string) for string, content in self._strings]
        if found := [(place, string) for place, string in places if place >= 0]:
            place, string = min(found)
            return Ending(f"stop string {string!r}", len(tail) - place)
        if self._sentence:
            for match in _SENTENCE.finditer(tail, max(0, new - _SENTENCE_REACH)):
                if match.end() >= new:
                    return Ending("sentence", len(tail) - match.end())
        return None

    def _begins_document(self, ids: Sequence[int]) -> bool:
        """A heading's mark at the start of a line, and one only."""
        return ids[-3] == self._tokenizer.eos_id and ids[-2] == self._mark != ids[-1]

    def _tail(self, ids: Sequence[int]) -> tuple[bytes, int]:
        """The end of the text, as far as a match that ends in its last token can reach, and that token's length."""
        pieces: list[bytes] = []
        missing = self._reach - 1
        for place in range(len(ids) - 1, -1, -1):
            pieces.append(self._tokenizer.piece(ids[place - 1] if place else None, ids[place]))
            if place < len(ids) - 1:
                missing -= len(pieces[-1])
            if missing <= 0:
                break
        return b"".join(reversed(pieces)), len(pieces[0])


def _ends(tokenizer: Tokenizer, kind: StopKind) -> dict[int, str]:
    """The tokens that end a text by themselves, and the reason that they give."""
    word = tokenizer.kind == "word"
    if kind == "document":
        return {} if word else {tokenizer.eos_id: "document"}
    ends = dict.fromkeys(tokenizer.line_end_ids, "line")
    if not word:
        ends[tokenizer.eos_id] = "document"
    elif kind == "sentence":
        marks = (tokenizer.encode(mark)[0] for mark in SENTENCE_MARKS)
        ends |= {mark: "sentence" for mark in marks if mark != tokenizer.unk_id}
    return ends
