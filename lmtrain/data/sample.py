"""The built-in sample corpus: an endless, seeded encyclopedia with a known entropy.

The articles are invented, in WikiText's format (Merity et al., 2016), and sampled from a probabilistic grammar
(`sample_grammar`). Its facts (names, places, years) are sampled once, where they first appear, and recalled later, so
that a model gains from remembering hundreds of tokens.

The probabilities are exact because nothing stays hidden: no two alternatives of a choice can begin with the same token,
so the tokens so far tell which ones were chosen, and every fact. The probability of the next token is then that of the
choices that lead to it, times that of one sample from a pool. An article's end is certain too, so articles are
independent and their probabilities multiply.
"""

import functools
import math
import random
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from lmtrain.data import sample_grammar, sample_words

LINE_END = "<eos>"
_SYMBOL = re.compile(r"[\[\]|]|[^\s\[\]|]+")


@dataclass(frozen=True)
class Draw:
    """A token sampled from a pool, and stored as the fact `name` if there is one.

    It is none of the facts that the article has from this pool, nor one of the last two tokens sampled from it.
    With a `base` the pool has numbers, any of them may be sampled, and the token is the fact `base` plus the number.
    """

    name: str
    pool: str
    base: str


@dataclass(frozen=True)
class Recall:
    """The fact `name` again."""

    name: str


class Choice:
    """One of several sequences of items, with probabilities in proportion to the weights."""

    def __init__(self, weights: Sequence[float], alternatives: Sequence[tuple["Item", ...]]) -> None:
        self.alternatives = alternatives
        total = math.fsum(weights)
        self.probabilities = [weight / total for weight in weights]
        self.cumulative = _cumulative(weights)


Item = str | Draw | Recall | Choice
"""A string is a token itself."""


def parse(text: str, rules: Mapping[str, str]) -> tuple[Item, ...]:
    """Read grammar text, in which everything that is not one of these is a literal token:

    `[a b|3* c|]` one of the alternatives, here of weight 1, 3 and 1 (the last is empty); `{pool}` any word of a pool;
    `{name:pool}` the same, stored as a fact; `{name:base+pool}` the sum of a fact and a number; `{=name}` the fact
    again; `$rule` the text of another rule; `/` the end of the line.
    """
    return _sequence(_SYMBOL.findall(text)[::-1], rules)


def _sequence(symbols: list[str], rules: Mapping[str, str]) -> tuple[Item, ...]:
    """Read up to the end, a `|` or a `]`, which stays in `symbols` (reversed, so that the next one is the last)."""
    items: list[Item] = []
    while symbols and symbols[-1] not in "|]":
        symbol = symbols.pop()
        if symbol == "[":
            weights, alternatives = [], []
            while symbol != "]":
                weighted = re.fullmatch(r"(\d+)\*", symbols[-1])
                weights.append(float(symbols.pop()[:-1]) if weighted else 1.0)
                alternatives.append(_sequence(symbols, rules))
                symbol = symbols.pop()
            items.append(Choice(weights, alternatives))
        elif symbol[0] == "$":
            items.extend(parse(rules[symbol[1:]], rules))
        elif symbol == "/":
            items.append(LINE_END)
        elif fact := re.fullmatch(r"\{=(\w+)\}", symbol):
            items.append(Recall(fact[1]))
        elif draw := re.fullmatch(r"\{(?:(\w+):)?(?:(\w+)\+)?(\w+)\}", symbol):
            items.append(Draw(draw[1] or "", draw[3], draw[2] or ""))
        else:
            items.append(symbol)
    return tuple(items)


