"""The sample corpus: its format, its determinism, and its probabilities against sums over all derivations."""

import hashlib
import math
import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

import pytest

from lmtrain.data.sample import Choice, Draw, Grammar, Item, Recall, SampleSplit, encyclopedia

Facts = tuple[tuple[str, str], ...]
Drawn = tuple[tuple[str, tuple[str, ...]], ...]
State = tuple[tuple[Item, ...], Facts, Drawn, Drawn]
"""What is still to be emitted, the facts by name, and for each pool its facts and the last two values."""


def articles(count: int, seed: int) -> list[list[tuple[str, float]]]:
    uniform = random.Random(seed).random
    return [list(encyclopedia().article(uniform)) for _ in range(count)]


def draw_probabilities(draw: Draw, state: State, grammar: Grammar) -> dict[str, float]:
    """By the definition in `Draw`: without the facts and the last two values of the pool, rescaled."""
    _, facts, kept, recent = state
    probability = dict(grammar.pools[draw.pool].probability)
    if draw.base:
        return {str(int(dict(facts)[draw.base]) + int(value)): p for value, p in probability.items()}
    for value in {*dict(kept).get(draw.pool, ()), *dict(recent).get(draw.pool, ())}:
        del probability[value]
    return {value: p / sum(probability.values()) for value, p in probability.items()}


def after_draw(draw: Draw, value: str, state: State) -> State:
    items, facts, kept, recent = state
    bare = value if not draw.base else str(int(value) - int(dict(facts)[draw.base]))
    last = {**dict(recent), draw.pool: (*dict(recent).get(draw.pool, ())[-1:], bare)}
    if draw.name:
        facts = tuple(sorted({**dict(facts), draw.name: value}.items()))
        names = {**dict(kept), draw.pool: tuple(sorted({*dict(kept).get(draw.pool, ()), bare}))}
        kept = tuple(sorted(names.items()))
    return items[1:], facts, kept, tuple(sorted(last.items()))


def unfold(state: State, weight: float) -> Iterator[tuple[State, float]]:
    """All paths through the choices in front: states that emit a token next, or have nothing left."""
    items = state[0]
    if items and isinstance(items[0], Choice):
        for probability, way in zip(items[0].probabilities, items[0].alternatives, strict=True):
            yield from unfold(((*way, *items[1:]), *state[1:]), weight * probability)
    else:
        yield state, weight


def emissions(state: State, grammar: Grammar) -> Iterator[tuple[str, float, State]]:
    item, rest = state[0][0], (state[0][1:], *state[1:])
    if isinstance(item, str):
        yield item, 1.0, rest
    elif isinstance(item, Recall):
        yield dict(state[1])[item.name], 1.0, rest
    elif isinstance(item, Draw):
        for value, p in draw_probabilities(item, state, grammar).items():
            yield value, p, after_draw(item, value, state)


TINY_POOLS: Mapping[str, str | range] = {"name": "Ann Bea Cy", "hue": "red blue grey green", "gap": range(2)}
TINY = """[2* the {hue} [cat|3* dog] [|sat]|{main:hue} {hue} {hue} {hue}|
    {who:name} met {name} [in {year:gap} [, then {year+gap}|]|] [,|] {=who} ] [/|. /]"""


def derivations(state: State, weight: float, grammar: Grammar) -> Iterator[tuple[tuple[str, ...], float]]:
    for unfolded, p in unfold(state, weight):
        if not unfolded[0]:
            yield (), p
            continue
        for token, q, following in emissions(unfolded, grammar):
            for rest, total in derivations(following, p * q, grammar):
                yield (token, *rest), total


