"""Beam search against its definition and an exhaustive search, both as plain loops, and single cases made by hand."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lmtrain.generation.beam import beam_search
from lmtrain.generation.options import Options
from lmtrain.generation.search import Hypothesis, IsEnd
from tests.generation.toy import ENDS, PROMPTS, History, Toy, ends_with


@dataclass(frozen=True)
class Problem:
    """A model, the options of a beam search, the end of a text, and blocked ids."""

    model: Toy
    options: Options
    is_end: IsEnd
    blocked: frozenset[int]

    def search(self, prompts: Sequence[tuple[int, ...]] = PROMPTS) -> list[list[Hypothesis]]:
        start, step = self.model.start(prompts), self.model.step
        return beam_search(*start, step, self.options, is_end=self.is_end, blocked=self.blocked)

    def extensions(self, prompt: Sequence[int], ids: tuple[int, ...]) -> list[tuple[int, float]]:
        """The tokens that may follow, with their log-probabilities."""
        log_probs = enumerate(self.model.predict((*prompt, *ids)).tolist())
        return [(token, log_prob) for token, log_prob in log_probs if token not in self.blocked]

    def hypothesis(self, prompt: Sequence[int], ids: tuple[int, ...]) -> Hypothesis:
        """What a search should return for a text, from the model's table."""
        log_probs = self.model.score_tokens(prompt, ids)
        return Hypothesis(ids, tuple(log_probs), sum(log_probs) / len(ids) ** self.options.length_penalty)

    def exhaustive(self, prompt: Sequence[int], ids: tuple[int, ...] = ()) -> list[Hypothesis]:
        """Every text that ends, best first."""
        if len(ids) == self.options.max_tokens or (ids and self.is_end(ids)):
            return [self.hypothesis(prompt, ids)]
        found = [end for token, _ in self.extensions(prompt, ids) for end in self.exhaustive(prompt, (*ids, token))]
        return sorted(found, key=lambda end: -end.score)

    def full_length(self, prompt: Sequence[int]) -> tuple[list[Hypothesis], int]:
        """Beam search by its definition, without early stopping; and the number of its steps."""
        live: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
        ended: list[tuple[int, ...]] = []
        steps = -1
        while live:
            steps += 1
            candidates = [
                (-(total + log_prob), rank, token)
                for rank, (ids, total) in enumerate(live)
                for token, log_prob in self.extensions(prompt, ids)
            ]
            texts = [
                ((*live[rank][0], token), -minus) for minus, rank, token in sorted(candidates)[: self.options.beams]
            ]
            over = [self.is_end(ids) or len(ids) == self.options.max_tokens for ids, _ in texts]
            ended += [ids for (ids, _), end in zip(texts, over, strict=True) if end]
            live = [text for text, end in zip(texts, over, strict=True) if not end]
        found = [self.hypothesis(prompt, ids) for ids in ended]
        return sorted(found, key=lambda end: -end.score)[: self.options.returned], steps


@st.composite
def problems(draw: st.DrawFn, limit: int = 6, vocabs: Sequence[int] = (2, 3, 4, 40)) -> Problem:
    model = Toy(draw(st.sampled_from(vocabs)), draw(st.integers(0, 10**6)), draw(st.sampled_from([0.3, 2.0, 6.0])))
    blocked = draw(st.sampled_from([frozenset[int](), frozenset[int](), frozenset({1})]))
    max_tokens, is_end = draw(st.integers(1, limit)), draw(st.sampled_from(ENDS))
    beams = draw(st.integers(1, 7))
    results, penalty = draw(st.integers(1, beams)), draw(st.sampled_from([-3.0, -1.0, 0, 0.6, 1, 2]))
    options = Options(max_tokens=max_tokens, beams=beams, results=results, length_penalty=penalty)
    return Problem(model, options, is_end, blocked)


thorough = settings(max_examples=200)


def assert_same(found: Sequence[Hypothesis], expected: Sequence[Hypothesis]) -> None:
    assert [(h.ids, h.token_log_probs) for h in found] == [(h.ids, h.token_log_probs) for h in expected]
    assert [h.score for h in found] == pytest.approx([h.score for h in expected], rel=1e-12, abs=1e-12)


