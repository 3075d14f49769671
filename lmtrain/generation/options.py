"""All options of a completion, validated together."""

from dataclasses import dataclass
from typing import Literal

from lmtrain.generation.sampling import GREEDY, Sampling

StopKind = Literal["none", "line", "sentence", "document"]


@dataclass(frozen=True)
class Options:
    """How prompts are continued: greedily, by `sampling`, or by beam search (`beams` above 1).

    A text's score is the sum of log p / length ** length_penalty, over the model's own log-probabilities, in nats, of
    its `length` tokens. The best `results` by score are returned: of a prompt's `samples`, or of the texts that
    `beams` find. Equal samples are all returned.

    Raises ValueError for options that contradict each other.
    """

    max_tokens: int = 100
    sampling: Sampling = GREEDY
    samples: int = 1
    seed: int = 0
    beams: int = 1
    results: int = 1
    length_penalty: float = 0.0
    stop: StopKind = "none"
    stop_strings: tuple[str, ...] = ()
    """A text ends before the first of these that it would contain."""
    raw: bool = False
    """Keep the corpus's spacing in a word-level text, and read the prompt's words as they are."""

    def __post_init__(self) -> None:
        if self.beams > 1 and (self.samples > 1 or self.sampling.temperature or self.sampling.repetition_penalty != 1):
            raise ValueError("beams > 1 excludes sampling and a repetition penalty: a beam search ranks by probability")
        if self.samples > 1 and not self.sampling.temperature:
            raise ValueError(f"samples={self.samples} would all be the same text at temperature 0")
        texts = self.beams if self.beams > 1 else self.samples
        if not 1 <= self.results <= texts:
            raise ValueError(f"results={self.results} must lie between 1 and the {texts} texts that are generated")
        if not abs(self.length_penalty) <= 10:
            raise ValueError(f"length_penalty={self.length_penalty} must lie between -10 and 10")
        if "" in self.stop_strings:
            raise ValueError("a stop string is empty")
        try:
            "".join(self.stop_strings).encode()
        except UnicodeEncodeError:
            raise ValueError("a stop string has a lone surrogate: it is not Unicode text, so remove it") from None
