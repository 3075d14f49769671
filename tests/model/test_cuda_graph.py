"""The step that a CUDA graph captures, replayed by hand on a CPU, and the graph itself where there is a GPU."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lmtrain.model import cuda_graph
from lmtrain.model.cuda_graph import GraphedSteps, step_function
from lmtrain.model.decoding_state import DecodingState
from lmtrain.model.language_model import LanguageModel
from lmtrain.model.packing import pack_for_decoding
from tests.model.models import PLAIN, VARIANTS, build, tokens

FIELDS = [*VARIANTS, *PLAIN]
PACKED = [("fp32", 1e-5), ("bf16", 0.02)]
"""Precisions of packed layers, and how far two orders of the same sums may be apart."""
Captures = list[set[tuple[int, ...]]]
"""For each capture, the memory in which the state was found."""


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> Captures:
    """The captures of a step that is computed, not replayed."""
    found: Captures = []
    decode_step = LanguageModel.decode_step

    def decode_in(model: LanguageModel, state: DecodingState, token_ids: Tensor, kv_len: int) -> Tensor:
        found[-1].add(addresses(state))
        return decode_step(model, state, token_ids, kv_len)

    class Computed:
        def __init__(self, function: Callable[[Tensor], tuple[Tensor, ...]]) -> None:
            self.function = function
            found.append(set())

        def __call__(self, token_ids: Tensor) -> tuple[Tensor, ...]:
            with monkeypatch.context() as patch:
                patch.setattr(LanguageModel, "decode_step", decode_in)
                return self.function(token_ids)

    monkeypatch.setattr(cuda_graph, "GraphedCallable", Computed)
    return found


def addresses(state: DecodingState) -> tuple[int, ...]:
    parts = [state, *state._parts]
    return tuple(value.data_ptr() for part in parts for value in vars(part).values() if isinstance(value, Tensor))


def assert_same_texts(model: LanguageModel, steps: GraphedSteps, text: Tensor, tolerance: float = 1e-5) -> None:
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
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("fields", FIELDS, ids=str)
def test_the_captured_step_equals_the_plain_one(fields: dict[str, object], captures: Captures) -> None:
    model = build(**fields)
    assert_same_texts(model, GraphedSteps(model), tokens(3, 45))
    assert [len(memory) for memory in captures] == [1, 1]  # one for three rows, one for two


def packed(precision: str, device: str) -> LanguageModel:
    """The layers of `generate`, with all that they join."""
    model = build(position="rotary", qk_norm=True, norm="rms", copy=True, token_shift=True).to(device)
    pack_for_decoding(model, precision)
    return model


@pytest.mark.usefixtures("captures")
@pytest.mark.parametrize(("precision", "tolerance"), PACKED)
def test_the_captured_step_of_packed_layers_equals_the_plain_one(precision: str, tolerance: float) -> None:
    model = packed(precision, "cpu")
    assert_same_texts(model, GraphedSteps(model), tokens(3, 45), tolerance)


def test_the_captured_memory_is_referenced_and_another_state_is_captured_again(captures: Captures) -> None:
    model = build()
    steps = GraphedSteps(model)
    _, state = model.start(tokens(2, 5))
    _, state = steps.step(state, tokens(2))
    assert isinstance(state, DecodingState)
    assert steps.captured is state.tokens  # no later state can be given this address
    _, other = model.start(tokens(2, 5))
    steps.step(other, tokens(2))
    assert len(captures) == 2


def test_a_capture_is_freed_with_its_steps(captures: Captures) -> None:
    """Not later, by the garbage collector, since it has memory of the GPU."""
    model = build()
    steps = GraphedSteps(model)
    _, state = model.start(tokens(2, 5))
    steps.step(state, tokens(2))
    replayed = weakref.ref(steps.replayed)
    del steps, state
    assert replayed() is None


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


@pytest.mark.gpu
@pytest.mark.parametrize(("precision", "tolerance"), PACKED)
def test_a_graph_of_packed_layers_equals_the_plain_step(precision: str, tolerance: float) -> None:
    model = packed(precision, "cuda")
    assert_same_texts(model, GraphedSteps(model), tokens(3, 45).cuda(), tolerance)