@thorough
@given(problems())
def test_it_finds_what_a_search_to_full_length_finds(problem: Problem) -> None:
    expected = [problem.full_length(prompt) for prompt in PROMPTS]
    for found, (hypotheses, _) in zip(problem.search(), expected, strict=True):
        assert_same(found, hypotheses)
        assert len({h.ids for h in found}) == len(found)
    assert problem.model.steps <= max(steps for _, steps in expected)


@thorough
@given(problems(limit=4, vocabs=(2, 3, 4)), st.integers(1, 12))
def test_a_beam_as_wide_as_the_space_is_exhaustive(problem: Problem, results: int) -> None:
    width = max(12, problem.model.vocab**problem.options.max_tokens)
    options = replace(problem.options, beams=width, results=results)
    (found,) = replace(problem, options=options).search([(0, 1)])
    assert_same(found, problem.exhaustive((0, 1))[:results])


@pytest.mark.parametrize("probabilities", [[0.9, 0.06, 0.04], [0.5, 0.5, 0.0]])
def test_it_stops_as_soon_as_nothing_can_win(probabilities: list[float]) -> None:
    """One prediction is enough, however long the text might be; a longer text of equal score comes second."""
    no_step = Mock(side_effect=AssertionError("a needless step"))
    log_probs, options = torch.tensor([probabilities]).log(), Options(max_tokens=10_000, beams=3)
    ((found,),) = beam_search(log_probs, History([()]), no_step, options, is_end=ends_with(0))
    assert found.ids == (0,)


def test_the_rows_of_finished_prompts_are_dropped() -> None:
    """Two of three prompts end with their second tokens: from then on the model steps only for the third."""
    counts = []

    def step(state: History, tokens: Tensor) -> tuple[Tensor, History]:
        counts.append(len(tokens))
        table = torch.tensor([[0.1, 0.4, 0.5], [1.0, 0.0, 0.0]]).log()
        return table[[row[0] for row in state.rows]], state

    log_probs = torch.tensor([[0.1, 0.4, 0.5]]).log().repeat(3, 1)
    options = Options(max_tokens=4, beams=2, length_penalty=1.0)
    beam_search(log_probs, History([(0,), (1,), (1,)]), step, options, is_end=ends_with(0))
    assert counts == [6, 2, 2]


def test_texts_stay_in_their_rows() -> None:
    """Two texts overtake each other at every step: the second row is made once, and no row is copied again."""
    selected = []

    @dataclass
    class Recorded(History):
        def select(self, index: Tensor) -> "Recorded":
            selected.append(index.tolist())
            return Recorded([self.rows[i] for i in index.tolist()])

    def step(state: Recorded, tokens: Tensor) -> tuple[Tensor, Recorded]:
        rows = [(*row, token) for row, token in zip(state.rows, tokens.tolist(), strict=True)]
        likely = torch.tensor([-0.1 if len(row) % 2 == row[0] else -0.5 for row in rows])
        return torch.stack((likely, torch.full_like(likely, -9.0)), dim=1), Recorded(rows)

    options = Options(max_tokens=6, beams=2, results=2)
    (found,) = beam_search(torch.tensor([[-0.4, -0.5]]), Recorded([()]), step, options)
    assert sorted(h.ids[0] for h in found) == [0, 1]
    assert selected == [[0, 0]]


def test_a_longer_text_may_win_where_the_penalty_is_below_zero() -> None:
    first, later = torch.tensor([[0.1, 0.9]]).log(), torch.tensor([[0.9, 0.1]]).log()

    def step(state: History, tokens: Tensor) -> tuple[Tensor, History]:
        return later.repeat(len(tokens), 1), state

    options = Options(max_tokens=6, beams=2, length_penalty=-3.0)
    ((found,),) = beam_search(first, History([()]), step, options, is_end=ends_with(0))
    assert found.ids == (1, 0)  # 8 log 0.81 > log 0.1
