"""An ensemble against the mean of its members' probabilities, written out."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lmtrain.model.cuda_graph import step_function
from lmtrain.model.ensemble import Ensemble
from lmtrain.model.language_model import LanguageModel
from lmtrain.model.packing import PackedLinear, pack_for_decoding
from tests.model.models import build, targets_of, tokens


def members(mode: str) -> list[LanguageModel]:
    """Three models that differ in size and kind, far from uniform."""
    fields: list[dict[str, object]] = [{}, {"dim": 12, "layers": 1, "copy": True}, {"position": "alibi", "norm": "rms"}]
    found = [build(mode=mode, **extra) for extra in fields]
    with torch.no_grad():
        for model in found:
            for weight in model.parameters():
                weight.mul_(2)
    return found


@pytest.fixture(params=["causal", "windowed"])
def ensemble(request: pytest.FixtureRequest) -> Ensemble:
    return Ensemble(members(request.param)).eval()


def mean(log_probs: list[Tensor]) -> Tensor:
    """log of the mean of the probabilities, computed in float64."""
    return torch.stack([one.double().exp() for one in log_probs]).mean(0).log().float()


def test_predictions_are_the_mean_of_the_members_probabilities(ensemble: Ensemble) -> None:
    text = tokens(3, 12)
    log_probs = ensemble.predict(text)
    assert log_probs.dtype == torch.float32
    torch.testing.assert_close(log_probs, mean([member.predict(text) for member in ensemble.members]))
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(log_probs.shape[:-1]))


def test_scores_are_those_of_the_predictions(ensemble: Ensemble) -> None:
    text = tokens(3, 12)
    targets = targets_of(ensemble, text.flip(1))[:, -5:]
    nats, _ = ensemble.score(text, targets)
    expected = ensemble.predict(text)[:, -5:].gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(-nats, expected)


def test_the_temperature_is_that_of_every_member(ensemble: Ensemble) -> None:
    text = tokens(3, 12)
    targets = targets_of(ensemble, text)
    expected = mean([-member.score(text, targets, temperature=2.0)[0] for member in ensemble.members])
    torch.testing.assert_close(-ensemble.score(text, targets, temperature=2.0)[0], expected)


def test_the_cosine_of_two_states_is_the_mean_of_the_members_cosines(ensemble: Ensemble) -> None:
    text = tokens(2, 12)
    targets = targets_of(ensemble, text)
    one, other = ensemble.score(text, targets)[1]
    expected = torch.zeros(one.shape[:-1])
    for member in ensemble.members:
        first, second = member.score(text, targets)[1]
        expected += F.cosine_similarity(first, second, dim=-1) / len(ensemble.members)
    torch.testing.assert_close(F.cosine_similarity(one, other, dim=-1), expected)


def test_steps_equal_those_of_the_members_for_rows_that_are_reordered_and_dropped(ensemble: Ensemble) -> None:
    """Through three contexts, with rows of different lengths, by the step function of the device."""
    text, valid = tokens(3, 40), torch.arange(5) >= torch.tensor([[0], [2], [4]])
    take_step = step_function(ensemble)
    log_probs, state = ensemble.start(text[:, :5], valid)
    alone = [member.start(text[:, :5], valid) for member in ensemble.members]
    torch.testing.assert_close(log_probs, mean([found for found, _ in alone]))
    for t in range(5, 40):
        if t % 7 == 3:
            order = torch.tensor([2, 0, 0] if t < 30 else [1, 0]) % len(log_probs)
            text, state = text[order], state.select(order)
            alone = [(found, own.select(order)) for found, own in alone]
        log_probs, state = take_step(state, text[:, t])
        alone = [member.step(own, text[:, t]) for member, (_, own) in zip(ensemble.members, alone, strict=True)]
        torch.testing.assert_close(log_probs, mean([found for found, _ in alone]))


def test_packing_packs_every_member(ensemble: Ensemble) -> None:
    text = tokens(2, 12)
    alone = copy.deepcopy(ensemble.members)
    for member in alone:
        pack_for_decoding(member, "bf16")
    pack_for_decoding(ensemble, "bf16")
    expected = mean([member.predict(text) for member in alone])
    torch.testing.assert_close(ensemble.predict(text), expected)
    assert all(isinstance(member.output, PackedLinear) for member in ensemble.members)
