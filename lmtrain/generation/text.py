"""Generated ids as text, token by token."""

import codecs
from itertools import accumulate

from lmtrain.data.tokenizer import Tokenizer
from lmtrain.generation.options import Options
from lmtrain.generation.spacing import Detokenizer, changes_spacing, in_corpus_spacing
from lmtrain.generation.stops import Ending, Stops


def unknown_words(tokenizer: Tokenizer, prompt: str) -> list[str]:
    """Return the words of a prompt that the model reads as `<unk>`, without duplicates."""
    if tokenizer.unk_id is None:  # saves encoding each word
        return []
    return [word for word in dict.fromkeys(prompt.split()) if tokenizer.count_unknown(word, tokenizer.encode(word))]


class TextStreamer:
    """Turns the tokens of one text into the text that follows its prompt.

    `push` returns the text that a token makes final; `close` returns the rest. Text that the stop rule may still cut
    off is not final. Bytes that are not UTF-8 become U+FFFD. The text of a vocabulary in WikiText's style is
    detokenized.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: str, options: Options) -> None:
        self.ending = Ending("length")
        self._tokenizer = tokenizer
        self._stops = Stops(tokenizer, options)
        self._ids: list[int] = []
        self._pending: list[bytes] = []
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._detokenizer = Detokenizer() if changes_spacing(tokenizer) else None
        if self._detokenizer is not None:  # the spaced form of the prompt tells which quotations are open
            self._detokenizer.feed(in_corpus_spacing(tokenizer, prompt))
            self._detokenizer.pause()
        # No space is added before the text's first word if the prompt ends with one, or is empty.
        self._space_to_drop = tokenizer.adds_space and (not prompt or prompt[-1].isspace())

    def push(self, token: int) -> str:
        """Add a token, and return the text that is now final."""
        self._pending.append(self._tokenizer.token_bytes(self._ids[-1] if self._ids else None, token))
        self._ids.append(token)
        if ending := self._stops.ending(self._ids):
            self.ending = ending
            return ""
        # Whole pieces are final, up to what a stop rule may still cut off.
        end = sum(map(len, self._pending)) - (self._stops.reach - 1)
        count = sum(length <= end for length in accumulate(map(len, self._pending)))
        final, self._pending = self._pending[:count], self._pending[count:]
        return self._displayed(b"".join(final))

    def close(self) -> str:
        """Return the rest of the text, without what its ending cuts off."""
        rest = b"".join(self._pending)
        return self._displayed(rest[: len(rest) - self.ending.cut], is_last=True)

    def _displayed(self, content: bytes, *, is_last: bool = False) -> str:
        if content and self._space_to_drop:
            content, self._space_to_drop = content.removeprefix(b" "), False
        text = self._decoder.decode(content, is_last)
        return text if self._detokenizer is None else self._detokenizer.feed(text)
