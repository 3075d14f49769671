"""The weights in the picture are those with which each word was chosen."""

import numpy as np
import pytest
import torch

from lmtrain.generation.attention import MOST_COLUMNS, MOST_WORDS, pool_weights
from tests.generation.test_complete import MANY, random_model

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(("mode", "kept"), [("causal", 3), ("windowed", 6)])
def test_each_row_is_the_pool_over_what_the_model_had_read(mode: str, kept: int) -> None:
    model = random_model(mode, MANY)
    ids = MANY.encode(" ".join(f"w{number}" for number in range(10, 25)))
    rows, columns, weights = pool_weights(model, MANY, "w1 w2", ids)
    assert rows == [f"w{number}" for number in range(10, 25)]
    assert columns == ["<eos>", "w1", "w2", *rows[:-1]]
    assert weights.shape == (2, 15, 17)
    everything = [MANY.eos_id, *MANY.encode("w1 w2"), *ids]
    read = everything[:3]
    for row, token in enumerate(ids):
        if len(read) > 6:
            read = read[-kept:]
        end = 3 + row
        expected = np.zeros((2, 17), np.float32)
        expected[:, end - len(read) : end] = model.pool_weights(torch.tensor([read])).numpy()
        np.testing.assert_allclose(weights[:, row], expected, atol=1e-6)
        read = [*read, token]
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-5)


def test_what_no_word_could_see_is_left_out() -> None:
    model = random_model("causal", MANY)
    prompt = " ".join(f"w{number}" for number in range(30))
    _, columns, _ = pool_weights(model, MANY, prompt, MANY.encode("w1"))
    assert columns == [f"w{number}" for number in range(24, 30)]


def test_a_long_text_is_cut_to_what_can_be_read() -> None:
    model = random_model("windowed", MANY, context=400)
    rows, columns, weights = pool_weights(model, MANY, "w1 " * 300, MANY.encode("w2 " * 60))
    assert (len(rows), len(columns)) == (MOST_WORDS, MOST_COLUMNS)
    assert weights.shape == (2, MOST_WORDS, MOST_COLUMNS)
