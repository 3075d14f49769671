"""What may be generated and when a text is over, against rules written out token by token."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmtrain.errors import LmtrainError
from lmtrain.generation.sampling import sample
from lmtrain.generation.search import IsEnd, Rules, repeats
from tests.generation.toy import ENDS, PROMPTS, History, Toy, second_pair

pytestmark = pytest.mark.usefixtures("one_thread")
thorough = settings(deadline=None, max_examples=200, derandomize=True)
VOCAB = 5
tokens = st.integers(0, VOCAB - 1)
texts = st.lists(tokens, max_size=30)


@dataclass(frozen=True)
class Question:
    """Rules, and rows of which the next token is to be chosen; the texts are equally long."""

    rules: Rules
    prompts: list[list[int]]
    texts: list[list[int]]

    def allowed(self, row: int, token: int) -> bool:
        """As the rules read."""
        text = [*self.texts[row], token]
        if token in self.rules.banned or (token in self.rules.end_ids and len(text) < self.rules.min_tokens):
            return False
        n = self.rules.no_repeat
        return n == 0 or not repeats_itself([*self.prompts[row], *text], n)


def ngrams(ids: Sequence[int], n: int) -> list[tuple[int, ...]]:
    return [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]


def repeats_itself(ids: Sequence[int], n: int) -> bool:
    """Whether the last n-gram is an earlier one again."""
    *earlier, last = ngrams(ids, n) or [()]
    return last in earlier


@st.composite
def questions(draw: st.DrawFn) -> Question:
    length, rows = draw(st.integers(0, 6)), draw(st.integers(1, 4))
    rules = Rules(
        max_tokens=9,
        min_tokens=draw(st.integers(0, 9)),
        end_ids=draw(st.frozensets(tokens, max_size=2)),
        banned=draw(st.frozensets(tokens, max_size=2)),
        bias=draw(st.dictionaries(tokens, st.sampled_from([-math.inf, -2.5, 0.75, 30.0]))),
        no_repeat=draw(st.integers(0, 4)),
    )
    prompts = draw(st.lists(texts, min_size=rows, max_size=rows))
    said = draw(st.lists(st.lists(tokens, min_size=length, max_size=length), min_size=rows, max_size=rows))
    return Question(rules, prompts, said)


@thorough
@given(questions(), st.integers(0, 1000))
def test_scores_are_what_the_rules_say(question: Question, seed: int) -> None:
    own = torch.randn(len(question.texts), VOCAB, generator=torch.Generator().manual_seed(seed)).log_softmax(-1)
    log_probs = own.clone()
    scores = question.rules.scores(log_probs, question.prompts, question.texts)
    for row, token in itertools.product(range(len(own)), range(VOCAB)):
        expected = float(own[row, token]) + question.rules.bias.get(token, 0.0)
        expected = expected if question.allowed(row, token) else -math.inf
        assert float(scores[row, token]) == pytest.approx(expected, abs=1e-5)
    assert bool(((log_probs == own) | (log_probs == -math.inf)).all())  # nothing else is written there


@thorough
@given(texts, st.integers(1, 6))
def test_repeats_are_the_tokens_after_earlier_equals(ids: list[int], n: int) -> None:
    assert repeats(ids, n) == {token for token in range(VOCAB) if repeats_itself([*ids, token], n)}


def test_repeats_of_short_texts_and_long_ngrams() -> None:
    assert repeats([], 1) == repeats([], 2) == repeats([3], 2) == repeats([3, 3], 4) == set()
    assert repeats([3], 1) == repeats([3, 3], 2) == repeats([3, 3, 3], 3) == {3}
    assert repeats([1, 2, 1, 3, 1], 2) == {2, 3}
    assert repeats([1, 2, 4, 1, 2, 5, 1, 2], 3) == {4, 5}


@thorough
@given(texts.filter(bool), st.sampled_from(ENDS), st.integers(0, 9))
def test_a_text_is_over_with_an_end_or_by_the_rule_but_not_too_early(
    text: list[int], end: tuple[frozenset[int], IsEnd | None], least: int
) -> None:
    end_ids, is_end = end
    asked = []

    def watched(ids: Sequence[int]) -> bool:
        asked.append(tuple(ids))
        return is_end is not None and is_end(ids)

    rules = Rules(max_tokens=9, min_tokens=least, end_ids=end_ids, is_end=watched)
    by_rule = is_end is not None and is_end(text)
    assert rules.over(text) == (len(text) >= least and (text[-1] in end_ids or by_rule))
    assert not asked or len(text) >= least


@thorough
@given(st.integers(0, 10**6), st.sampled_from(ENDS), st.integers(0, 6), st.integers(0, 3), st.integers(3, 8))
def test_searches_keep_the_rules(
    seed: int, end: tuple[frozenset[int], IsEnd | None], least: int, no_repeat: int, most: int
) -> None:
    end_ids, is_end = end
    model = Toy(VOCAB, seed)
    rules = Rules(most, min(least, most), end_ids, is_end, frozenset({3}), {2: 1.0}, no_repeat)
    for prompt, found in zip(PROMPTS, sample(*model.start(PROMPTS), model.step, rules, prompts=PROMPTS), strict=True):
        text = found.ids
        assert 3 not in text
        if no_repeat:
            made = ngrams([*prompt, *text], no_repeat)[len(ngrams(prompt, no_repeat)) :]
            assert len(set(made)) == len(made)
            assert not set(made) & set(ngrams(prompt, no_repeat))
        over = [rules.over(text[:i]) for i in range(1, len(text) + 1)]
        assert not any(over[:-1])
        assert found.finished == (bool(text) and over[-1])
        assert not set(text[: rules.min_tokens - 1]) & end_ids
        if not found.finished and len(text) < most:  # nothing was left to say
            here = Question(rules, [list(prompt)], [list(text)])
            assert not any(here.allowed(0, token) for token in range(VOCAB))


def test_a_bias_moves_the_choice_and_not_the_reported_numbers() -> None:
    log_probs = torch.tensor([[0.7, 0.2, 0.1]]).log()
    for bias, token in [(2.0, 2), (1.9, 0)]:  # e^1.9 * 0.1 < 0.7 < e^2 * 0.1
        (found,) = sample(log_probs.clone(), History([()]), Toy(3, 0).step, Rules(1, bias={2: bias}))
        assert found.ids == (token,)
        assert found.score == found.token_log_probs[0] == log_probs[0, token].item()


def test_banned_tokens_keep_their_share_of_the_probability() -> None:
    log_probs = torch.tensor([[0.7, 0.2, 0.1]]).log()
    for rules in [Rules(1, banned=frozenset({0})), Rules(1, bias={0: -math.inf}), Rules(2, 2, frozenset({0}))]:
        (found,) = sample(log_probs.clone(), History([()]), Toy(3, 0).step, rules)
        assert found.ids[0] == 1
        assert found.token_log_probs[0] == pytest.approx(math.log(0.2), rel=1e-6)


def test_a_text_of_min_tokens_may_end_with_its_last() -> None:
    log_probs = torch.tensor([[0.9, 0.1]]).log()

    def step(state: History, ids: torch.Tensor) -> tuple[torch.Tensor, History]:
        return log_probs.clone(), state

    lengths = []
    for least in range(5):
        (found,) = sample(log_probs.clone(), History([()]), step, Rules(9, least, frozenset({0})))
        assert found.finished
        lengths.append(len(found.ids))
    assert lengths == [1, 1, 2, 3, 4]


def test_the_rule_over_the_whole_text_waits_for_min_tokens() -> None:
    model = Toy(1, 0)
    (found,) = sample(*model.start([()]), model.step, Rules(9, 5, is_end=second_pair))
    assert found.ids == (0,) * 5
    assert found.finished


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"max_tokens": 2, "min_tokens": 3}, "min_tokens=3 must lie between 0 and max_tokens=2"),
        ({"max_tokens": 2, "min_tokens": -1}, "min_tokens=-1"),
        ({"max_tokens": 2, "no_repeat": -1}, "no_repeat=-1"),
        ({"max_tokens": 2, "bias": {4: math.nan}}, "bias=nan of token 4"),
        ({"max_tokens": 2, "bias": {4: math.inf}}, "bias=inf of token 4"),
    ],
)
def test_rules_that_nothing_can_meet_are_refused(rules: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Rules(**rules)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "rules", [Rules(2, banned=frozenset({0, 1, 2})), Rules(3, 2, frozenset({0, 1}), banned=frozenset({2}))]
)
def test_a_vocabulary_of_nothing_is_refused(rules: Rules) -> None:
    model = Toy(3, 0)
    with pytest.raises(ValueError, match="every token is banned"):
        sample(*model.start([(1,)]), model.step, rules)


def test_a_diverged_model_is_refused_in_a_sentence() -> None:
    for column in range(3):
        log_probs = torch.randn(4, 3).log_softmax(-1)
        log_probs[2, column] = math.nan
        log_probs[1, 0] = -math.inf
        with pytest.raises(LmtrainError, match="not numbers"):
            Rules(3).scores(log_probs, [()] * 4, [()] * 4)
