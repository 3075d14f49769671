"""Greedy and beam search against written-out references, on toy models that are tables over whole histories."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lmtrain.decoding.beam import beam_search
from lmtrain.decoding.search import Hypothesis, greedy
from lmtrain.errors import LmtrainError


@dataclass
class History:
    """The toy model's memory: all that each row has read. A row in the wrong place predicts something else."""

    rows: list[tuple[int, ...]]
    broken: bool = False

    def select(self, index: Tensor) -> "History":
        return History([self.rows[0 if self.broken else i] for i in index.tolist()], self.broken)


class Toy:
    """A conditional model with a distribution of its own, drawn from a seed, after every history."""

    def __init__(self, vocab: int, seed: int, spread: float = 2.0):
        self.vocab, self.seed, self.spread = vocab, seed, spread

    def predict(self, history: Sequence[int]) -> Tensor:
        logits = np.random.default_rng([self.seed, *history]).normal(0.0, self.spread, self.vocab)
        return torch.log_softmax(torch.tensor(logits), dim=0).float()

    def start(self, prompts: Sequence[tuple[int, ...]], broken: bool = False) -> tuple[Tensor, History]:
        return torch.stack([self.predict(prompt) for prompt in prompts]), History(list(prompts), broken)

    def step(self, state: History, tokens: Tensor) -> tuple[Tensor, History]:
        rows = [(*row, token) for row, token in zip(state.rows, tokens.tolist(), strict=True)]
        return torch.stack([self.predict(row) for row in rows]), History(rows, state.broken)

    def score_tokens(self, prompt: Sequence[int], ids: Sequence[int]) -> list[float]:
        return [float(self.predict((*prompt, *ids[:i]))[token]) for i, token in enumerate(ids)]


def ends_at(*end_ids: int) -> Callable[[Sequence[int]], bool]:
    return lambda ids: ids[-1] in end_ids


def second_pair(ids: Sequence[int]) -> bool:
    """A rule over the whole text: it is over when two equal neighbours have been seen."""
    return any(a == b for a, b in itertools.pairwise(ids))


RULES: list[Callable[[Sequence[int]], bool]] = [
    ends_at(),
    ends_at(0),
    ends_at(1, 2),
    ends_at(0, 1, 2, 3),
    second_pair,
]


@dataclass(frozen=True)
class Problem:
    """A model, a rule for the end, a length penalty and a limit."""

    model: Toy
    is_end: Callable[[Sequence[int]], bool]
    alpha: float
    limit: int
    banned: tuple[int, ...]

    def greedy(self, prompts: Sequence[tuple[int, ...]]) -> list[Hypothesis]:
        log_probs, state = self.model.start(prompts)
        return greedy(log_probs, state, self.model.step, max_tokens=self.limit, is_end=self.is_end, banned=self.banned)

    def beam(self, prompts: Sequence[tuple[int, ...]], beams: int, results: int) -> list[list[Hypothesis]]:
        log_probs, state = self.model.start(prompts)
        return beam_search(
            log_probs,
            state,
            self.model.step,
            beams=beams,
            results=results,
            alpha=self.alpha,
            max_tokens=self.limit,
            is_end=self.is_end,
            banned=self.banned,
        )

    def hypothesis(self, prompt: Sequence[int], ids: tuple[int, ...]) -> Hypothesis:
        """What a search should say of a text, from the model's table."""
        log_probs = self.model.score_tokens(prompt, ids)
        score = math.fsum(log_probs) / len(ids) ** self.alpha
        return Hypothesis(ids, tuple(log_probs), score, self.is_end(ids))

    def allowed(self) -> list[int]:
        return [token for token in range(self.model.vocab) if token not in self.banned]

    def exhaustive(self, prompt: Sequence[int]) -> list[Hypothesis]:
        """Every text that ends by the rule or at the limit, best first."""
        texts = [
            ids
            for length in range(1, self.limit + 1)
            for ids in itertools.product(self.allowed(), repeat=length)
            if (length == self.limit or self.is_end(ids)) and not any(self.is_end(ids[:i]) for i in range(1, length))
        ]
        return sorted((self.hypothesis(prompt, ids) for ids in texts), key=lambda h: -h.score)

    def unhurried(self, prompt: Sequence[int], beams: int) -> list[Hypothesis]:
        """Beam search as its definition reads, never stopping before the limit."""
        live: list[tuple[int, ...]] = [()]
        done = []
        for length in range(1, self.limit + 1):
            texts = [(*ids, token) for ids in live for token in self.allowed()]
            texts = sorted(texts, key=lambda ids: -sum(self.model.score_tokens(prompt, ids)))[:beams]
            done += [self.hypothesis(prompt, ids) for ids in texts if self.is_end(ids) or length == self.limit]
            live = [ids for ids in texts if not self.is_end(ids)]
        return sorted(done, key=lambda h: -h.score)


