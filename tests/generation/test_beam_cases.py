"""Beam search on single cases, made by hand: when it stops, which of equals it takes, what it refuses."""

import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from lmtrain.errors import LmtrainError
from lmtrain.generation.beam import beam_search
from lmtrain.generation.search import Rules
from tests.generation.toy import History, Toy


def test_no_prompts_have_no_texts() -> None:
    assert beam_search(torch.empty(0, 3), History([]), Toy(3, 0).step, Rules(2), beams=2) == []


@pytest.mark.parametrize("probabilities", [[0.9, 0.06, 0.04], [0.5, 0.5, 0.0]])
def test_it_stops_as_soon_as_nothing_can_win(probabilities: list[float]) -> None:
    """One look at the model is enough, however long the text might be; a longer text of equal score comes second."""

    def no_step(state: History, tokens: Tensor) -> tuple[Tensor, History]:
        raise AssertionError("looked further than needed")

    rules = Rules(10_000, end_ids=frozenset({0}))
    ((found,),) = beam_search(torch.tensor([probabilities]).log(), History([()]), no_step, rules, beams=3)
    assert found.ids == (0,)
    assert found.finished


def test_the_rows_of_prompts_that_are_over_are_given_up() -> None:
    """Two of three prompts end with their second tokens: from then on the model is stepped for the third alone."""
    counts = []

    def step(state: History, tokens: Tensor) -> tuple[Tensor, History]:
        counts.append(len(tokens))
        table = torch.tensor([[0.1, 0.4, 0.5], [1.0, 0.0, 0.0]]).log()
        return table[[row[0] for row in state.rows]], state

    log_probs = torch.tensor([[0.1, 0.4, 0.5]]).log().repeat(3, 1)
    rules = Rules(4, end_ids=frozenset({0}))
    beam_search(log_probs, History([(0,), (1,), (1,)]), step, rules, beams=2, stopping="never")
    assert counts == [6, 2, 2]


def test_a_text_that_nothing_follows_is_not_a_finished_one() -> None:
    """ "first" goes on beyond it, to the first that is finished."""
    inf = torch.inf
    table = {(1,): [-inf, -inf, -inf], (2,): [-inf, -inf, -0.1], (2, 2): [-0.1, -inf, -inf]}

    def step(state: History, tokens: Tensor) -> tuple[Tensor, History]:
        rows = [(*row, token) for row, token in zip(state.rows, tokens.tolist(), strict=True)]
        return torch.tensor([table.get(row, table[1,]) for row in rows]), History(rows)

    rules = Rules(9, end_ids=frozenset({0}))
    log_probs = torch.tensor([[-inf, -5.0, -0.1]])
    (found,) = beam_search(log_probs.clone(), History([()]), step, rules, beams=2, stopping="first")
    assert [(h.ids, h.finished) for h in found] == [((2, 2, 0), True)]
    (found,) = beam_search(log_probs.clone(), History([()]), step, rules, beams=2, results=2, stopping="first")
    assert [(h.ids, h.finished) for h in found] == [((2, 2, 0), True), ((1,), False)]


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


def test_a_positive_bias_and_a_penalty_make_the_middle_best() -> None:
    """After (0,), (1,) has the sum 2 - log 2: over 20 squared it is nothing, over 2 squared it wins."""

    def step(state: History, tokens: Tensor) -> tuple[Tensor, History]:
        return torch.tensor([[0.5, 0.5]]).log().repeat(len(tokens), 1), state

    rules = Rules(20, end_ids=frozenset({0}), bias={0: 1.0, 1: 2.0})
    log_probs = torch.tensor([[0.5, 0.5]]).log()
    ((found,),) = beam_search(log_probs, History([()]), step, rules, beams=2, alpha=2.0)
    assert found.ids == (1, 0)
    assert found.score == pytest.approx((3 - 2 * math.log(2)) / 4, rel=1e-6)


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
