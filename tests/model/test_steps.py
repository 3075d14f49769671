"""The step that a CUDA graph records, replayed by hand on a CPU, and the graph itself where there is a GPU."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lmtrain.model.language_model import LanguageModel
from lmtrain.model.packing import pack
from lmtrain.model.state import CausalState, State, room_for
from lmtrain.model.steps import CapturedSteps, CompiledSteps
from lmtrain.model.steps import steps as quick_steps
from lmtrain.system.device import lacks_to_compile
from tests.model.test_language_model import POSITIONS, QUERIES, build, tokens
from tests.model.test_variants import VARIANTS

FIELDS = [*VARIANTS, *({"position": name} for name in POSITIONS), *({"pool_query": query} for query in QUERIES)]


def test_room_for() -> None:
    assert [room_for(tokens, 5000) for tokens in (1, 256, 257, 1024, 1025, 4096, 4097, 5000)] == [
        *(256, 256, 1024, 1024, 4096, 4096, 5000, 5000)
    ]
    assert room_for(3, 12) == 12


class Replayed(CapturedSteps):
    """Replays a step by doing it again, where a graph would: in the memory that it was recorded in."""

    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        self.recorded = None
        self.recordings = 0

    def _record(self, state: CausalState, tokens: Tensor) -> None:
        self.recordings += 1
        self.tokens = tokens.clone()
        memory = addresses(state)

        def replay() -> None:
            assert addresses(state) == memory, "a graph would go on in the old memory"
            self.log_probs = self.model.advance(state, self.tokens, state.room, level=False)

        self.graph: Any = SimpleNamespace(replay=replay)


def addresses(state: CausalState) -> list[int]:
    parts = [state, *state.caches, state.pool]
    return [value.data_ptr() for part in parts for value in vars(part).values() if isinstance(value, Tensor)]


def assert_same_texts(
    model: LanguageModel, steps: CapturedSteps | CompiledSteps, text: Tensor, tolerance: float = 1e-5
) -> None:
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
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=1e-5)


@pytest.mark.parametrize("fields", FIELDS, ids=str)
def test_the_recorded_step_equals_the_plain_one(fields: dict[str, object]) -> None:
    model = build(**fields)
    steps = Replayed(model)
    assert_same_texts(model, steps, tokens(3, 45))
    assert steps.recordings == 2  # one for three rows, one for two


def test_a_step_is_recorded_anew_as_its_room_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmtrain.model.state.LEAST_ROOM", 4)
    model = build(context=24)
    steps = Replayed(model)
    _, state = model.start(tokens(1, 2))
    for _ in range(24):
        _, state = steps.step(state, tokens(1))
    assert steps.recordings == 3  # room for 4, 16 and 24


def test_the_recorded_memory_is_held_and_another_state_is_recorded_anew() -> None:
    model = build()
    steps = Replayed(model)
    _, state = model.start(tokens(2, 5))
    _, state = steps.step(state, tokens(2))
    assert isinstance(state, CausalState)
    assert steps.recorded is state.tokens  # no later state can be given this address
    _, other = model.start(tokens(2, 5))
    steps.step(other, tokens(2))
    assert steps.recordings == 2


def test_windows_and_a_cpu_unless_asked_take_the_plain_step() -> None:
    model, windowed = build(), build(mode="windowed")
    assert quick_steps(model) == model.step
    assert quick_steps(windowed, compiled=True) == windowed.step


def test_compiled_steps_of_all_kinds_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler stands aside here, so that what is handed to it can be looked at."""
    monkeypatch.setattr("torch.compile", lambda function, **options: function)
    model, calls = build(), []
    steps = CompiledSteps(model)

    def counted(state: CausalState, tokens: Tensor, seen: int, *, level: bool) -> Tensor:
        calls.append((len(tokens), seen, level))
        return model.advance(state, tokens, seen, level=level)

    monkeypatch.setattr(steps, "advance", counted)
    assert_same_texts(model, steps, tokens(3, 45))
    assert {rows for rows, _, _ in calls} == {3, 2}
    assert {seen for _, seen, _ in calls} == {6, 7, 8, 9, 10, 11}  # no more than there are, and never the whole room
    assert not any(level for _, _, level in calls)


@pytest.fixture
def traced_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are traced and guarded as they are for the compiler, and then run as they are."""
    monkeypatch.setattr("torch.compile", partial(torch.compile, backend="eager"))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"attention": "linear"},
        {"output": "adaptive"},
        {"attention": "local+strided", "position": "alibi", "copy": True},
        {"attention": "compressed", "position": "learned", "pool_query": "position"},
    ],
    ids=str,
)
@pytest.mark.usefixtures("traced_alone")
def test_traced_steps_equal_plain_ones(fields: dict[str, object]) -> None:
    """Rows of one and of several lengths, one row and more, over three contexts."""
    model = build(layers=1, **fields)
    steps = CompiledSteps(model)
    with torch._dynamo.config.patch(recompile_limit=4):
        assert_same_texts(model, steps, tokens(3, 45))
        assert_follows(model, steps, tokens(1, 20), 1e-5)


@pytest.mark.skipif(lacks_to_compile(torch.device("cpu")) is not None, reason="nothing can be compiled here")
def test_compiled_steps_equal_plain_ones() -> None:
    model = build(layers=1, dim=16)
    pack(model, "int8", prepack=False)
    assert_same_texts(model, CompiledSteps(model), tokens(3, 45), 0.03)


def assert_follows(model: LanguageModel, steps: CompiledSteps, text: Tensor, tolerance: float) -> None:
    _, mine = model.start(text[:, :5])
    _, plain = model.start(text[:, :5])
    for t in range(5, text.shape[1]):
        found, mine = steps.step(mine, text[:, t])
        expected, plain = model.step(plain, text[:, t])
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=1e-5)


@pytest.mark.usefixtures("traced_alone")
def test_two_compiled_models_keep_apart() -> None:
    """What is compiled is looked up without a look at the modules."""
    text = tokens(1, 12)
    models = [build(layers=1, dim=16), build(layers=1, dim=16)]
    with torch.no_grad():
        models[1].embedding.weight.mul_(3)
    both = [CompiledSteps(model) for model in models]
    for _ in range(2):
        for model, steps in zip(models, both, strict=True):
            assert_follows(model, steps, text, 1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("fields", FIELDS, ids=str)
def test_a_graph_equals_the_plain_step(fields: dict[str, object]) -> None:
    model = build(**fields).cuda()
    step = quick_steps(model)
    owner: Any = step.__self__  # type: ignore[attr-defined]
    assert isinstance(owner, CapturedSteps)
    assert_same_texts(model, owner, tokens(3, 45).cuda())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_another_state_is_recorded_anew() -> None:
    model = build().cuda()
    step = quick_steps(model)
    for count in (2, 5):
        text = tokens(2, 9).cuda()
        _, mine = model.start(text[:, :count])
        _, plain = model.start(text[:, :count])
        after: State = mine
        for t in range(count, 9):
            found, after = step(after, text[:, t])
            expected, plain = model.step(plain, text[:, t])
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