problems = st.builds(
    Problem,
    st.builds(Toy, st.integers(2, 4), st.integers(0, 10**6), st.sampled_from([0.3, 2.0, 6.0])),
    st.sampled_from(RULES),
    st.sampled_from([-3.0, 0.0, 0.6, 1.0, 2.0]),
    st.integers(1, 5),
    st.sampled_from([(), (), (0,)]),
)
thorough = settings(deadline=None, max_examples=150, derandomize=True)
PROMPTS: list[tuple[int, ...]] = [(7,), (8, 9), (), (7,)]


def assert_same(found: Sequence[Hypothesis], expected: Sequence[Hypothesis]) -> None:
    assert [(h.ids, h.token_log_probs, h.finished) for h in found] == [
        (h.ids, h.token_log_probs, h.finished) for h in expected
    ]
    assert [h.score for h in found] == pytest.approx([h.score for h in expected], rel=1e-12)


@thorough
@given(problems)
def test_greedy_takes_the_likeliest_token_until_the_end(problem: Problem) -> None:
    problem = replace(problem, alpha=0.0)
    expected = []
    for prompt in PROMPTS:
        ids: tuple[int, ...] = ()
        while len(ids) < problem.limit and not (ids and problem.is_end(ids)):
            row = problem.model.predict((*prompt, *ids)).tolist()
            ids += (max(problem.allowed(), key=lambda token: row[token]),)
        expected.append(problem.hypothesis(prompt, ids))
    assert_same(problem.greedy(PROMPTS), expected)


@thorough
@given(problems)
def test_one_beam_is_greedy(problem: Problem) -> None:
    expected = [
        replace(found, score=found.score / len(found.ids) ** problem.alpha) for found in problem.greedy(PROMPTS)
    ]
    assert_same([found for (found,) in problem.beam(PROMPTS, 1, 1)], expected)


@thorough
@given(problems, st.integers(1, 12))
def test_a_beam_as_wide_as_the_space_is_exhaustive(problem: Problem, results: int) -> None:
    (found,) = problem.beam([(7,)], max(12, problem.model.vocab**problem.limit), results)
    assert_same(found, problem.exhaustive((7,))[:results])


@thorough
@given(problems, st.integers(2, 5), st.integers(1, 5))
def test_stopping_early_changes_nothing(problem: Problem, beams: int, results: int) -> None:
    results = min(results, beams)
    (found,) = problem.beam([(7,)], beams, results)
    assert_same(found, problem.unhurried((7,), beams)[:results])


@thorough
@given(problems, st.integers(2, 5))
def test_results_are_sorted_distinct_rescored_and_free_of_banned_tokens(problem: Problem, beams: int) -> None:
    for prompt, found in zip(PROMPTS, problem.beam(PROMPTS, beams, beams), strict=True):
        assert_same(found, [problem.hypothesis(prompt, h.ids) for h in found])
        assert 1 <= len({h.ids for h in found}) == len(found) <= beams
        assert [h.score for h in found] == sorted((h.score for h in found), reverse=True)
        for h in found:
            assert not set(h.ids) & set(problem.banned)
            assert not any(problem.is_end(h.ids[:i]) for i in range(1, len(h.ids)))
            assert h.finished or len(h.ids) == problem.limit


