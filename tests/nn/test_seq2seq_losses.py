"""The losses of the encoder-decoder, and the attention weights that one of them reads, against loops."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lmtrain.nn.attention import padding_mask
from lmtrain.nn.scheduled_sampling import sample
from lmtrain.nn.seq2seq import Seq2Seq, guided_attention_loss, shift
from tests.nn.test_seq2seq import BEGIN, END, INPUTS, LENGTHS, SIZES, SOURCE, TARGET, TARGET_LENGTHS, VALID, make


def test_shift_puts_begin_before_and_end_behind() -> None:
    target = torch.tensor([[1, 2, 3], [4, 0, 0], [2, 2, 2]])
    inputs, labels, real = shift(target, torch.tensor([3, 1, 0]), SIZES)
    assert inputs.tolist() == [[BEGIN, 1, 2, 3], [BEGIN, 4, END, END], [BEGIN, END, END, END]]
    assert labels.tolist() == [[1, 2, 3, END], [4, END, END, END], [END] * 4]
    assert real.tolist() == [[True] * 4, [True, True, False, False], [True, False, False, False]]


def mean_loss(model: Seq2Seq, rows: list[list[int]]) -> float:
    """The mean over all labels, END included, when these are the decoder's inputs after BEGIN."""
    nats = []
    for b, length in enumerate(TARGET_LENGTHS):
        log_probs = model(SOURCE[b : b + 1, : LENGTHS[b]], torch.tensor([[BEGIN, *rows[b][:length]]]))[0]
        nats += [-log_probs[t, label].item() for t, label in enumerate([*TARGET[b, :length].tolist(), END])]
    return math.fsum(nats) / len(nats)


@pytest.mark.parametrize("copy", [False, True])
def test_loss_equals_a_loop(copy: bool) -> None:
    model = make(replace(SIZES, copy=copy))
    loss = model.loss(SOURCE, TARGET, VALID, torch.tensor(TARGET_LENGTHS))
    assert loss.item() == pytest.approx(mean_loss(model, TARGET.tolist()), abs=1e-5)
    assert torch.equal(loss, model.loss(SOURCE, TARGET, VALID, torch.tensor(TARGET_LENGTHS), sampling=0.0))
    first = model(SOURCE, INPUTS[:, :1], VALID)[:, 0, END]  # a target without words is its END
    torch.testing.assert_close(model.loss(SOURCE, TARGET[:, :0], VALID), -first.mean())
    whole = model.loss(SOURCE, TARGET, VALID)
    torch.testing.assert_close(whole, model.loss(SOURCE, TARGET, VALID, torch.tensor([4, 4, 4])))


def test_scheduled_sampling_reads_what_the_first_pass_predicted() -> None:
    """At probability one input t is what was sampled from the prediction at t - 1, and the labels stay true."""
    model = make()
    lengths = torch.tensor(TARGET_LENGTHS)
    torch.manual_seed(3)
    loss = model.loss(SOURCE, TARGET, VALID, lengths, sampling=1.0)
    torch.manual_seed(3)
    inputs, _, _ = shift(TARGET, lengths, SIZES)
    sampled = sample(model(SOURCE, inputs, VALID))
    rows = [[int(sampled[b, t - 1]) for t in range(1, 5)] for b in range(3)]
    assert loss.item() == pytest.approx(mean_loss(model, rows), abs=1e-5)
    assert abs(mean_loss(model, rows) - mean_loss(model, TARGET.tolist())) > 1e-3


def test_cross_weights_are_those_of_the_forward_pass() -> None:
    model = make()
    read: list[Tensor] = []
    for block in model.decoder.blocks:
        block.cross_attention.register_forward_pre_hook(
            lambda layer, inputs: read.append(layer.weights(*inputs, mask=padding_mask(VALID)))
        )
    model(SOURCE, INPUTS, VALID)
    expected = torch.stack(read)
    weights = model.cross_weights(SOURCE, INPUTS, VALID)
    torch.testing.assert_close(weights, expected)
    assert weights.requires_grad  # for a loss


def test_guided_attention_loss_equals_a_loop_and_prefers_the_diagonal() -> None:
    torch.manual_seed(0)
    weights = torch.rand(2, 3, 5, 4)
    total, count = 0.0, 0
    for b, (queries, keys) in enumerate(((5, 2), (3, 4))):
        for h, n, t in itertools.product(range(3), range(queries), range(keys)):
            off = n / queries - t / keys
            total += weights[b, h, n, t].item() * (1 - math.exp(-(off**2) / (2 * 0.3**2)))
            count += 1
    lengths = torch.tensor([5, 3]), torch.tensor([2, 4])
    loss = guided_attention_loss(weights, *lengths, width=0.3)
    assert loss.item() == pytest.approx(total / count, abs=1e-6)
    torch.testing.assert_close(guided_attention_loss(weights.expand(4, 2, 3, 5, 4), *lengths, width=0.3), loss)
    diagonal, six = torch.eye(6)[None, None], torch.tensor([6])
    assert guided_attention_loss(diagonal, six, six).item() == pytest.approx(0, abs=1e-7)
    assert guided_attention_loss(diagonal.flip(-1), six, six) > 0.1


@pytest.mark.parametrize(("queries", "keys"), [(0, 4), (3, 0), (0, 0)])
def test_guided_attention_leaves_empty_rows_out(queries: int, keys: int) -> None:
    weights = torch.rand(2, 1, 3, 4, requires_grad=True)
    targets, sources = torch.tensor([3, queries]), torch.tensor([4, keys])
    loss = guided_attention_loss(weights, targets, sources)
    torch.testing.assert_close(loss, guided_attention_loss(weights[:1], targets[:1], sources[:1]))
    (gradient,) = torch.autograd.grad(loss, weights)
    assert gradient[0].any()
    assert not gradient[1].any()
