"""Scheduled sampling: which inputs are replaced, and by what."""

import pytest
import torch

from lmtrain.nn.seq2seq import mix

GOLD = torch.arange(12).view(3, 4)
PREDICTED = GOLD + 101


def test_probability_zero_keeps_all_and_one_keeps_only_the_first() -> None:
    assert torch.equal(mix(GOLD, PREDICTED, 0.0), GOLD)
    assert mix(GOLD, PREDICTED, 1.0).tolist() == [[0, 101, 102, 103], [4, 105, 106, 107], [8, 109, 110, 111]]
    for probability in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match="between 0 and 1"):
            mix(GOLD, PREDICTED, probability)


def test_each_place_is_replaced_independently_at_the_rate() -> None:
    torch.manual_seed(0)
    gold = torch.zeros(200, 201, dtype=torch.long)
    for probability in (0.5, 0.1):
        replaced = mix(gold, gold + 1, probability)
        assert not replaced[:, 0].any()
        sampled = replaced[:, 1:].float()  # 40,000 places: a standard error of at most 0.0025
        assert sampled.mean().item() == pytest.approx(probability, abs=0.01)
        both = (sampled[:, 1:] * sampled[:, :-1]).mean().item()
        assert both == pytest.approx(probability**2, abs=0.01)
        assert (sampled[1:] * sampled[:-1]).mean().item() == pytest.approx(probability**2, abs=0.01)
