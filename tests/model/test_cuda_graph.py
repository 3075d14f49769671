"""The step that a CUDA graph records, replayed by hand on a CPU, and the graph itself where there is a GPU."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lmtrain.model.cuda_graph import GraphedSteps, step_function
from lmtrain.model.decoding_state import DecodingState, capacity_for
from lmtrain.model.language_model import LanguageModel
from tests.model.models import PLAIN, VARIANTS, build, tokens

FIELDS = [*VARIANTS, *PLAIN]


def test_capacity_for() -> None:
    assert [capacity_for(tokens, 5000) for tokens in (1, 256, 257, 1024, 1025, 4096, 4097, 5000)] == [
        *(256, 256, 1024, 1024, 4096, 4096, 5000, 5000)
    ]
    assert capacity_for(3, 12) == 12


class ReplayedByHand(GraphedSteps):
    """Replays a step by computing it again in the memory that it was recorded in, as a graph would."""

    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        self.recorded = None
        self.recordings = 0

    def _record(self, state: DecodingState, tokens: Tensor) -> None:
        self.recordings += 1
        self.tokens = tokens.clone()
        memory = addresses(state)

        def replay() -> None:
            assert addresses(state) == memory, "a graph would use the old memory"
            self.log_probs = self.model.decode_step(state, self.tokens, state.capacity)

        self.graph: Any = SimpleNamespace(replay=replay)


def addresses(state: DecodingState) -> list[int]:
    parts = [state, *state._parts]
    return [value.data_ptr() for part in parts for value in vars(part).values() if isinstance(value, Tensor)]


def assert_same_texts(model: LanguageModel, steps: GraphedSteps, text: Tensor) -> None:
    """Both ways through a text over three contexts, with reorderings, and fewer rows towards the end."""
    valid = torch.arange(5, device=text.device) >= torch.tensor([[0], [2], [4]], device=text.device)
    _, mine = model.start(text[:, :5], valid)
    expected, plain = model.start(text[:, :5], valid)
    found: Tensor = expected
    for t in range(5, text.shape[1]):
        if t % 7 == 3:
            order = torch.tensor([2, 0, 0] if t < 30 else [1, 0], device=text.device) % len(expected)
            mine, plain, text = mine.select(order), plain.select(order), text[order]
        found, mine = steps.step(mine, text[:, t])
        expected, plain = model.step(plain, text[:, t])
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("fields", FIELDS, ids=str)
def test_the_recorded_step_equals_the_plain_one(fields: dict[str, object]) -> None:
    model = build(**fields)
    steps = ReplayedByHand(model)
    assert_same_texts(model, steps, tokens(3, 45))
    assert steps.recordings == 2  # one for three rows, one for two


def test_a_step_is_recorded_again_when_the_capacity_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmtrain.model.decoding_state.SMALLEST_CAPACITY", 4)
    model = build(context=24)
    steps = ReplayedByHand(model)
    _, state = model.start(tokens(1, 2))
    for _ in range(24):
        _, state = steps.step(state, tokens(1))
    assert steps.recordings == 3  # capacities of 4, 16 and 24


def test_the_recorded_memory_is_referenced_and_another_state_is_recorded_again() -> None:
    model = build()
    steps = ReplayedByHand(model)
    _, state = model.start(tokens(2, 5))
    _, state = steps.step(state, tokens(2))
    assert isinstance(state, DecodingState)
    assert steps.recorded is state.tokens  # no later state can be given this address
    _, other = model.start(tokens(2, 5))
    steps.step(other, tokens(2))
    assert steps.recordings == 2


def test_a_windowed_model_and_a_cpu_use_the_plain_step() -> None:
    for model in (build(), build(mode="windowed")):
        assert step_function(model) == model.step


@pytest.mark.gpu
def test_a_windowed_model_uses_the_plain_step_on_a_gpu_too() -> None:
    model = build(mode="windowed").cuda()
    assert step_function(model) == model.step


@pytest.mark.gpu
@pytest.mark.parametrize("fields", FIELDS, ids=str)
def test_a_graph_equals_the_plain_step(fields: dict[str, object]) -> None:
    model = build(**fields).cuda()
    step = step_function(model)
    owner: Any = step.__self__  # type: ignore[attr-defined]
    assert isinstance(owner, GraphedSteps)
    assert_same_texts(model, owner, tokens(3, 45).cuda())
