"""Token shift against a loop."""

import torch

from lmtrain.nn.token_shift import TokenShift


def test_every_position_reads_the_one_before() -> None:
    torch.manual_seed(0)
    shift, x, before = TokenShift(4), torch.randn(2, 5, 4), torch.randn(2, 1, 4)
    torch.testing.assert_close(shift(x)[:, 1:], x[:, 1:] + 0.5 * x[:, :-1])
    shift.gain.data.normal_()
    for first, found in ((torch.zeros(2, 1, 4), shift(x)), (before, shift(x, before))):
        for t in range(5):
            expected = x[:, t] + shift.gain * (first[:, 0] if t == 0 else x[:, t - 1])
            torch.testing.assert_close(found[:, t], expected)