def test_sentence_probabilities_are_sums_over_derivations() -> None:
    grammar = Grammar(TINY, {}, TINY_POOLS)
    reference: dict[tuple[str, ...], float] = defaultdict(float)
    for sentence, probability in derivations((grammar.items, (), (), ()), 1.0, grammar):
        reference[sentence] += probability
    assert math.fsum(reference.values()) == pytest.approx(1.0, abs=1e-12)
    uniform = random.Random(0).random
    seen: Counter[tuple[str, ...]] = Counter()
    for _ in range(20_000):
        drawn = list(grammar.article(uniform))
        sentence = tuple(token for token, _ in drawn)
        seen[sentence] += 1
        assert math.exp(-math.fsum(nats for _, nats in drawn)) == pytest.approx(reference[sentence], rel=1e-9)
    assert set(seen) == set(reference)
    for sentence, probability in reference.items():
        spread = math.sqrt(20_000 * probability * (1 - probability))
        assert abs(seen[sentence] - 20_000 * probability) < 5 * spread + 1


def draws(items: Sequence[Item]) -> Iterator[Draw]:
    for item in items:
        if isinstance(item, Draw):
            yield item
        elif isinstance(item, Choice):
            yield from draws([inner for way in item.alternatives for inner in way])


def test_no_two_alternatives_begin_with_the_same_token() -> None:
    """Nor does a choice decide whether the article ends. So all probabilities are exact, as those of TINY are."""
    grammar = encyclopedia()
    words: dict[Item, set[str]] = defaultdict(set)
    for draw in draws(grammar.items):
        values = {"a number" if value.isdecimal() else value for value in grammar.pools[draw.pool].values}
        words[draw] = values
        words[Recall(draw.name)] |= values

    def check(items: Sequence[Item], after: set[str]) -> set[str]:
        """Return the tokens with which `items` can begin; `after` are those that can follow, "" the end."""
        for item in reversed(items):
            if isinstance(item, Choice):
                begins = [check(way, after) for way in item.alternatives]
                after = set().union(*begins)
                assert len(after) == sum(map(len, begins))
                assert "" not in after
            else:
                after = {item} if isinstance(item, str) else words[item]
        return after

    assert check(grammar.items, {""}) == {"="}


def test_an_article_tells_its_facts() -> None:
    grammar = Grammar(
        "{who:name} met {name} in {year:gap} , and {=who} [{dress:hue}|left] in {then:year+gap} /", {}, TINY_POOLS
    )
    for seed in range(20):
        facts: dict[str, str] = {}
        told = [token for token, _ in grammar.article(random.Random(seed).random, facts)]
        assert told == [token for token, _ in grammar.article(random.Random(seed).random)]
        dress = {} if told[8] == "left" else {"dress": told[8]}
        assert facts == {"who": told[0], "year": told[4], **dress, "then": told[10]}


def test_the_text_of_a_seed_never_changes() -> None:
    lines = list(SampleSplit(20_000, seed=7))
    assert lines == list(islice(SampleSplit(10**9, seed=7), len(lines)))
    assert (
        hashlib.sha256("\n".join(text for text, _ in lines).encode()).hexdigest()
        == "46b86a4cbcda127f93c5800e6e0892eb8b2bdd4af3e7b3edfcfbe6ba75a39534"
    )
    assert lines[0] == (" = Dunmarsh Bridge = ", True)
    assert lines != list(SampleSplit(20_000, seed=8))


def test_whole_articles_until_enough() -> None:
    assert list(SampleSplit(0, seed=0)) == []
    for wanted in (1, 500, 5_000):
        split = SampleSplit(wanted, seed=3)
        for _ in range(2):  # the counts start from zero each time
            lines = list(split)
        sizes = [len(text.split()) + 1 for text, _ in lines]
        last = max(number for number, (_, starts_document) in enumerate(lines) if starts_document)
        assert sum(sizes[:last]) < wanted <= sum(sizes) == split.made
        assert [text for text, _ in lines[-2:]] == [" ", " "]
        count = sum(starts_document for _, starts_document in lines)
        assert split.nats == pytest.approx(sum(nats for article in articles(count, seed=3) for _, nats in article))
