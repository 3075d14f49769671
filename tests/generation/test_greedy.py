"""Greedy search, and what it shares with sampling: rows of a batch, rows with nothing to say, who hears of a token."""

import itertools
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lmtrain.errors import LmtrainError
from lmtrain.generation.sampling import GREEDY, Sampling, sample
from lmtrain.generation.search import Hypothesis, Rules
from tests.generation.toy import ENDS, PROMPTS, History, Toy

pytestmark = pytest.mark.usefixtures("one_thread")
thorough = settings(deadline=None, max_examples=100, derandomize=True)
NARROW = [
    Sampling(top_k=1),
    Sampling(top_p=1e-9),
    Sampling(min_p=1.0),
    Sampling(temperature=1e-6),
    Sampling(0.0, 2, 0.5),
]
"""Settings that leave the likeliest token alone."""


@dataclass(frozen=True)
class Problem:
    """A model without ties, rules, and how much tokens that were there are disliked."""

    model: Toy
    rules: Rules
    penalty: float

    def search(self, prompts: list[tuple[int, ...]], sampling: Sampling = GREEDY) -> list[Hypothesis]:
        sampling = Sampling(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, self.penalty)
        return sample(*self.model.start(prompts), self.model.step, self.rules, sampling, prompts=prompts)

    def written_out(self, prompt: tuple[int, ...]) -> Hypothesis:
        ids: tuple[int, ...] = ()
        numbers: list[float] = []
        over = False
        while len(ids) < self.rules.max_tokens and not over:
            row = self.model.predict((*prompt, *ids)).tolist()
            scores = {token: self.score(row[token], token, (*prompt, *ids)) for token in self.left(prompt, ids)}
            if not scores:
                break
            ids += (max(scores, key=lambda token: scores[token]),)
            numbers.append(row[ids[-1]])
            over = len(ids) >= self.rules.min_tokens and (
                ids[-1] in self.rules.end_ids or (self.rules.is_end is not None and self.rules.is_end(ids))
            )
        return Hypothesis(ids, tuple(numbers), sum(numbers), over)

    def score(self, log_prob: float, token: int, before: tuple[int, ...]) -> float:
        score = log_prob + self.rules.bias.get(token, 0.0)
        if token not in before:
            return score
        return score / self.penalty if score > 0 else score * self.penalty

    def left(self, prompt: tuple[int, ...], ids: tuple[int, ...]) -> list[int]:
        early = len(ids) + 1 < self.rules.min_tokens
        refused = self.rules.banned | (self.rules.end_ids if early else set())
        n = self.rules.no_repeat
        pairs = [*itertools.pairwise((*prompt, *ids))] if n == 2 else [(token,) for token in (*prompt, *ids)]
        last = (*prompt, *ids)[-1:] if n == 2 else ()
        allowed = [token for token in range(self.model.vocab) if token not in refused]
        return [token for token in allowed if not n or (*last, token) not in pairs]


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    vocab, most = draw(st.integers(4, 6)), draw(st.integers(1, 7))
    end_ids, is_end = draw(st.sampled_from(ENDS))
    rules = Rules(
        most,
        draw(st.integers(0, most)),
        end_ids if len(end_ids) < vocab - 1 else frozenset({0}),
        is_end,
        draw(st.sampled_from([frozenset(), frozenset({3})])),
        draw(st.sampled_from([{}, {1: 5.0, 2: 4.5}])),
        draw(st.integers(0, 2)),
    )
    return Problem(Toy(vocab, draw(st.integers(0, 10**6))), rules, draw(st.sampled_from([1.0, 1.0, 1.4, 0.7])))


@thorough
@given(problems())
def test_greedy_takes_the_likeliest_allowed_token_until_the_end(problem: Problem) -> None:
    assert problem.search(PROMPTS) == [problem.written_out(prompt) for prompt in PROMPTS]


@thorough
@given(problems())
def test_a_batch_equals_its_rows_alone_and_takes_no_needless_step(problem: Problem) -> None:
    together = problem.search(PROMPTS)
    needed = [len(h.ids) - (h.finished or len(h.ids) == problem.rules.max_tokens) for h in together]
    assert problem.model.steps == max(needed)
    assert together == [problem.search([prompt])[0] for prompt in PROMPTS]


