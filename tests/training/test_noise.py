"""Noise on the inputs: how much, drawn from where, and what it leaves alone."""

import numpy as np
import pytest
import torch
from torch import Tensor

from lmtrain.config.schema import Config
from lmtrain.data.ids import Ids
from lmtrain.data.tokens import TokenStore
from lmtrain.training.compilation import Forward
from lmtrain.training.loop import train_step
from lmtrain.training.noise import noisy
from lmtrain.training.state import prepare
from tests.training.test_loop import change

Pairs = list[tuple[Tensor, Tensor]]

pytestmark = pytest.mark.usefixtures("one_thread")


def test_share_and_distribution() -> None:
    torch.manual_seed(1)
    ids = Ids([np.array([7] * 6, np.uint16), np.array([8] * 3 + [9], np.uint16)])
    inputs = torch.zeros(200, 500, dtype=torch.int64)
    result = noisy(inputs, ids, 0.2)
    counts = torch.bincount(result.flatten(), minlength=10)[[0, 7, 8, 9]] / result.numel()
    torch.testing.assert_close(counts, torch.tensor([0.8, 0.12, 0.06, 0.02]), atol=0.005, rtol=0)
    assert (inputs == 0).all()
    assert (result != 0).any(0).all()  # every column
    assert torch.equal(noisy(inputs, ids, 0.0), inputs)


def test_only_inputs_are_noisy(tiny: Config, store: TokenStore) -> None:
    """The step reads noise and is judged by the text; without noise it reads the text."""
    seen: dict[float, Pairs] = {}
    for share in (0.0, 0.5):
        training = prepare(change(tiny, train__token_noise=share), store, lambda message: None)
        plain, pairs = training.forward, seen.setdefault(share, [])

        def forward(inputs: Tensor, targets: Tensor, plain: Forward = plain, pairs: Pairs = pairs) -> Tensor:
            pairs.append((inputs, targets))
            return plain(inputs, targets)

        training.forward = forward
        train_step(training, 0.0)
    for (clean, targets), (noised, same) in zip(seen[0.0], seen[0.5], strict=True):
        assert torch.equal(targets, same)
        assert torch.equal(clean[:, 1:], targets[:, :-1])
        assert 0.3 < (clean != noised).float().mean() < 0.6
