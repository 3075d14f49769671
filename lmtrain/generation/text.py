"""The prompt as the model reads it, and generated ids as text, token by token."""

import codecs

from lmtrain.data.tokenizer import Tokenizer
from lmtrain.generation.detokenizer import MARKS, Detokenizer
from lmtrain.generation.respacing import respace
from lmtrain.generation.stops import Ending, Stops


def has_wikitext_spacing(tokenizer: Tokenizer) -> bool:
    """Whether the vocabulary is of WikiText's style: punctuation as words, with ` @-@ ` and the like among them."""
    return any(map(tokenizer.knows, MARKS))


def prompt_for_model(tokenizer: Tokenizer, prompt: str, raw: bool) -> str:
    """The prompt in the spacing of the model's corpus; as it is if `raw`."""
    return respace(prompt, tokenizer.knows) if has_wikitext_spacing(tokenizer) and not raw else prompt


def unknown_words(tokenizer: Tokenizer, prompt: str) -> list[str]:
    """The words of a prompt that the model reads as `<unk>`, without duplicates."""
    if tokenizer.unk_id is None:
        return []
    words = dict.fromkeys(prompt.split())
    return [word for word in words if word != "<unk>" and tokenizer.unk_id in tokenizer.encode(word)]


class TextStreamer:
    """Turns the tokens of one text into the text that follows its prompt.

    `prompt` is how the prompt is displayed; `push` returns the text that a token makes final; `close` returns the rest.
    What a stop rule may still cut off is not final. Bytes that are not UTF-8 become U+FFFD. Unless `raw`, the text of a
    vocabulary in WikiText's style is detokenized.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: str, stops: Stops, raw: bool) -> None:
        self.ending: Ending | None = None
        self._tokenizer = tokenizer
        self._stops = stops
        self._ids: list[int] = []
        self._pending: list[bytes] = []
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._detokenizer = Detokenizer() if has_wikitext_spacing(tokenizer) and not raw else None
        self.prompt = prompt
        if self._detokenizer is not None:
            # The prompt is displayed as it was given; its spaced form shows which quotations it leaves open.
            given = Detokenizer()
            self.prompt = given.feed(prompt) + given.pause()
            self._detokenizer.feed(prompt_for_model(tokenizer, prompt, raw))
            self._detokenizer.pause()
        # The prompt already ends with the space before the text's first word, or that space is unwanted.
        self._space_to_drop = tokenizer.adds_space and (not prompt or prompt[-1].isspace())

    def push(self, token: int) -> str:
        """Add a token; returns the text that is now final."""
        self._pending.append(self._tokenizer.token_bytes(self._ids[-1] if self._ids else None, token))
        self._ids.append(token)
        self.ending = self._stops.ending(self._ids)
        return "" if self.ending else self._release(self._final_pieces())

    def close(self) -> str:
        """The rest of the text, without what its ending cuts off."""
        rest = b"".join(self._pending)
        self._pending = [rest[: len(rest) - (self.ending.cut if self.ending else 0)]]
        return self._release(1, final=True)

    def _final_pieces(self) -> int:
        """How many of the pending pieces no stop rule can cut off any more."""
        pending = b"".join(self._pending)
        end = len(pending) - max((_overlap(pending, pattern) for pattern in self._stops.cut_patterns), default=0)
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


def _overlap(text: bytes, pattern: bytes) -> int:
    """The length of the longest suffix of `text` that is a proper prefix of `pattern`."""
    return next((n for n in range(min(len(text), len(pattern) - 1), 0, -1) if text.endswith(pattern[:n])), 0)
