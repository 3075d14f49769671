"""All that can be chosen about a completion."""

from dataclasses import dataclass
from typing import Literal

from lmtrain.generation.beam import Stopping
from lmtrain.generation.sampling import GREEDY, Sampling

StopKind = Literal["none", "line", "sentence", "document"]


@dataclass(frozen=True)
class Options:
    """How prompts are continued: greedily, by `sampling`, or by beam search (more than one beam).

    Every text has a score, sum of log p / length ** alpha, over the model's own log-probabilities in nats of its
    `length` tokens (a beam search adds `bias` to them). The best `results` by score are given: of the `samples` texts
    that are drawn for a prompt, or of the texts that `beams` find. Equal draws stay, each one of them is a result.

    Raises ValueError for options that contradict each other.
    """

    max_tokens: int = 100
    min_tokens: int = 0
    """No text ends before it has so many tokens."""
    sampling: Sampling = GREEDY
    samples: int = 1
    beams: int = 1
    stopping: Stopping = "exact"
    results: int = 1
    alpha: float = 0.0
    seed: int = 0
    no_repeat: int = 0
    """n > 0: no n tokens in a row that the prompt or the text already has."""
    stop: StopKind = "none"
    stop_strings: tuple[str, ...] = ()
    """A text ends before the first of these that it would hold."""
    allow_unknown: bool = False
    ban: tuple[str, ...] = ()
    """Words that are not produced."""
    bias: tuple[tuple[str, float], ...] = ()
    """Words and the nats that are added to their log-probabilities where tokens are chosen."""
    raw: bool = False
    """Leave a word-level text in the corpus's own spacing, and read the prompt's words as they are."""

    def __post_init__(self) -> None:
        if self.beams > 1 and (self.samples > 1 or self.sampling != GREEDY):
            raise ValueError("a beam search doesn't draw: beams > 1 excludes sampling")
        if self.samples > 1 and not self.sampling.temperature:
            raise ValueError(f"samples={self.samples} would all be the same text at temperature 0")
        texts = self.beams if self.beams > 1 else self.samples
        if not 1 <= self.results <= texts:
            raise ValueError(f"results={self.results} must lie between 1 and the {texts} texts that are looked for")
        if "" in self.stop_strings:
            raise ValueError("a stop string is empty")
        try:
            "".join(self.stop_strings).encode()
        except UnicodeEncodeError:
            raise ValueError("a stop string has a lone surrogate: it is not Unicode text, so remove it") from None
        if not abs(self.alpha) <= 10:
            raise ValueError(f"alpha={self.alpha} must lie between -10 and 10")