class Pool:
    """Values with probabilities: proportional to 1 / (rank + 12) for words, as in natural text; uniform for numbers."""

    def __init__(self, values: str | range) -> None:
        self.values = tuple(values.split() if isinstance(values, str) else map(str, values))
        weights = [1 / (rank + 12) if isinstance(values, str) else 1.0 for rank in range(len(self.values))]
        total = math.fsum(weights)
        self.probability = {value: weight / total for value, weight in zip(self.values, weights, strict=True)}
        self.cumulative = _cumulative(weights)

    def draw(self, taken: set[str], uniform: Callable[[], float]) -> tuple[str, float]:
        """Sample a value that is not in `taken`; return it and its nats, given that."""
        while (value := self.values[bisect_right(self.cumulative, uniform())]) in taken:
            pass
        rest = math.log1p(-math.fsum(self.probability[other] for other in taken))
        return value, -math.log(self.probability[value]) + rest


def _cumulative(weights: Sequence[float]) -> list[float]:
    """The inner bounds of [0, 1) cut in proportion to the weights; `accumulate` rounds alike in all Python versions."""
    sums = list(accumulate(weights))
    return [partial / sums[-1] for partial in sums[:-1]]


class Grammar:
    """A grammar to sample from. No two alternatives of a choice may begin with the same token; an empty one begins with
    what follows the choice."""

    def __init__(self, text: str, rules: Mapping[str, str], pools: Mapping[str, str | range]) -> None:
        self.items = parse(text, rules)
        self.pools = {name: Pool(values) for name, values in pools.items()}

    def article(self, uniform: Callable[[], float], facts: dict[str, str] | None = None) -> Iterator[tuple[str, float]]:
        """Sample an article: its tokens, each with its exact -log p (nats) given the tokens before it.

        `uniform` returns numbers in [0, 1). `facts`, an empty dictionary if given, is filled with the article's facts
        by name, each by the time its token is yielded.
        """
        facts = {} if facts is None else facts
        pool_facts: dict[str, set[str]] = {}
        recent: dict[str, tuple[str, ...]] = {}
        ahead = [*reversed(self.items)]  # the next item is the last
        nats = 0.0
        while ahead:
            item = ahead.pop()
            if isinstance(item, Choice):
                index = bisect_right(item.cumulative, uniform())
                nats -= math.log(item.probabilities[index])
                ahead.extend(reversed(item.alternatives[index]))
                continue
            if isinstance(item, str):
                yield item, nats
            elif isinstance(item, Recall):
                yield facts[item.name], nats
            else:
                known, last = pool_facts.setdefault(item.pool, set()), recent.get(item.pool, ())
                taken = set() if item.base else known.union(last)
                value, its_nats = self.pools[item.pool].draw(taken, uniform)
                recent[item.pool] = (*last[-1:], value)
                if item.base:
                    value = str(int(facts[item.base]) + int(value))
                if item.name:
                    facts[item.name] = value
                    known.add(value)
                yield value, nats + its_nats
            nats = 0.0


@functools.cache
def encyclopedia() -> Grammar:
    """The grammar of the sample corpus."""
    return Grammar(sample_grammar.ARTICLE, sample_grammar.RULES, sample_words.POOLS)


class SampleSplit:
    """A split of the sample corpus: whole articles, of at least `tokens` tokens (words, and one end per line) together.

    The text depends only on `tokens` and `seed`; a longer text begins with the shorter one. Iterating gives its lines.
    Then `made` is the number of their tokens, and `nats` (-log p) is what these cost.
    """

    def __init__(self, tokens: int, seed: int) -> None:
        self._tokens = tokens
        self._seed = seed
        self.made, self.nats = 0, 0.0

    def __iter__(self) -> Iterator[tuple[str, bool]]:
        grammar = encyclopedia()
        uniform = random.Random(self._seed).random
        self.made, self.nats = 0, 0.0
        while self.made < self._tokens:
            words: list[str] = []
            starts_document = True
            for token, nats in grammar.article(uniform):
                self.made += 1
                self.nats += nats
                if token != LINE_END:
                    words.append(token)
                    continue
                yield " ".join(["", *words, ""]), starts_document
                words, starts_document = [], False

    def floor(self) -> dict[str, float | int]:
        """The generator's own cross-entropy, which no model can beat by more than sampling error; after all lines."""
        return {"word_perplexity": math.exp(self.nats / self.made), "nats": self.nats, "tokens": self.made}
