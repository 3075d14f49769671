"""Pointers and copying against loops, at the edges where a logarithm is -inf, and their gradients."""

import math

import pytest
import torch
from torch import Tensor

from lmtrain.nn.pointer import PointerAttention, copy_log_probs, copy_target_log_prob
from lmtrain.nn.prefix_mean import MASKED


def pointer_loop(layer: PointerAttention, query: Tensor, key: Tensor, mask: Tensor) -> Tensor:
    """Probabilities."""
    out = torch.zeros(*query.shape[:2], key.shape[1], dtype=torch.float64)
    asked, found = query @ layer.query.weight.T, key @ layer.key.weight.T
    for b, t in torch.cartesian_prod(torch.arange(query.shape[0]), torch.arange(query.shape[1])).tolist():
        keys = mask[b, t].nonzero().flatten().tolist()
        scores = [(asked[b, t] @ found[b, i]).item() / math.sqrt(asked.shape[-1]) for i in keys]
        for i, score in zip(keys, scores, strict=True):
            out[b, t, i] = math.exp(score) / sum(math.exp(other) for other in scores)
    return out


def test_pointer_attention_equals_loop() -> None:
    torch.manual_seed(0)
    layer = PointerAttention(5, 3, 4).double()
    query, key = torch.randn(2, 3, 5, dtype=torch.float64), torch.randn(2, 6, 3, dtype=torch.float64)
    mask = torch.rand(2, 3, 6) < 0.6
    torch.testing.assert_close(layer(query, key, mask=mask).exp(), pointer_loop(layer, query, key, mask))
    everything = torch.ones(2, 3, 6, dtype=torch.bool)
    torch.testing.assert_close(layer(query, key).exp(), pointer_loop(layer, query, key, everything))


def test_bf16_is_computed_in_float32() -> None:
    torch.manual_seed(0)
    layer, query, key = PointerAttention(4, 4, 4), torch.randn(2, 3, 4), torch.randn(2, 6, 4)
    with torch.autocast("cpu", torch.bfloat16):
        pointed = layer(query, key)
    torch.testing.assert_close(pointed.exp().sum(-1), torch.ones(2, 3))
    torch.testing.assert_close(pointed, layer(query, key), atol=0.03, rtol=0)
    log_vocab, log_pointer, tokens, gate = (x.bfloat16() if x.is_floating_point() else x for x in case())
    expected = copy_log_probs(log_vocab.float(), log_pointer.float(), tokens, gate.float())
    torch.testing.assert_close(copy_log_probs(log_vocab, log_pointer, tokens, gate), expected, atol=0, rtol=0)


