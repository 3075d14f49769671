"""From prompts to what the model reads, and from generated ids to text, token by token: what is written is never taken
back."""

import codecs
from collections.abc import Sequence

from lmtrain.data.detokenizer import MARKS, Detokenizer
from lmtrain.data.respacing import respace
from lmtrain.data.tokenizer import Tokenizer
from lmtrain.generation.options import Options
from lmtrain.generation.stops import Ending, Stops


def is_spaced_out(tokenizer: Tokenizer) -> bool:
    """Whether the words are in WikiText's style: marks apart, with ` @-@ ` and its kin among them."""
    return any(map(tokenizer.knows, MARKS))


def as_read(tokenizer: Tokenizer, prompt: str, options: Options) -> str:
    """The prompt as the model reads it: spaced out like its corpus, unless `raw`."""
    return respace(prompt, tokenizer.knows) if is_spaced_out(tokenizer) and not options.raw else prompt


class Writer:
    """Writes one text as it follows its prompt: `prompt` is how the prompt, as the user gave it, is shown, `push` what
    each token adds, `close` what was held back. What a stop rule may still cut off is held back, so all that `push`
    returns is final.

    The pieces of a word-level text are passed on whole. Of other texts, bytes that are no UTF-8 become U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: str, options: Options, stops: Stops) -> None:
        self.ending: Ending | None = None
        self._tokenizer = tokenizer
        self._stops = stops
        self._min_tokens = options.min_tokens
        self._ids: list[int] = []
        self._pending: list[bytes] = []
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._detokenizer = Detokenizer() if is_spaced_out(tokenizer) and not options.raw else None
        self.prompt = prompt
        if self._detokenizer is not None:
            # Plain text is shown as it was given; which quotations are open in it can be seen when it is spaced out.
            given = Detokenizer()
            self.prompt = given.feed(prompt) + given.pause()
            self._detokenizer.feed(as_read(tokenizer, prompt, options))
            self._detokenizer.pause()
        # The space before the first word of a word-level text is there already, or not wanted.
        self._space_to_drop = tokenizer.kind == "word" and (not prompt or prompt[-1].isspace())

    def push(self, token: int) -> str:
        """One token more; returns the text that is now certain."""
        self._pending.append(self._tokenizer.piece(self._ids[-1] if self._ids else None, token))
        self._ids.append(token)
        if len(self._ids) >= self._min_tokens:
            self.ending = self._stops.ending(self._ids)
        return "" if self.ending else self._release(self._certain())

    def close(self) -> str:
        """The rest of the text, with what its end cuts off taken away."""
        rest = b"".join(self._pending)
        self._pending = [rest[: len(rest) - (self.ending.cut if self.ending else 0)]]
        return self._release(1, final=True)

    def _certain(self) -> int:
        """How many of the pending pieces no stop rule can reach any more."""
        pending = b"".join(self._pending)
        end = len(pending) - max((_overlap(pending, held) for held in self._stops.held), default=0)
        count = length = 0
        while count < len(self._pending) and length + len(self._pending[count]) <= end:
            length += len(self._pending[count])
            count += 1
        return count

    def _release(self, count: int, *, final: bool = False) -> str:
        content = b"".join(self._pending[:count])
        del self._pending[:count]
        if content and self._space_to_drop:
            content, self._space_to_drop = content.removeprefix(b" "), False
        text = self._decoder.decode(content, final)
        return text if self._detokenizer is None else self._detokenizer.feed(text)


def _overlap(text: bytes, held: bytes) -> int:
    """The length of the longest end of `text` that is a beginning of `held`, and not all of it."""
    return next((n for n in range(min(len(text), len(held) - 1), 0, -1) if text.endswith(held[:n])), 0)


def write(tokenizer: Tokenizer, prompt: str, ids: Sequence[int], options: Options, stops: Stops) -> tuple[str, str]:
    """The prompt as it is shown, and the text of `ids` as it follows it."""
    writer = Writer(tokenizer, prompt, options, stops)
    pushed = [writer.push(token) for token in ids]
    return writer.prompt, "".join(pushed) + writer.close()
