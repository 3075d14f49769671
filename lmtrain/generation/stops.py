"""Where a text ends before its full length: at a line, a sentence, `<eos>`, or a stop string.

Only the end of the text is searched, as far back as the longest match reaches, so that a token costs the same after ten
tokens and after ten thousand. Text is compared in UTF-8: a match, and even a character, may span tokens.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from lmtrain.data.tokenizer import Tokenizer
from lmtrain.generation.options import Options
from lmtrain.generation.spacing import changes_spacing, in_corpus_spacing

_SENTENCE = rb"""[.!?](?:["')\]]|\xe2\x80[\x99\x9d]){0,3}(?=\s)|\n"""
_SENTENCE_REACH = 11  # a mark, three closing signs of three bytes, a space
_SENTENCE_OF_WORDS = rb"(?<!\S)[.!?]\Z|\n"
"""A text of words ends with a whole one."""


@dataclass(frozen=True)
class Ending:
    """Why a text ends."""

    reason: str
    cut: int = 0
    """How many bytes at the end are not part of the text."""


class Stops:
    """The rule that ends texts, `stop` and `stop_strings` of the options, as a function of the generated ids.

    line: after a line end, which is part of the text.
    sentence: in a word-level text, after the word `.`, `?` or `!` (an abbreviation such as `Mr.` is one word, and does
    not match); otherwise after one of these marks and closing quotes or brackets (`."`), if a space follows, so that
    abbreviations followed by a space match too. A line end also ends a sentence.
    Under every rule, a BPE or byte-level text ends at `<eos>`, the end of a document, which is not text.
    A stop string: before the one that is complete first. It is also searched for in the spacing of the corpus, which
    it is put into as a prompt is: `The.` matches the words `The .`, which are printed as `The.`. In
    WikiText's spacing, `-` matches `@-@` from its `@` on.

    `reach` is the length of the longest match in bytes: a later token may end the text at most `reach` - 1 bytes before
    its present end.
    """

    def __init__(self, tokenizer: Tokenizer, options: Options) -> None:
        self._tokenizer = tokenizer
        of_words = tokenizer.kind == "word"
        sentence, reach = (_SENTENCE_OF_WORDS, 1) if of_words else (_SENTENCE, _SENTENCE_REACH)
        self._end = re.compile({"none": b"(?!)", "line": b"\n", "sentence": sentence}[options.stop])  # (?!): nothing
        self._document_end = None if of_words else tokenizer.eos_id
        join = "@" if changes_spacing(tokenizer) else ""  # `,` is printed for `@,@` too
        self._strings = [
            (string, spelling.encode())
            for string in options.stop_strings
            for spelling in {string, in_corpus_spacing(tokenizer, string), join + string}
        ]
        self.reach = max([reach if options.stop == "sentence" else 1, *(len(content) for _, content in self._strings)])

    def is_end(self, ids: Sequence[int]) -> bool:
        """Return whether the text `ids`, not empty, has ended."""
        return self.ending(ids) is not None

    def ending(self, ids: Sequence[int]) -> Ending | None:
        """Return why the text `ids`, not empty, ends with its last token; None if it continues."""
        last = self._piece(ids, len(ids) - 1)
        tail, before = last, len(ids) - 2  # the end of the text, as far back as a match of the last token reaches
        while before >= 0 and len(tail) - len(last) < self.reach - 1:
            tail, before = self._piece(ids, before) + tail, before - 1
        if found := [(start, string) for string, content in self._strings if (start := tail.find(content)) >= 0]:
            start, string = min(found)
            return Ending(f"stop string {string!r}", len(tail) - start)
        if match := self._end.search(tail):
            return Ending("line" if match[0] == b"\n" else "sentence", len(tail) - match.end())
        return Ending("document") if ids[-1] == self._document_end else None

    def _piece(self, ids: Sequence[int], index: int) -> bytes:
        return self._tokenizer.token_bytes(ids[index - 1] if index else None, ids[index])
