"""Beam search against its definition and an exhaustive search, both written out, on tables over whole histories."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmtrain.generation.beam import Stopping, beam_search
from lmtrain.generation.sampling import sample
from lmtrain.generation.search import Hypothesis, Rules
from tests.generation.toy import ENDS, PROMPTS, Toy


@dataclass(frozen=True)
class Problem:
    """A model, rules and the options of a beam search."""

    model: Toy
    rules: Rules
    beams: int
    results: int
    alpha: float
    stopping: Stopping

    def search(self, prompts: Sequence[tuple[int, ...]] = PROMPTS) -> list[list[Hypothesis]]:
        return beam_search(
            *self.model.start(prompts),
            self.model.step,
            self.rules,
            beams=self.beams,
            results=self.results,
            alpha=self.alpha,
            stopping=self.stopping,
            prompts=prompts,
        )

    def steps(self, prompts: Sequence[tuple[int, ...]] = PROMPTS) -> int:
        """The steps of the model that `search` takes."""
        before = self.model.steps
        self.search(prompts)
        return self.model.steps - before

    def is_over(self, ids: Sequence[int]) -> bool:
        ends = ids[-1] in self.rules.end_ids or (self.rules.is_end is not None and self.rules.is_end(ids))
        return len(ids) >= self.rules.min_tokens and ends

    def extensions(self, prompt: Sequence[int], ids: tuple[int, ...]) -> Iterator[tuple[int, float]]:
        """What may follow, and the log-probability, or what the bias makes of it."""
        for token, log_prob in enumerate(self.model.predict((*prompt, *ids)).tolist()):
            n = self.rules.no_repeat
            text = (*prompt, *ids, token)
            grams = [text[i : i + n] for i in range(len(text) - n + 1)]
            too_early = token in self.rules.end_ids and len(ids) + 1 < self.rules.min_tokens
            repeated = n > 0 and len(grams) > 0 and grams[-1] in grams[:-1]
            score = float(np.float32(log_prob) + np.float32(self.rules.bias.get(token, 0.0)))
            if not (token in self.rules.banned or too_early or repeated or score == -math.inf):
                yield token, score

    def hypothesis(self, prompt: Sequence[int], ids: tuple[int, ...]) -> Hypothesis:
        """What a search should say of a text, from the model's table."""
        total = sum(dict(self.extensions(prompt, ids[:i]))[token] for i, token in enumerate(ids))
        score = total / len(ids) ** self.alpha if ids else 0.0
        return Hypothesis(ids, tuple(self.model.score_tokens(prompt, ids)), score, bool(ids) and self.is_over(ids))

    def exhaustive(self, prompt: Sequence[int], ids: tuple[int, ...] = ()) -> list[Hypothesis]:
        """Every text that ends, best first."""
        following = [token for token, _ in self.extensions(prompt, ids)]
        if not following or len(ids) == self.rules.max_tokens or (ids and self.is_over(ids)):
            return [self.hypothesis(prompt, ids)]
        found = [end for token in following for end in self.exhaustive(prompt, (*ids, token))]
        return sorted(found, key=lambda end: -end.score)

    def reference(self, prompt: Sequence[int]) -> tuple[list[Hypothesis], int]:
        """Beam search as its definition reads, without "exact"; and the steps that it takes."""
        live: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
        ended: list[tuple[int, ...]] = []
        steps = -1
        while live:
            steps += 1
            candidates = []
            for rank, (ids, total) in enumerate(live):
                following = list(self.extensions(prompt, ids))
                candidates += [(-(total + score), rank, token) for token, score in following]
                ended += [] if following else [ids]
            kept = [((*live[rank][0], token), -minus) for minus, rank, token in sorted(candidates)[: self.beams]]
            over = [self.is_over(ids) or len(ids) == self.rules.max_tokens for ids, _ in kept]
            ended += [ids for (ids, _), end in zip(kept, over, strict=True) if end]
            live = [text for text, end in zip(kept, over, strict=True) if not end]
            if self.stopping == "first" and sum(bool(ids) and self.is_over(ids) for ids in ended) >= self.results:
                break
        found = [self.hypothesis(prompt, ids) for ids in ended]
        return sorted(found, key=lambda end: -end.score)[: self.results], steps


GAPS = st.sampled_from([0.0, 0.0, 0.2, 0.5])