@thorough
@given(problems(), st.sampled_from(NARROW))
def test_what_leaves_one_token_is_greedy(problem: Problem, sampling: Sampling) -> None:
    assert problem.search(PROMPTS, sampling) == problem.search(PROMPTS)


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(), Sampling(0.8, 3, 0.9, 0.01, 1.2)])
def test_a_row_with_nothing_left_to_say_ends_there_and_the_others_go_on(sampling: Sampling) -> None:
    """No word twice, prompt included: what is left of five words is all that can be said."""
    model, prompts = Toy(5, 1), [(0, 1, 2), (), (4, 3, 2, 1, 0), (2,)]
    found = sample(*model.start(prompts), model.step, Rules(9, no_repeat=1), sampling, prompts=prompts)
    for prompt, text in zip(prompts, found, strict=True):
        assert sorted((*prompt, *text.ids)) == [0, 1, 2, 3, 4]
        assert text.token_log_probs == tuple(model.score_tokens(prompt, text.ids))
        assert not text.finished


@pytest.mark.parametrize("sampling", [GREEDY, Sampling()])
def test_every_token_is_heard_of_in_order(sampling: Sampling) -> None:
    heard: list[tuple[int, int]] = []
    model = Toy(4, 2)
    rules = Rules(9, end_ids=frozenset({0}))
    found = sample(
        *model.start(PROMPTS), model.step, rules, sampling, watch=lambda row, token: heard.append((row, token))
    )
    assert len({len(text.ids) for text in found}) > 1
    places = range(max(len(text.ids) for text in found))
    assert heard == [(row, text.ids[t]) for t in places for row, text in enumerate(found) if t < len(text.ids)]


def test_ties_go_to_the_lowest_id() -> None:
    def step(state: History, tokens: Tensor) -> tuple[Tensor, History]:
        return torch.full((len(tokens), 40), 1 / 40).log(), state

    (found,) = sample(*step(History([()]), torch.zeros(1)), step, Rules(3, banned=frozenset({0})))
    assert found.ids == (1, 1, 1)


def test_one_word_is_a_vocabulary() -> None:
    for sampling in [*NARROW, GREEDY, Sampling(2.0, 5, 0.5, 0.5, 3.0)]:
        model = Toy(1, 0)
        (found,) = sample(*model.start([(0,)]), model.step, Rules(3), sampling, prompts=[(0,)])
        assert found == Hypothesis((0, 0, 0), (0.0, 0.0, 0.0), 0.0, False)


def test_no_rows_and_rows_without_prompts_or_names() -> None:
    model = Toy(3, 0)
    assert sample(torch.empty(0, 3), History([]), model.step, Rules(3)) == []
    with pytest.raises(ValueError, match="2 rows"):
        sample(*model.start([(), ()]), model.step, Rules(3), prompts=[()])
    with pytest.raises(ValueError, match="2 rows"):
        sample(*model.start([(), ()]), model.step, Rules(3), streams=["a"])


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(), Sampling(top_k=2, top_p=0.5)])
def test_a_diverged_model_is_refused_in_a_sentence(sampling: Sampling) -> None:
    def step(state: History, tokens: Tensor) -> tuple[Tensor, History]:
        return torch.tensor([[0.0, torch.nan, -1.0]]).expand(len(tokens), 3), state

    log_probs, state = Toy(3, 0).start([(1,), (2,)])
    with pytest.raises(LmtrainError, match="not numbers"):
        sample(log_probs, state, step, Rules(3), sampling)


def test_the_toy_notices_states_that_are_not_reordered() -> None:
    """The tests above can fail: with a state that keeps its rows in place, the numbers no longer match the model."""
    model = Toy(4, seed=3)
    found = sample(*model.start(PROMPTS, broken=True), model.step, Rules(9, end_ids=frozenset({0, 1})))
    wrong = [list(h.token_log_probs) != model.score_tokens(p, h.ids) for p, h in zip(PROMPTS, found, strict=True)]
    assert any(wrong)