def case(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """log_vocab (2, 3, 7), log_pointer (2, 3, 5), tokens (2, 5) with repetitions, and gate_logit (2, 3)."""
    torch.manual_seed(1)
    log_vocab = torch.randn(2, 3, 7, dtype=dtype).log_softmax(-1)
    scores = torch.randn(2, 3, 5, dtype=dtype)
    scores[0, :, 4] = MASKED
    tokens = torch.tensor([[1, 4, 1, 1, 6], [0, 2, 2, 5, 0]])
    return log_vocab, scores.log_softmax(-1), tokens, torch.randn(2, 3, dtype=dtype)


def copy_loop(log_vocab: Tensor, log_pointer: Tensor, tokens: Tensor, gate_logit: Tensor) -> Tensor:
    out = torch.zeros_like(log_vocab)
    for b, t in torch.cartesian_prod(torch.arange(out.shape[0]), torch.arange(out.shape[1])).tolist():
        pointer = log_pointer[b, t].exp().tolist()
        gate = 1 / (1 + math.exp(-gate_logit[b, t].item()))
        for word in range(out.shape[2]):
            copied = sum(share for share, token in zip(pointer, tokens[b].tolist(), strict=True) if token == word)
            out[b, t, word] = math.log((1 - gate) * math.exp(log_vocab[b, t, word]) + gate * copied)
    return out


@pytest.mark.parametrize("gradients", [True, False])
def test_copy_equals_loop_and_sums_to_one(gradients: bool) -> None:
    log_vocab, log_pointer, tokens, gate = case()
    with torch.set_grad_enabled(gradients):
        out = copy_log_probs(log_vocab, log_pointer, tokens, gate)
    torch.testing.assert_close(out, copy_loop(log_vocab, log_pointer, tokens, gate))
    torch.testing.assert_close(out.exp().sum(-1), torch.ones(2, 3, dtype=torch.float64))
    for word in range(7):
        targets = torch.full((2, 3), word)
        one = copy_target_log_prob(log_vocab[..., word], log_pointer, tokens, gate, targets)
        torch.testing.assert_close(one, out[..., word])


def test_the_log_probability_of_a_target_may_be_far_below_what_float32_holds() -> None:
    log_pointer = torch.tensor([[[0.0, -250.0, -251.0, -260.0]]])  # exp(-250) is zero in float32
    tokens, targets = torch.tensor([[0, 1, 1, 2]]), torch.tensor([[1]])
    for gate, expected in ((-200.0, -300.0), (200.0, -250.0 + math.log1p(math.exp(-1)))):
        found = copy_target_log_prob(torch.tensor([[-300.0]]), log_pointer, tokens, torch.tensor([[gate]]), targets)
        assert found.item() == pytest.approx(expected)


@pytest.mark.parametrize("gradients", [True, False])
def test_a_word_may_be_copied_with_a_very_small_probability(gradients: bool) -> None:
    log_pointer, tokens, gate = torch.tensor([[[0.0, -60.0]]]), torch.tensor([[0, 1]]), torch.tensor([[200.0]])
    with torch.set_grad_enabled(gradients):
        out = copy_log_probs(torch.full((1, 1, 3), -300.0), log_pointer, tokens, gate)
    torch.testing.assert_close(out, torch.tensor([[[0.0, -60.0, -500.0]]]))


@pytest.mark.parametrize("whole", [True, False])
def test_gradients_equal_finite_differences(whole: bool) -> None:
    log_vocab, log_pointer, tokens, gate = case()
    targets = torch.tensor([[1, 4, 3], [5, 0, 6]])  # 3 and 6 are nowhere in their rows
    finite = log_pointer.clamp_min(-50.0)  # from MASKED there is no difference

    def loss(vocab: Tensor, pointer: Tensor, gate: Tensor) -> Tensor:
        if whole:
            return copy_log_probs(vocab, pointer, tokens, gate)
        one = vocab.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        return copy_target_log_prob(one, pointer, tokens, gate, targets)

    inputs = [x.clone().requires_grad_() for x in (log_vocab, finite, gate)]
    assert torch.autograd.gradcheck(loss, inputs)


@pytest.mark.parametrize("whole", [True, False])
def test_gradients_are_finite_where_something_is_impossible(whole: bool) -> None:
    log_vocab, log_pointer, tokens, gate = case(torch.float32)
    log_pointer[1, 1] = torch.tensor([0.0, -90.0, -95.0, -100.0, -200.0])  # the smallest numbers of float32, and zero
    gate[1, 0] = -torch.inf  # nothing is copied
    targets = torch.tensor([[0, 4, 6], [5, 2, 6]])  # 0 and 6 are nowhere to be copied; the 6 of row 0 is masked
    vocab, pointer, logit = (x.clone().requires_grad_() for x in (log_vocab, log_pointer, gate))
    if whole:
        out = copy_log_probs(vocab, pointer, tokens, logit).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    else:
        one = vocab.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        out = copy_target_log_prob(one, pointer, tokens, logit, targets)
    torch.testing.assert_close(out[1, 0], log_vocab[1, 0, 5])
    with torch.autograd.set_detect_anomaly(True):  # fails on a NaN on the way, too
        gradients = torch.autograd.grad((out * torch.randn(2, 3)).sum(), [vocab, pointer, logit])
    assert all(gradient.isfinite().all() and gradient.any() for gradient in gradients)
    assert not gradients[1][1, 0].any()
    assert not gradients[2][1, 0].any()
