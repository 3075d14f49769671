"""The built-in sample corpus: an endless, seeded encyclopedia with a known entropy.

The articles are invented, in WikiText's format (Merity et al., 2016), and sampled from a probabilistic grammar
(`sample_grammar`). Its facts (names, places, years) are sampled once, where they first appear, and recalled later, so
that a model gains from remembering hundreds of tokens.

The probabilities are exact because nothing stays hidden. Alternatives of the grammar are merged into a graph in which
no two edges out of a node can emit the same token, as a weighted automaton is determinized (Mohri, 1997): the tokens
so far determine the node and every fact, and the probability of the next token is that of one edge times that of one
sample from a pool. An article's end is certain too, so articles are independent and their probabilities multiply.
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


@dataclass(frozen=True)
class Choice:
    """One of several weighted sequences; the weights need not sum to one."""

    alternatives: tuple[tuple[float, tuple["Item", ...]], ...]


Token = str | Draw | Recall
"""What gives one token; a string is the token itself."""
Item = Token | Choice


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
            alternatives = []
            while True:
                weighted = re.fullmatch(r"(\d+)\*", symbols[-1])
                weight = float(symbols.pop()[:-1]) if weighted else 1.0
                alternatives.append((weight, _sequence(symbols, rules)))
                if symbols.pop() == "]":
                    break
            items.append(Choice(tuple(alternatives)))
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


class Node:
    """A position in the article, with edges: the tokens that may follow, their probabilities, and the nodes after."""

    def __init__(self, targets: Mapping[Token, tuple[float, "Node"]]) -> None:
        self.edges = [(item, p, node) for item, (p, node) in targets.items()]
        self.cumulative = _cumulative([p for _, p, _ in self.edges])


def _before(items: Sequence[Item], node: Node) -> Node:
    """The node from which `items` lead to `node`."""
    for item in reversed(items):
        if isinstance(item, Choice):
            total = math.fsum(weight for weight, _ in item.alternatives)
            node = _merge([(weight / total, _before(way, node)) for weight, way in item.alternatives])
        else:
            node = Node({item: (1.0, node)})
    return node


def _merge(ways: list[tuple[float, Node]]) -> Node:
    """One node for several, each with its probability: edges of the same item are merged, recursively."""
    if all(node is ways[0][1] for _, node in ways):
        return ways[0][1]
    targets: dict[Token, list[tuple[float, Node]]] = {}
    for probability, node in ways:
        for item, p, target in node.edges:
            targets.setdefault(item, []).append((probability * p, target))
    merged = {}
    for item, after in targets.items():
        total = math.fsum(probability for probability, _ in after)
        merged[item] = (total, _merge([(probability / total, node) for probability, node in after]))
    return Node(merged)


class Grammar:
    """A grammar to sample from. Alternatives must not begin with the same token from different items."""

    def __init__(self, text: str, rules: Mapping[str, str], pools: Mapping[str, str | range]) -> None:
        self.items = parse(text, rules)
        self.pools = {name: Pool(values) for name, values in pools.items()}
        self.start = _before(self.items, Node({}))

    def article(self, uniform: Callable[[], float], facts: dict[str, str] | None = None) -> Iterator[tuple[str, float]]:
        """Sample an article: its tokens, each with its exact -log p (nats) given the tokens before it.

        `uniform` returns numbers in [0, 1). `facts`, an empty dictionary if given, is filled with the article's facts
        by name, each by the time its token is yielded.
        """
        facts = {} if facts is None else facts
        pool_facts: dict[str, set[str]] = {}
        recent: dict[str, tuple[str, ...]] = {}
        node = self.start
        while node.edges:
            index = bisect_right(node.cumulative, uniform()) if node.cumulative else 0
            item, probability, node = node.edges[index]
            nats = math.log(1 / probability)
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