@st.composite
def problems(draw: st.DrawFn, limit: int = 6, grids: Sequence[float] = (0.0, 0.0, 0.5)) -> Problem:
    """`grids` above zero make for ties, whose sums are exact, so that a tie is one in every order of adding."""
    grid = draw(st.sampled_from(grids))
    vocab = draw(st.integers(2, 4))
    model = Toy(vocab, draw(st.integers(0, 10**6)), draw(st.sampled_from([0.3, 2.0, 6.0])), grid, draw(GAPS))
    max_tokens = draw(st.integers(1, limit))
    end_ids, is_end = draw(st.sampled_from(ENDS))
    min_tokens = draw(st.sampled_from([0, 0, 0, min(2, max_tokens), max_tokens]))
    bias = draw(st.sampled_from([{}, {}, {0: 4.0, 1: 1.5}, {1: 0.5, 0: -1.0}, {0: -math.inf}]))
    banned = draw(st.sampled_from([frozenset[int](), frozenset[int](), frozenset({1})]))
    if len(banned | end_ids) >= vocab:  # with `min_tokens`, nothing could be generated
        end_ids, banned = frozenset(), frozenset()
    rules = Rules(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        end_ids=end_ids,
        is_end=is_end,
        banned=banned,
        bias=bias,
        no_repeat=draw(st.sampled_from([0, 0, 0, 1, 2, 3])),
    )
    beams = draw(st.integers(1, 7))
    alpha = draw(st.sampled_from([-3.0, -1.0, 0.0, 0.6, 1.0, 2.0]))
    stopping: Stopping = draw(st.sampled_from(get_args(Stopping)))
    return Problem(model, rules, beams, draw(st.integers(1, beams)), alpha, stopping)


thorough = settings(deadline=None, max_examples=300, derandomize=True)
brief = settings(thorough, max_examples=100)


def assert_same(found: Sequence[Hypothesis], expected: Sequence[Hypothesis]) -> None:
    assert [(h.ids, h.token_log_probs, h.finished) for h in found] == [
        (h.ids, h.token_log_probs, h.finished) for h in expected
    ]
    assert [h.score for h in found] == pytest.approx([h.score for h in expected], rel=1e-12, abs=1e-12)


@thorough
@given(problems())
def test_it_finds_what_its_definition_says_in_as_many_steps(problem: Problem) -> None:
    """For "exact" the definition is that of "never": what is given up changes nothing, and saves steps."""
    definition = replace(problem, stopping="never") if problem.stopping == "exact" else problem
    expected = [definition.reference(prompt) for prompt in PROMPTS]
    for found, (hypotheses, _) in zip(problem.search(), expected, strict=True):
        assert_same(found, hypotheses)
    steps = max(steps for _, steps in expected)
    assert problem.steps() <= steps if problem.stopping == "exact" else problem.steps() == steps


@thorough
@given(problems(limit=4, grids=[0.0]), st.integers(1, 12))
def test_a_beam_as_wide_as_the_space_is_exhaustive(problem: Problem, results: int) -> None:
    stopping: Stopping = "never" if problem.stopping == "never" else "exact"
    width = max(12, problem.model.vocab**problem.rules.max_tokens)
    (found,) = replace(problem, beams=width, results=results, stopping=stopping).search([(0, 1)])
    assert_same(found, problem.exhaustive((0, 1))[:results])


@brief
@given(problems())
def test_one_beam_is_greedy(problem: Problem) -> None:
    log_probs, state = problem.model.start(PROMPTS)
    greedy = sample(log_probs, state, problem.model.step, problem.rules, prompts=PROMPTS)
    expected = [problem.hypothesis(prompt, end.ids) for prompt, end in zip(PROMPTS, greedy, strict=True)]
    assert_same([end for (end,) in replace(problem, beams=1, results=1).search()], expected)
    assert [end.finished for end in greedy] == [end.finished for end in expected]


@brief
@given(problems())
def test_results_are_sorted_distinct_and_rescored(problem: Problem) -> None:
    for prompt, found in zip(PROMPTS, problem.search(), strict=True):
        assert_same(found, [problem.hypothesis(prompt, h.ids) for h in found])
        assert 1 <= len({h.ids for h in found}) == len(found) <= problem.results
        assert [h.score for h in found] == sorted((h.score for h in found), reverse=True)


@brief
@given(problems())
def test_a_batch_equals_its_prompts_alone(problem: Problem) -> None:
    assert problem.search() == [problem.search([prompt])[0] for prompt in PROMPTS]


@brief
@given(problems())
def test_the_best_does_not_depend_on_how_many_are_asked_for(problem: Problem) -> None:
    problem = replace(problem, stopping="exact")
    most = replace(problem, results=problem.beams).search()
    assert problem.search() == [found[: problem.results] for found in most]
