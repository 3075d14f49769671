"""All options of a completion, validated together."""

from dataclasses import dataclass
from typing import Literal

from lmtrain.generation.sampling import Sampling

StopKind = Literal["none", "line", "sentence", "document"]


@dataclass(frozen=True, kw_only=True)
class Options(Sampling):
    """How prompts are continued: greedily (`temperature` 0), by sampling, or by beam search (`beams` above 1).

    A text's score is the sum of log p / length ** length_penalty, over the model's own log-probabilities, in nats, of
    its `length` tokens. The best `results` by score are returned: of a prompt's `samples` (None: all), or of the texts
    that `beams` find (None: one). Equal samples are all returned.

    Raises ValueError for options that contradict each other.
    """

    temperature: float = 0.0
    max_tokens: int = 100
    samples: int = 1
    seed: int = 0
    beams: int = 1
    results: int | None = None
    length_penalty: float = 0.0
    stop: StopKind = "none"
    stop_strings: tuple[str, ...] = ()
    """A text ends before the first of these that it would contain."""
    raw: bool = False
    """Keep the corpus's spacing in a word-level text, and read the prompt's words as they are."""

    def __post_init__(self) -> None:
        super().__post_init__()
        how = self.samples, self.temperature, self.top_k, self.top_p, self.min_p, self.repetition_penalty
        if self.beams > 1 and how != (1, 0.0, 0, 1.0, 0.0, 1.0):
            raise ValueError("beams > 1 excludes sampling and a repetition penalty: a beam search ranks by probability")
        if self.samples > 1 and not self.temperature:
            raise ValueError(f"samples={self.samples} would all be the same text at temperature 0")
        texts = self.beams if self.beams > 1 else self.samples
        if self.results is not None and not 1 <= self.results <= texts:
            raise ValueError(f"results={self.results} must lie between 1 and the {texts} texts that are generated")
        if not abs(self.length_penalty) <= 10:
            raise ValueError(f"length_penalty={self.length_penalty} must lie between -10 and 10")
        if "" in self.stop_strings:
            raise ValueError("a stop string is empty")
        try:
            "".join(self.stop_strings).encode()
        except UnicodeEncodeError:
            raise ValueError("a stop string has a lone surrogate: it is not Unicode text, so remove it") from None

    @property
    def returned(self) -> int:
        """Results of each prompt."""
        return self.results or (1 if self.beams > 1 else self.samples)


SAMPLED = Options(temperature=0.8, top_p=0.95)
"""How texts are sampled where nothing else is asked for."""
