"""Word embeddings of a text against a loop over its words and a full singular value decomposition."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from torch import Tensor

from lmtrain.model import cooccurrence
from lmtrain.model.cooccurrence import SMOOTHING, WINDOW, cooccurrence_embedding, left_singular_vectors


def _ids(length: int, vocab_size: int) -> np.ndarray:
    """A text whose words depend on the word before."""
    random = np.random.default_rng(0)
    ids = [0]
    for _ in range(length - 1):
        ids.append((2 * ids[-1] + int(random.integers(3))) % vocab_size)
    return np.array(ids, np.uint16)


def _plain(ids: np.ndarray, vocab_size: int, context_types: int, width: int) -> Tensor:
    """Cosines between the vectors of words, (V, V)."""
    counts: Counter[tuple[int, tuple[int, str]]] = Counter()
    for place, word in enumerate(ids.tolist()):
        for distance in range(1, WINDOW + 1):
            for other, side in ((place - distance, "before"), (place + distance, "after")):
                if 0 <= other < len(ids) and ids[other] < context_types:
                    counts[word, (int(ids[other]), side)] += 1 / distance  # type: ignore[assignment]
    words: Counter[int] = Counter()
    contexts: Counter[tuple[int, str]] = Counter()
    for (word, context), count in counts.items():
        words[word] += count
        contexts[context] += count
    total = sum(count**SMOOTHING for count in contexts.values())
    columns = {context: column for column, context in enumerate(contexts)}
    information = torch.zeros(vocab_size, len(columns), dtype=torch.float64)
    for (word, context), count in counts.items():
        ratio = count * total / (words[word] * contexts[context] ** SMOOTHING)
        information[word, columns[context]] = max(0.0, math.log(ratio))
    left, singular, _ = torch.linalg.svd(information, full_matrices=False)
    vectors = torch.nn.functional.normalize((left * singular.sqrt())[:, :width], dim=1)
    return vectors @ vectors.T


@pytest.mark.parametrize(("context_types", "width"), [(30, 32), (11, 32), (30, 14)])
def test_vectors_are_the_factors_of_the_positive_pointwise_information(
    context_types: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cooccurrence, "CONTEXT_TYPES", context_types)
    ids = _ids(400, 30)
    torch.manual_seed(1)
    vectors = cooccurrence_embedding(ids, 30, width)
    assert vectors.shape == (30, width)
    assert vectors.dtype == torch.float32
    cosines = (vectors @ vectors.T / width).double()
    torch.testing.assert_close(cosines, _plain(ids, 30, context_types, width), rtol=0, atol=1e-4)


def test_all_vectors_have_unit_mean_square_and_unknown_words_are_random() -> None:
    torch.manual_seed(1)
    vectors = cooccurrence_embedding(_ids(200, 20), 2000, 16)
    squares = vectors.square().mean(1)
    torch.testing.assert_close(squares[:20], torch.ones(20))
    assert squares[20:].mean() == pytest.approx(1, abs=0.05)
    assert vectors[20:].mean() == pytest.approx(0, abs=0.02)
    for text in ([], [3], [3, 3], [1, 2]):
        assert cooccurrence_embedding(np.array(text, np.uint16), 5, 8).isfinite().all()


@pytest.mark.parametrize("shape", [(300, 120), (120, 300), (60, 60)])
def test_the_factors_have_the_bits_of_torch_s_function(shape: tuple[int, int]) -> None:
    torch.manual_seed(1)
    matrix = torch.nn.functional.dropout(torch.rand(shape), 0.9).to_sparse()
    torch.manual_seed(2)
    left, singular, _ = torch.svd_lowrank(matrix, q=20)
    torch.manual_seed(2)
    found_left, found_singular = left_singular_vectors(matrix, 20)
    assert torch.equal(found_left, left)
    assert torch.equal(found_singular, singular)


def test_only_the_beginning_of_a_long_text_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = _ids(400, 30)
    torch.manual_seed(1)
    expected = cooccurrence_embedding(ids[:150], 30, 16)
    monkeypatch.setattr(cooccurrence, "TOKENS", 150)
    torch.manual_seed(1)
    assert torch.equal(cooccurrence_embedding(ids, 30, 16), expected)
