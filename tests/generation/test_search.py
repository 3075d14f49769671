"""Greedy search against a loop, and what it shares with sampling: rules, rows of a batch, callbacks."""

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lmtrain.errors import LmtrainError
from lmtrain.generation.options import Options
from lmtrain.generation.sampling import sample
from lmtrain.generation.search import Hypothesis, IsEnd
from tests.generation.toy import ENDS, PROMPTS, History, Toy, ends_with

GREEDY, PLAIN = Options(), Options(temperature=1.0)
NARROW = [
    Options(temperature=1.0, top_k=1),
    Options(temperature=1.0, top_p=1e-9),
    Options(temperature=1e-6),
    Options(temperature=0.0, top_k=2, top_p=0.5),
]
"""Settings that leave only the most likely token."""


@dataclass(frozen=True)
class Problem:
    """A model without ties, the length and the end of a text, blocked ids, and a repetition penalty."""

    model: Toy
    max_tokens: int
    is_end: IsEnd
    blocked: frozenset[int]
    penalty: float

    def search(self, prompts: list[tuple[int, ...]], sampling: Options = GREEDY) -> list[Hypothesis]:
        sampling = replace(sampling, max_tokens=self.max_tokens, repetition_penalty=self.penalty)
        start, step = self.model.start(prompts), self.model.step
        return sample(*start, step, sampling, is_end=self.is_end, blocked=self.blocked, prompts=prompts)

    def expected(self, prompt: tuple[int, ...]) -> Hypothesis:
        ids: tuple[int, ...] = ()
        numbers: list[float] = []
        while len(ids) < self.max_tokens and not (ids and self.is_end(ids)):
            row = self.model.predict((*prompt, *ids)).tolist()
            scores = {
                token: log_prob * (self.penalty if token in (*prompt, *ids) else 1)
                for token, log_prob in enumerate(row)
                if token not in self.blocked
            }
            ids += (max(scores, key=lambda token: scores[token]),)
            numbers.append(row[ids[-1]])
        return Hypothesis(ids, tuple(numbers), sum(numbers))


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    return Problem(
        Toy(draw(st.integers(4, 6)), draw(st.integers(0, 10**6))),
        draw(st.integers(1, 7)),
        draw(st.sampled_from(ENDS)),
        draw(st.sampled_from([frozenset[int](), frozenset({3})])),
        draw(st.sampled_from([1.0, 1.0, 1.4, 0.7])),
    )


@given(problems())
def test_greedy_takes_the_most_likely_allowed_token_until_the_end(problem: Problem) -> None:
    """The rows of a batch do not depend on each other, and no step is needless."""
    found = problem.search(PROMPTS)
    assert found == [problem.expected(prompt) for prompt in PROMPTS]
    assert problem.model.steps == max(len(text.ids) for text in found) - 1


@given(problems(), st.sampled_from(NARROW))
def test_sampling_from_one_token_is_greedy(problem: Problem, sampling: Options) -> None:
    assert problem.search(PROMPTS, sampling) == problem.search(PROMPTS)


@pytest.mark.parametrize("sampling", [GREEDY, PLAIN])
def test_the_callback_gets_every_token_in_order(sampling: Options) -> None:
    calls: list[tuple[int, int]] = []
    model, options = Toy(4, 2), replace(sampling, max_tokens=9)
    found = sample(
        *model.start(PROMPTS), model.step, options, is_end=ends_with(0), on_token=lambda *call: calls.append(call)
    )
    assert len({len(text.ids) for text in found}) > 1
    positions = range(max(len(text.ids) for text in found))
    assert calls == [(row, text.ids[t]) for t in positions for row, text in enumerate(found) if t < len(text.ids)]


def test_ties_go_to_the_lowest_id() -> None:
    def step(state: History, tokens: Tensor) -> tuple[Tensor, History]:
        return torch.full((len(tokens), 40), 1 / 40).log(), state

    (found,) = sample(*step(History([()]), torch.zeros(1)), step, Options(max_tokens=3), blocked={0})
    assert found.ids == (1, 1, 1)


def test_no_rows_and_a_vocabulary_of_one_token_are_searched() -> None:
    model = Toy(1, 0)
    assert sample(torch.empty(0, 1), History([]), model.step, GREEDY) == []
    for sampling in [*NARROW, GREEDY, Options(temperature=2.0, top_k=5, top_p=0.5, repetition_penalty=3.0)]:
        (found,) = sample(*model.start([(0,)]), model.step, replace(sampling, max_tokens=3), prompts=[(0,)])
        assert found == Hypothesis((0, 0, 0), (0.0, 0.0, 0.0), 0.0)


@pytest.mark.parametrize("sampling", [GREEDY, PLAIN, Options(temperature=1.0, top_k=2, top_p=0.5)])
@pytest.mark.parametrize("column", [0, 1, 2])
def test_a_diverged_model_is_an_error(sampling: Options, column: int) -> None:
    def step(state: History, tokens: Tensor) -> tuple[Tensor, History]:
        log_probs = torch.tensor([[-torch.inf, 0.0, -1.0]]).repeat(len(tokens), 1)
        log_probs[-1, column] = torch.nan
        return log_probs, state

    with pytest.raises(LmtrainError, match="probabilities are NaN"):
        sample(*Toy(3, 0).start([(1,), (2,)]), step, sampling)
