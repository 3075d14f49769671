"""All options of a completion, validated together."""

from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Literal, get_args

StopKind = Literal["none", "line", "sentence", "document"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """How prompts are continued: greedily (`temperature` 0), by sampling, or by beam search (`beams` above 1).

    A token is sampled in these steps:
    1. The log-probability of a token that is in the prompt or the text is multiplied by `repetition_penalty` (Keskar et
       al., 2019, apply it to logits; above 1, such tokens become rarer).
    2. All log-probabilities are divided by `temperature`.
    3. The `top_k` most likely tokens stay (0: all; Fan et al., 2018).
    4. They are renormalized, and the fewest with the total probability `top_p` stay (Holtzman et al., 2020).
    5. Tokens with at least `min_p` times the probability of the most likely one stay (Nguyen et al., 2024).
    Ties with the last token that stays also stay. At temperature 0 the most likely token is taken (ties: the
    lowest id).

    A text's score is the sum of log p / length ** length_penalty, over the model's own log-probabilities, in nats, of
    its `length` tokens. The `results` best texts by score are returned: among a prompt's `samples` (None: all), or
    among the texts that `beams` find (None: one). Equal samples are all returned.

    Raises ValueError for a value out of its range, and for options that contradict each other.
    """

    max_tokens: int = 100
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    samples: int = 1
    seed: int = 0
    beams: int = 1
    results: int | None = None
    length_penalty: float = 0.0
    stop: StopKind = "none"
    stop_strings: tuple[str, ...] = ()
    """A text ends before the first of these that it would contain; see `Stops` for how they are searched for."""
    raw: bool = False
    """Keep the corpus's spacing in a word-level text, and read the prompt's words as they are."""

    def __post_init__(self) -> None:
        for name, least in (("max_tokens", 1), ("samples", 1), ("beams", 1), ("results", 1), ("top_k", 0)):
            value = getattr(self, name)
            if (name, value) != ("results", None) and (not isinstance(value, Integral) or value < least):
                raise ValueError(f"{name}={value} must be a whole number, at least {least}")
        seed: object = self.seed  # from Python it may have any type
        if not isinstance(seed, Integral):
            raise ValueError(f"seed={seed!r} must be a whole number")
        self._check_numbers()
        if not (self.temperature == 0 or 1e-6 <= self.temperature <= 1e6):
            raise ValueError(f"temperature={self.temperature} must be 0 or between 1e-6 and 1e6")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be above 0 and at most 1")
        for name, low, high in (("min_p", 0, 1), ("repetition_penalty", 1e-6, 1e6), ("length_penalty", -10, 10)):
            if not low <= getattr(self, name) <= high:
                raise ValueError(f"{name}={getattr(self, name)} must be between {low:g} and {high:g}")
        if self.stop not in get_args(StopKind):
            raise ValueError(f"stop={self.stop!r} must be one of {', '.join(get_args(StopKind))}")
        sampling = ("samples", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        if self.beams > 1 and any(getattr(self, name) != getattr(Options, name) for name in sampling):
            raise ValueError("beam search (beams > 1) allows no sampling and no repetition penalty: leave them out")
        if self.samples > 1 and not self.temperature:
            raise ValueError(f"samples={self.samples} would all be the same text at temperature 0")
        texts = max(self.beams, self.samples)
        if self.results is not None and self.results > texts:
            generated = f"{texts} texts are" if texts > 1 else "only 1 text is"
            raise ValueError(
                f"results={self.results}: {generated} generated for each prompt; lower it, or raise samples or beams"
            )
        _check_strings(self.stop_strings)

    def _check_numbers(self) -> None:
        for field in fields(self):
            if field.type is float and not isinstance(getattr(self, field.name), Real):
                raise ValueError(f"{field.name}={getattr(self, field.name)!r} must be a number")

    @property
    def returned(self) -> int:
        """How many texts are returned for each prompt."""
        return self.results or (1 if self.beams > 1 else self.samples)


def _check_strings(strings: object) -> None:
    if not isinstance(strings, tuple | list) or not all(isinstance(text, str) and text for text in strings):
        raise ValueError("stop strings must be a list of nonempty strings")
    try:
        "".join(strings).encode()
    except UnicodeEncodeError:
        raise ValueError("a stop string has a lone surrogate: it is not Unicode text, so remove it") from None


SAMPLED = Options(temperature=0.8, top_p=0.95)
"""The default of `lmtrain generate` and `Run.generate`, and what samples in training have."""
