"""The weights in the picture are those with which each word was predicted."""

import numpy as np
import pytest
import torch

from lmtrain.generation.attention import MAX_COLUMNS, MAX_ROWS, pool_weights
from tests.generation.models import NUMBERED, random_model

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(("mode", "remaining"), [("causal", 3), ("windowed", 6)])
def test_each_row_is_the_pool_over_what_the_model_had_read(mode: str, remaining: int) -> None:
    model = random_model(mode, NUMBERED)
    ids = NUMBERED.encode(" ".join(f"w{number}" for number in range(10, 25)))
    rows, columns, weights = pool_weights(model, NUMBERED, "w1 w2", ids)
    assert rows == [f"w{number}" for number in range(10, 25)]
    assert columns == ["<eos>", "w1", "w2", *rows[:-1]]
    assert weights.shape == (2, 15, 17)
    everything = [NUMBERED.eos_id, *NUMBERED.encode("w1 w2"), *ids]
    read = everything[:3]
    for row, token in enumerate(ids):
        if len(read) > 6:
            read = read[-remaining:]
        end = 3 + row
        expected = np.zeros((2, 17), np.float32)
        expected[:, end - len(read) : end] = model.pool_weights(torch.tensor([read])).numpy()
        np.testing.assert_allclose(weights[:, row], expected, atol=1e-6)
        read = [*read, token]
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-5)


def test_tokens_that_none_could_attend_to_are_omitted() -> None:
    model = random_model("causal", NUMBERED)
    prompt = " ".join(f"w{number}" for number in range(30))
    _, columns, _ = pool_weights(model, NUMBERED, prompt, NUMBERED.encode("w1"))
    assert columns == [f"w{number}" for number in range(24, 30)]


def test_a_long_text_is_cut_to_a_readable_size() -> None:
    model = random_model("windowed", NUMBERED, context=400)
    rows, columns, weights = pool_weights(model, NUMBERED, "w1 " * 300, NUMBERED.encode("w2 " * 60))
    assert (len(rows), len(columns)) == (MAX_ROWS, MAX_COLUMNS)
    assert weights.shape == (2, MAX_ROWS, MAX_COLUMNS)
