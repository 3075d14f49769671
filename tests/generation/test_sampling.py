"""Sampling: samples against exact probabilities in plain floats, filters against their definition, seeds."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lmtrain.generation.options import Options
from lmtrain.generation.sampling import BRANCHES, LEVELS, SORTED_FIRST, filtered_probs, sample, sample_tokens
from lmtrain.generation.search import Hypothesis
from tests.generation.toy import History, Toy, ends_with

SAMPLES = 10_000
PROMPT = (2, 0)
Text = tuple[int, ...]
PLAIN = Options(temperature=1.0)
SETTINGS = {
    "plain": PLAIN,
    "cold": Options(temperature=0.7),
    "hot": Options(temperature=2.5),
    "top_k": Options(temperature=1.0, top_k=3),
    "top_p": Options(temperature=1.0, top_p=0.85),
    "penalty": Options(temperature=1.0, repetition_penalty=1.5),
    "reward": Options(temperature=1.0, repetition_penalty=0.6),
    "all": Options(temperature=1.3, top_k=5, top_p=0.93, repetition_penalty=1.4),
}


def exact(scores: Sequence[float], sampling: Options, held: Sequence[int] = ()) -> list[float]:
    """The distribution that `Options` describes, written out."""
    scores = [s * (sampling.repetition_penalty if i in held else 1) for i, s in enumerate(scores)]
    scores = [score / sampling.temperature for score in scores]
    if sampling.top_k:
        least = sorted(scores, reverse=True)[: sampling.top_k][-1]
        scores = [score if score >= least else -math.inf for score in scores]
    highest = max(scores)
    probs = normalized([math.exp(score - highest) for score in scores])
    if sampling.top_p < 1:
        reached = 0.0
        for least in sorted(probs, reverse=True):
            reached += least
            if reached >= sampling.top_p:
                break
        probs = normalized([p if p >= least else 0.0 for p in probs])
    return probs


def exact_texts(model: Toy, sampling: Options, length: int) -> dict[Text, float]:
    """The probability of every text of this length after PROMPT."""
    probs: dict[Text, float] = {(): 1.0}
    for _ in range(length):
        probs = {
            (*text, token): before * p
            for text, before in probs.items()
            for token, p in enumerate(exact(model.predict((*PROMPT, *text)).tolist(), sampling, (*PROMPT, *text)))
        }
    return probs


def sampled_texts(model: Toy, sampling: Options, length: int) -> Counter[Text]:
    """How often each text of this length follows PROMPT, of SAMPLES."""
    prompts = [PROMPT] * SAMPLES
    found = sample(*model.start(prompts), model.step, replace(sampling, max_tokens=length), prompts=prompts)
    return Counter(text.ids for text in found)


def normalized(weights: Sequence[float]) -> list[float]:
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def chi_square(counts: Counter[Text], probs: dict[Text, float]) -> tuple[float, int]:
    """Pearson's statistic and its degrees of freedom; infinite where something impossible was chosen."""
    total = sum(counts.values())
    if any(not probs.get(cell) for cell in counts):
        return math.inf, 0
    cells = [(counts[cell], total * p) for cell, p in probs.items() if p]
    assert min(expected for _, expected in cells) >= 5  # below, the statistic isn't chi-square distributed
    return math.fsum((count - expected) ** 2 / expected for count, expected in cells), len(cells) - 1


def critical(freedom: int) -> float:
    """The value that a chi-square variable stays below with probability 0.999 (Wilson & Hilferty, 1931)."""
    return freedom * (1 - 2 / (9 * freedom) + 3.0902 * math.sqrt(2 / (9 * freedom))) ** 3


def assert_fits(counts: Counter[Text], probs: dict[Text, float]) -> None:
    statistic, freedom = chi_square(counts, probs)
    assert statistic < critical(freedom)


def test_the_critical_values_are_those_of_the_tables() -> None:
    for freedom, value in [(2, 13.816), (4, 18.467), (6, 22.458), (10, 29.588), (20, 45.315), (50, 86.661)]:
        assert critical(freedom) == pytest.approx(value, rel=0.03)


