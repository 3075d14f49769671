"""Beam search against its definition and an exhaustive search, both written out, on tables over whole histories."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lmtrain.decoding.beam import Stopping, beam_search
from lmtrain.decoding.sampling import sample
from lmtrain.decoding.search import Hypothesis, Rules
from lmtrain.errors import LmtrainError
from tests.decoding.toy import ENDS, PROMPTS, History, Toy


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


@st.composite
def problems(draw: st.DrawFn, limit: int = 6, grids: Sequence[float] = (0.0, 0.0, 0.5)) -> Problem:
    """`grids` above zero make for ties, whose sums are exact, so that a tie is one in every order of adding."""
    grid = draw(st.sampled_from(grids))
    vocab = draw(st.integers(2, 4))
    model = Toy(vocab, draw(st.integers(0, 10**6)), draw(st.sampled_from([0.3, 2.0, 6.0])), grid)
    max_tokens = draw(st.integers(1, limit))
    end_ids, is_end = draw(st.sampled_from(ENDS))
    min_tokens = draw(st.sampled_from([0, 0, 0, min(2, max_tokens), max_tokens]))
    bias = draw(st.sampled_from([{}, {}, {0: 1.5}, {1: 0.5, 0: -1.0}, {0: -math.inf}]))
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


thorough = settings(deadline=None, max_examples=400, derandomize=True)


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


@thorough
@given(problems())
def test_one_beam_is_greedy(problem: Problem) -> None:
    log_probs, state = problem.model.start(PROMPTS)
    greedy = sample(log_probs, state, problem.model.step, problem.rules, prompts=PROMPTS)
    expected = [problem.hypothesis(prompt, end.ids) for prompt, end in zip(PROMPTS, greedy, strict=True)]
    assert_same([end for (end,) in replace(problem, beams=1, results=1).search()], expected)
    assert [end.finished for end in greedy] == [end.finished for end in expected]


@thorough
@given(problems())
def test_results_are_sorted_distinct_and_rescored(problem: Problem) -> None:
    for prompt, found in zip(PROMPTS, problem.search(), strict=True):
        assert_same(found, [problem.hypothesis(prompt, h.ids) for h in found])
        assert 1 <= len({h.ids for h in found}) == len(found) <= problem.results
        assert [h.score for h in found] == sorted((h.score for h in found), reverse=True)


@thorough
@given(problems())
def test_a_batch_equals_its_prompts_alone(problem: Problem) -> None:
    assert problem.search() == [problem.search([prompt])[0] for prompt in PROMPTS]


@thorough
@given(problems())
def test_the_best_does_not_depend_on_how_many_are_asked_for(problem: Problem) -> None:
    problem = replace(problem, stopping="exact")
    most = replace(problem, results=problem.beams).search()
    assert problem.search() == [found[: problem.results] for found in most]


def test_no_prompts_have_no_texts() -> None:
    assert beam_search(torch.empty(0, 3), History([]), Toy(3, 0).step, Rules(2), beams=2) == []


def test_it_stops_as_soon_as_nothing_can_win() -> None:
    """A certain end at once: one look at the model is enough, however long the text might be."""

    def no_step(state: History, tokens: Tensor) -> tuple[Tensor, History]:
        raise AssertionError("looked further than needed")

    log_probs = torch.tensor([[0.9, 0.06, 0.04]]).log()
    rules = Rules(10_000, end_ids=frozenset({0}))
    ((found,),) = beam_search(log_probs, History([()]), no_step, rules, beams=3)
    assert found.ids == (0,)
    assert found.finished


def test_it_goes_on_while_a_longer_text_can_win() -> None:
    """Under a negative penalty the next length has the best chance, not the last: 2 log 0.8 beats 1 log 0.2."""

    def step(state: History, tokens: Tensor) -> tuple[Tensor, History]:
        return torch.tensor([[1.0, 0.0]]).log().repeat(len(tokens), 1), state

    log_probs = torch.tensor([[0.2, 0.8]]).log()
    ((found,),) = beam_search(log_probs, History([()]), step, Rules(10, end_ids=frozenset({0})), beams=2, alpha=-1.0)
    assert found.ids == (1, 0)
    assert found.score == pytest.approx(2 * math.log(0.8), rel=1e-6)


def test_a_positive_bias_keeps_worse_texts_alive() -> None:
    """Each 1 loses log 0.5 and gains 1: the sum grows, though after the first step the end is ahead."""

    def step(state: History, tokens: Tensor) -> tuple[Tensor, History]:
        return torch.tensor([[0.5, 0.5]]).log().repeat(len(tokens), 1), state

    rules = Rules(5, end_ids=frozenset({0}), bias={1: 1.0})
    ((found,),) = beam_search(torch.tensor([[0.9, 0.1]]).log(), History([()]), step, rules, beams=2)
    assert found.ids == (1, 1, 1, 1, 1)
    assert found.score == pytest.approx(math.log(0.1) + 4 * math.log(0.5) + 5, rel=1e-6)
    assert sum(found.token_log_probs) == pytest.approx(math.log(0.1) + 4 * math.log(0.5), rel=1e-6)


def test_the_first_finished_text_may_not_be_the_best() -> None:
    log_probs = torch.tensor([[0.3, 0.7]]).log()

    def step(state: History, tokens: Tensor) -> tuple[Tensor, History]:
        return torch.tensor([[1.0, 0.0]]).log().repeat(len(tokens), 1), state

    rules = Rules(10, end_ids=frozenset({0}))
    ((first,),) = beam_search(log_probs.clone(), History([()]), step, rules, beams=2, stopping="first")
    ((exact,),) = beam_search(log_probs.clone(), History([()]), step, rules, beams=2, stopping="exact")
    assert (first.ids, exact.ids) == ((0,), (1, 0))


def test_the_toy_notices_states_that_are_not_reordered() -> None:
    """The tests above can fail: with a state that keeps its rows in place, scores no longer match the model."""
    model = Toy(4, seed=3)
    log_probs, state = model.start([(7,)], broken=True)
    (found,) = beam_search(log_probs, state, model.step, Rules(5), beams=4, results=4)
    assert any(list(h.token_log_probs) != model.score_tokens((7,), h.ids) for h in found)


def test_texts_stay_in_their_rows() -> None:
    """Two texts overtake each other at every step: they have rows of their own once, and are never copied again."""
    selected = []

    @dataclass
    class Watched(History):
        def select(self, index: Tensor) -> "Watched":
            selected.append(index.tolist())
            return Watched([self.rows[i] for i in index.tolist()])

    def step(state: Watched, tokens: Tensor) -> tuple[Tensor, Watched]:
        rows = [(*row, token) for row, token in zip(state.rows, tokens.tolist(), strict=True)]
        likely = torch.tensor([-0.1 if len(row) % 2 == row[0] else -0.5 for row in rows])
        return torch.stack((likely, torch.full_like(likely, -9.0)), dim=1), Watched(rows)

    log_probs = torch.tensor([[-0.4, -0.5]])
    (found,) = beam_search(log_probs, Watched([()]), step, Rules(6), beams=2, results=2)
    assert sorted(h.ids[0] for h in found) == [0, 1]
    assert selected == [[0, 0]]


def test_ties_go_to_the_better_text_then_to_the_lowest_id() -> None:
    def step(state: History, tokens: Tensor) -> tuple[Tensor, History]:
        return torch.full((len(tokens), 700), 0.2).log(), state

    rules = Rules(2, banned=frozenset({0}))
    log_probs = torch.full((1, 700), 0.2).log()
    log_probs[0, 5] = math.log(0.3)
    (found,) = beam_search(log_probs, History([()]), step, replace(rules, max_tokens=1), beams=3, results=3)
    assert [h.ids for h in found] == [(5,), (1,), (2,)]
    log_probs[0, 5] = math.log(0.2)
    (found,) = beam_search(log_probs, History([()]), step, rules, beams=3, results=3)
    assert [h.ids for h in found] == [(1, 1), (1, 2), (1, 3)]


def test_a_diverged_model_is_refused_in_a_sentence() -> None:
    log_probs = torch.tensor([[torch.nan, torch.nan]])
    with pytest.raises(LmtrainError, match="not numbers"):
        beam_search(log_probs, History([()]), Toy(2, 0).step, Rules(3), beams=2)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"beams": 2, "results": 3}, "results=3"),
        ({"beams": 0}, "beams=0"),
        ({"beams": 2, "alpha": math.nan}, "alpha=nan"),
        ({"beams": 2, "stopping": "soon"}, "stopping='soon'"),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, object], named: str) -> None:
    model = Toy(3, 0)
    with pytest.raises(ValueError, match=named):
        beam_search(*model.start([(1,)]), model.step, Rules(2), **options)  # type: ignore[arg-type, type-var]
