"""Several corpora in one run: the shares, the windows, and what the store says."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmtrain.config import loader as config
from lmtrain.config.schema import Config, DataConfig, TokenizerConfig
from lmtrain.data.corpus import download, each
from lmtrain.data.order import Mixture, SampleOrder, sample_order
from lmtrain.data.prepare import prepare_store
from lmtrain.data.tokenizing import tokenize
from lmtrain.data.tokens import TokenStore
from lmtrain.errors import LmtrainError
from lmtrain.training.state import new_training
from tests.data.helpers import make_corpus, token_starts
from tests.helpers import TINY

WEIGHTS = st.lists(st.integers(1, 7), min_size=2, max_size=4)


def mix(tokens: list[int], weights: list[int], seed: int = 1) -> Mixture:
    order = sample_order(tokens, weights, 4, "causal", seed)
    assert isinstance(order, Mixture)
    return order


def corpus_of(order: Mixture, starts: np.ndarray) -> np.ndarray:
    return np.searchsorted(np.cumsum([own.tokens for own in order.orders]), starts, "right")


@given(WEIGHTS, st.integers(0, 10**12), st.integers(1, 5), st.integers(0, 99))
def test_shares_are_exact_in_every_round(weights: list[int], round_: int, rounds: int, seed: int) -> None:
    order, size = mix([60 + 9 * i for i in range(len(weights))], weights, seed), sum(weights)
    chosen = corpus_of(order, order.starts(round_ * size, rounds * size))
    assert np.bincount(chosen, minlength=len(weights)).tolist() == [rounds * weight for weight in weights]


@given(WEIGHTS)
def test_corpora_are_evenly_spread(weights: list[int]) -> None:
    """No corpus is ever a whole sample and a half away from its due share."""
    order = mix([60] * len(weights), weights)
    counts = np.array([np.cumsum(order.pattern == i) for i in range(len(weights))])
    due = np.outer(weights, np.arange(1, sum(weights) + 1)) / sum(weights)
    assert np.abs(counts - due).max() < len(weights) / 2 + 0.5


@settings(max_examples=50)
@given(WEIGHTS, st.integers(0, 99))
def test_each_corpus_takes_each_window_once_an_epoch(weights: list[int], seed: int) -> None:
    tokens = [50 + 13 * i for i in range(len(weights))]
    order = mix(tokens, weights, seed)
    starts = order.starts(0, 40 * sum(weights))
    chosen = corpus_of(order, starts)
    for i, own in enumerate(order.orders):
        mine, size = starts[chosen == i] - sum(tokens[:i]), own.per_epoch()
        assert mine.tolist() == own.starts(0, len(mine)).tolist()
        assert len(set(mine[:size].tolist())) == size
        assert mine.max() + own.context < tokens[i]


@settings(max_examples=50)
@given(WEIGHTS, st.integers(0, 300), st.lists(st.integers(0, 8), max_size=4))
def test_any_split_into_parts_gives_the_same_samples(weights: list[int], first: int, counts: list[int]) -> None:
    order = mix([50] * len(weights), weights)
    parts = [order.starts(first + sum(counts[:i]), count) for i, count in enumerate(counts)]
    assert [start for part in parts for start in part] == order.starts(first, sum(counts)).tolist()


def test_one_corpus_has_the_order_of_one() -> None:
    assert sample_order([50], [3], 4, "causal", 1) == SampleOrder(50, 4, "causal", 1)


def test_two_corpora_of_one_size_are_not_read_in_one_order() -> None:
    order = mix([4_000, 4_000], [1, 1])
    first, second = (own.starts(0, own.per_epoch()) for own in order.orders)
    assert first.tolist() != second.tolist()


def two(folder: Path, weights: tuple[int, int] = (3, 1)) -> TokenStore:
    one = make_corpus(folder / "one", {"train": [["a b c d"] * 9], "valid": [["a a"]], "test": [["b"]]})
    other = make_corpus(folder / "other", {"train": [["x y"] * 30, ["z"]], "valid": [["x x x"]]})
    kind = TokenizerConfig(kind="word")
    return tokenize([one, other], kind, folder, weights=weights, note=lambda _: None, progress=False)


def test_a_mixture_is_one_store_of_all_training_texts(tmp_path: Path) -> None:
    store = two(tmp_path)
    train = store.split("train")
    assert store.tokenizer.decode(train.ids[:].tolist()) == "a b c d\n" * 9 + "x y\n" * 30 + "z\n"
    assert (train.corpora, train.tokens, train.words) == ((45, 92), 137, 137)
    assert token_starts(store, "train") == [0, 45, 135]
    assert store.tokenizer.decode(store.split("valid").ids[:].tolist()) == "a a\n"
    assert store.splits == ("train", "valid", "test")


def test_weights_are_part_of_the_identity_of_the_data(tmp_path: Path) -> None:
    store, other = two(tmp_path), two(tmp_path, (1, 3))
    assert store.folder == other.folder
    assert store.sha256 != other.sha256
    assert two(tmp_path).sha256 == store.sha256


def settings_of(tmp_path: Path, weight: int) -> Config:
    sources = f"data.sources=[{{source: sample, weight: {weight}}}, {{source: {tmp_path / 'more.txt'}}}]"
    return config.load(None, [*TINY, sources, f"data.dir={tmp_path}"], {})


def test_a_configured_mixture_trains_with_its_weights(tmp_path: Path) -> None:
    (tmp_path / "more.txt").write_text("one two three\n" * 400)
    wanted = settings_of(tmp_path, 3)
    corpora = [download(data) for data in each(wanted.data)]
    store = tokenize(corpora, wanted.tokenizer, tmp_path, weights=[3, 1], note=lambda _: None, progress=False)
    training = new_training(wanted, store, lambda _: None)
    starts = training.samples.order.starts(0, 400)
    assert (starts >= store.split("train").corpora[0]).sum() == 100
    words = store.tokenizer.decode(
        training.samples.ids.windows(starts[starts >= store.split("train").corpora[0]], 8)[0].tolist()
    )
    assert set(words.split()) <= {"one", "two", "three"}


def test_two_columns_of_one_source_are_two_corpora(tmp_path: Path) -> None:
    rows = "".join(f'{{"question": "what is {number}", "answer": "a number"}}\n' for number in range(40))
    (tmp_path / "qa.jsonl").write_text(rows)
    names = [f"{{source: {tmp_path / 'qa.jsonl'}, text_column: {name}}}" for name in ("question", "answer")]
    wanted = config.load(None, [f"data.sources=[{', '.join(names)}]", f"data.dir={tmp_path}"], {})
    for _ in range(2):
        notes: list[str] = []
        store = prepare_store(wanted, note=notes.append, progress=False)
        assert store.split("train").corpora == (36 * 4, 36 * 3)
    assert notes == []


def test_contradictions_are_rejected() -> None:
    with pytest.raises(LmtrainError, match=r"data\.source=wikitext-2 and data\.sources contradict"):
        config.load(None, ["data.source=wikitext-2", "data.sources=[{source: a}]"], {})
    for wrong in ("[]", "[{source: a, weight: 0}]", "[{source: a, wait: 1}]", "[{source: 'http://a'}]", "[a]"):
        with pytest.raises(LmtrainError, match="data"):
            config.load(None, [f"data.sources={wrong}"], {})


def test_one_source_in_the_list_is_that_source(tmp_path: Path) -> None:
    listed = config.load(None, ["data.sources=[{source: sample, weight: 5}]", f"data.dir={tmp_path}"], {}).data
    assert each(listed) == [DataConfig(source="sample", dir=tmp_path)]