@thorough
@given(problems, st.integers(1, 5))
def test_a_batch_equals_its_prompts_alone_and_the_best_does_not_depend_on_results(problem: Problem, beams: int) -> None:
    together = problem.beam(PROMPTS, beams, beams)
    assert together == [problem.beam([prompt], beams, beams)[0] for prompt in PROMPTS]
    assert [found[:1] for found in together] == problem.beam(PROMPTS, beams, 1)
    assert problem.greedy(PROMPTS) == [problem.greedy([prompt])[0] for prompt in PROMPTS]


def test_it_stops_as_soon_as_nothing_can_win() -> None:
    """A certain end at once: one look at the model is enough, however long the text might be."""

    def no_step(state: History, tokens: Tensor) -> tuple[Tensor, History]:
        raise AssertionError("looked further than needed")

    log_probs = torch.tensor([[0.9, 0.06, 0.04]]).log()
    ((found,),) = beam_search(log_probs, History([()]), no_step, beams=3, max_tokens=10_000, is_end=ends_at(0))
    assert found.ids == (0,)
    assert found.finished


def test_it_goes_on_while_a_longer_text_can_win() -> None:
    """Under a negative penalty the next length has the best chance, not the last: 2 log 0.8 beats 1 log 0.2."""

    def step(state: History, tokens: Tensor) -> tuple[Tensor, History]:
        return torch.tensor([[1.0, 0.0]]).log().expand(len(tokens), 2), state

    log_probs = torch.tensor([[0.2, 0.8]]).log()
    ((found,),) = beam_search(log_probs, History([()]), step, beams=2, alpha=-1.0, max_tokens=10, is_end=ends_at(0))
    assert found.ids == (1, 0)
    assert found.score == pytest.approx(2 * math.log(0.8), rel=1e-6)


def test_the_toy_notices_states_that_are_not_reordered() -> None:
    """The tests above can fail: with a state that keeps its rows in place, scores no longer match the model."""
    model = Toy(4, seed=3)
    log_probs, state = model.start([(7,)], broken=True)
    (found,) = beam_search(log_probs, state, model.step, beams=4, results=4, max_tokens=5, is_end=ends_at())
    assert any(list(h.token_log_probs) != model.score_tokens((7,), h.ids) for h in found)


def test_ties_go_to_the_lowest_id() -> None:
    def step(state: History, tokens: Tensor) -> tuple[Tensor, History]:
        return torch.full((len(tokens), 5), 0.2).log(), state

    def start() -> tuple[Tensor, History]:
        return torch.full((1, 5), 0.2).log(), History([()])

    never = ends_at()
    assert greedy(*start(), step, max_tokens=3, is_end=never, banned=[0])[0].ids == (1, 1, 1)
    (found,) = beam_search(*start(), step, beams=3, results=3, max_tokens=2, is_end=never, banned=[0])
    assert [h.ids for h in found] == [(1, 1), (1, 2), (1, 3)]


def test_banned_tokens_keep_their_share_of_the_probability() -> None:
    log_probs = torch.tensor([[0.7, 0.2, 0.1]]).log()
    (found,) = greedy(log_probs, History([()]), Toy(3, 0).step, max_tokens=1, is_end=ends_at(), banned={0})
    assert found.ids == (1,)
    assert found.score == pytest.approx(math.log(0.2), rel=1e-6)


def test_a_diverged_model_is_refused_in_a_sentence() -> None:
    log_probs = torch.tensor([[0.0, torch.nan]])
    with pytest.raises(LmtrainError, match="not numbers"):
        greedy(log_probs, History([()]), Toy(2, 0).step, max_tokens=3, is_end=ends_at())
    with pytest.raises(LmtrainError, match="not numbers"):
        beam_search(log_probs, History([()]), Toy(2, 0).step, beams=2, max_tokens=3, is_end=ends_at())


def test_wrong_arguments_are_refused() -> None:
    log_probs, state = Toy(3, 0).start([(1,)])
    step = Toy(3, 0).step
    with pytest.raises(ValueError, match="max_tokens"):
        greedy(log_probs, state, step, max_tokens=0, is_end=ends_at())
    with pytest.raises(ValueError, match="banned"):
        greedy(log_probs, state, step, max_tokens=2, is_end=ends_at(), banned=[0, 1, 2])
    with pytest.raises(ValueError, match="results"):
        beam_search(log_probs, state, step, beams=2, results=3, max_tokens=2, is_end=ends_at())
