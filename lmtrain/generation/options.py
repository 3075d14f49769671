"""All options of a completion, validated together."""

import secrets
from dataclasses import replace
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, NonNegativeInt, PositiveInt, model_validator
from pydantic.dataclasses import dataclass

StopKind = Literal["none", "line", "sentence"]


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class Options:
    """How prompts are continued: greedily (`temperature` 0), by sampling, or by beam search (`beams` above 1).

    A token is sampled in these steps:
    1. The log-probability of a token that is in the prompt or the text is multiplied by `repetition_penalty` (Keskar et
       al., 2019, apply it to logits; above 1, such tokens become rarer).
    2. All log-probabilities are divided by `temperature`.
    3. The `top_k` most likely tokens stay (0: all; Fan et al., 2018).
    4. They are renormalized, and the fewest with the total probability `top_p` stay (Holtzman et al., 2020).
    Ties with the last token that stays also stay. At temperature 0 the most likely token is taken (ties: the
    lowest id).

    A text's score is the sum of log p / length ** length_penalty, over the model's own log-probabilities, in nats, of
    its `length` tokens. The `results` best texts by score are returned: among a prompt's `samples` (None: all), or
    among the texts that `beams` find (None: one). Equal samples are all returned.

    Raises ValidationError, a ValueError, for an unknown option, a value out of its range, and options that contradict
    each other.
    """

    max_tokens: PositiveInt = 100
    temperature: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    top_k: NonNegativeInt = 0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    repetition_penalty: Annotated[float, Field(ge=1e-6, le=1e6)] = 1.0
    samples: PositiveInt = 1
    seed: int = 0
    beams: PositiveInt = 1
    results: PositiveInt | None = None
    length_penalty: Annotated[float, Field(ge=-10, le=10)] = 0.0
    stop: StopKind = "none"
    stop_strings: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """A text ends before the first of these that it would contain; see `Stops` for how they are searched for."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if 0 < self.temperature < 1e-6:  # some quotients would be infinite
            raise ValueError(f"temperature={self.temperature} must be 0 or at least 1e-6")
        sampling = ("samples", "temperature", "top_k", "top_p", "repetition_penalty")
        if self.beams > 1 and any(getattr(self, name) != getattr(Options, name) for name in sampling):
            raise ValueError("beam search (beams > 1) allows no sampling and no repetition penalty: leave them out")
        if self.samples > 1 and not self.temperature:
            raise ValueError(f"samples={self.samples} would all be the same text at temperature 0")
        if self.results is not None and self.results > max(self.beams, self.samples):
            raise ValueError(f"results={self.results} is more than samples or beams: lower it, or raise one of them")
        return self

    @property
    def returned(self) -> int:
        """How many texts are returned for each prompt."""
        return self.results or (1 if self.beams > 1 else self.samples)


SAMPLED = Options(temperature=0.8, top_p=0.95)
"""The default of `lmtrain generate` and `Run.generate`, and what samples in training have."""


def options_with(**fields: Any) -> Options:
    """Return the options of `lmtrain generate` and `Run.generate`: `fields`, and for the others SAMPLED with a random
    seed, or for a beam search the defaults. Raises ValidationError as `Options` does."""
    base = Options() if fields.get("beams", 1) != 1 else replace(SAMPLED, seed=secrets.randbelow(1_000_000))
    return replace(base, **fields)