@pytest.mark.parametrize("name", SETTINGS)
def test_samples_have_the_exact_probabilities(name: str) -> None:
    seven, five = Toy(7, 461, spread=1.5), Toy(5, 11, spread=0.8)
    assert_fits(sampled_texts(seven, SETTINGS[name], 1), exact_texts(seven, SETTINGS[name], 1))
    assert_fits(sampled_texts(five, SETTINGS[name], 2), exact_texts(five, SETTINGS[name], 2))


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("plain", {"temperature": 1.08}),
        ("cold", {"temperature": 0.76}),
        ("top_k", {"top_k": 4}),
        ("top_p", {"top_p": 0.9}),
        ("penalty", {"repetition_penalty": 1.6}),
        ("all", {"temperature": 1.5}),
    ],
)
def test_slightly_wrong_settings_would_be_detected(name: str, wrong: dict[str, Any]) -> None:
    model, right = Toy(7, 461, spread=1.5), SETTINGS[name]
    counts, probs = sampled_texts(model, right, 1), exact_texts(model, replace(right, **wrong), 1)
    statistic, freedom = chi_square(counts, probs)
    assert statistic > 2 * critical(freedom or 1)


def test_samples_from_a_large_vocabulary_have_the_exact_probabilities() -> None:
    """Three levels of sums, the last nodes of each padded: judged by the ids' first and last digits."""
    vocab, count = BRANCHES**2 + 1000, 4000
    log_probs = Toy(vocab, 2).predict(())
    numbers = torch.from_numpy(np.random.default_rng(3).random((count, LEVELS)))
    tokens = sample_tokens(log_probs.repeat(count, 1), PLAIN, numbers).tolist()
    probs = exact(log_probs.tolist(), PLAIN)
    for digits in ([token // 200 for token in range(vocab)], [token % 30 for token in range(vocab)]):
        expected: dict[Text, float] = {}
        for digit, p in zip(digits, probs, strict=True):
            expected[(digit,)] = expected.get((digit,), 0.0) + p
        assert_fits(Counter((digits[token],) for token in tokens), expected)


def test_the_extreme_numbers_give_nothing_impossible() -> None:
    scores = torch.full((2, 3 * BRANCHES), -math.inf)
    scores[:, [5, 9, BRANCHES + 7, 2 * BRANCHES + 8]] = torch.tensor([0.3, -90.0, 0.1, -0.2])
    lowest, highest = torch.zeros(2, LEVELS), torch.full((2, LEVELS), 1 - 2**-32, dtype=torch.float64)
    possible = {5, 9, BRANCHES + 7, 2 * BRANCHES + 8}
    assert {*sample_tokens(scores, PLAIN, lowest).tolist(), *sample_tokens(scores, PLAIN, highest).tolist()} <= possible
    assert sample_tokens(torch.zeros(2, 1), PLAIN, highest).tolist() == [0, 0]


samplings = st.builds(
    Options,
    temperature=st.sampled_from([1e-6, 0.5, 1.0, 3.0, 1e6]),
    top_k=st.integers(0, 12),
    top_p=st.sampled_from([1e-9, 0.2, 0.55, 0.9, 0.999, 1.0]),
)


@settings(max_examples=250)
@given(samplings, st.lists(st.integers(-12, 4), min_size=1, max_size=10), st.integers(0, 2), st.randoms())
def test_filters_equal_their_definition_ties_included(
    sampling: Options, levels: list[int], blocked: int, random: Any
) -> None:
    """Scores are multiples of 0.5, so that equals are frequent."""
    scores = [level / 2 for level in levels] + [-math.inf] * blocked
    random.shuffle(scores)
    expected = exact(scores, sampling)
    nearly = replace(sampling, top_p=min(1.0, sampling.top_p * (1 + 1e-5)))
    assume(expected == pytest.approx(exact(scores, nearly)))  # a threshold within rounding of a word: either is right
    found = filtered_probs(torch.tensor([scores, scores]), sampling).double()
    torch.testing.assert_close(
        found / found.sum(-1, keepdim=True), torch.tensor([expected] * 2, dtype=torch.float64), atol=1e-5, rtol=1e-4
    )


def test_top_p_is_a_share_of_what_top_k_leaves() -> None:
    probs = torch.tensor([[0.5, 0.3, 0.1, 0.06, 0.04]])
    kept = filtered_probs(probs.log(), Options(temperature=1.0, top_k=3, top_p=0.88))  # 0.8 of 0.9, not of 1
    torch.testing.assert_close(kept, torch.tensor([[0.5, 0.3, 0.0, 0.0, 0.0]]))


@pytest.mark.parametrize("top_p", [0.05, 0.6, 0.97])
def test_top_p_where_the_most_likely_tokens_are_not_enough(top_p: float) -> None:
    """Rows whose nucleus lies within and beyond the tokens that are sorted first, in one batch."""
    flat, peaked = Toy(3 * SORTED_FIRST, 0, spread=0.1).predict(()), Toy(3 * SORTED_FIRST, 1, spread=4.0).predict(())
    found = filtered_probs(torch.stack([flat, peaked, flat]), Options(temperature=1.0, top_p=top_p))
    for row, log_probs in zip(found, [flat, peaked, flat], strict=True):
        expected = torch.tensor(exact(log_probs.tolist(), Options(temperature=1.0, top_p=top_p)))
        assert abs(int((row > 0).sum()) - int((expected > 0).sum())) <= 1  # rounding may move the threshold by a word
        torch.testing.assert_close(row / row.sum(), expected, atol=2e-6, rtol=0)
    assert int((found[0] > 0).sum()) > SORTED_FIRST or top_p < 0.1


def sampled(model: Toy, prompts: Sequence[Text], seeds: Sequence[str]) -> list[Hypothesis]:
    start, options = model.start(prompts), replace(SETTINGS["all"], max_tokens=8)
    return sample(*start, model.step, options, is_end=ends_with(0), blocked={3}, seeds=seeds, prompts=prompts)


@given(
    st.integers(0, 10**6),
    st.lists(
        st.tuples(st.sampled_from([(), (1,), (2, 4), (1, 2, 1)]), st.sampled_from("abcd")), min_size=1, max_size=7
    ),
)
def test_a_row_depends_only_on_its_prompt_and_its_seed(seed: int, rows: list[tuple[Text, str]]) -> None:
    model = Toy(5, seed)
    together = sampled(model, [prompt for prompt, _ in rows], [name for _, name in rows])
    assert together == [sampled(model, [prompt], [name])[0] for prompt, name in rows]


def test_seeds_and_positions_are_independent_and_uniform() -> None:
    """Each of 16 equal tokens at each position, and each pair of them across seeds and 1 and 7 positions apart."""
    words, rows, length = 16, 400, 60
    flat = torch.full((rows, words), -math.log(words))
    options = replace(PLAIN, max_tokens=length)
    found = sample(flat.clone(), History([()] * rows), lambda state, _: (flat.clone(), state), options)
    chosen = np.array([text.ids for text in found])
    uniform: dict[Text, float] = {(a, b): words**-2 for a in range(words) for b in range(words)}
    for other in (
        np.roll(chosen, 1, axis=0),
        np.roll(chosen, 1, axis=1),
        np.roll(chosen, 7, axis=1),
        chosen[::-1, ::-1],
    ):
        assert_fits(Counter(zip(chosen.ravel().tolist(), other.ravel().tolist(), strict=True)), uniform)
    for position in range(0, length, 7):
        assert_fits(Counter((word,) for word in chosen[:, position].tolist()), {(a,): 1 / words for a in range(words)})


def test_the_levels_of_the_tree_are_independent() -> None:
    """All of one node's branches after each of another's: the branches of two levels, in sixteenths."""
    rows, one = 4000, replace(PLAIN, max_tokens=1)
    found = sample(torch.zeros(rows, BRANCHES**2), History([()] * rows), Toy(1, 0).step, one)
    chosen = [text.ids[0] for text in found]
    pairs: Counter[Text] = Counter(
        (token % BRANCHES * 16 // BRANCHES, token // BRANCHES * 16 // BRANCHES) for token in chosen
    )
    assert_fits(pairs, {(a, b): 1 / 256 for a in range(16) for b in range(16)})
