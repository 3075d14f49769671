"""Operations against torch's counter over a real step, and the memory estimate against what a step allocates."""

from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from lmtrain.config.schema import Config
from lmtrain.data.tokens import TokenStore
from lmtrain.model.build import build_uninitialized
from lmtrain.model.language_model import LanguageModel
from lmtrain.training.costs import blank_batch, costs, memory_estimate, step_flops
from lmtrain.training.loop import train_step
from lmtrain.training.optimizers import make_optimizer
from lmtrain.training.schedule import sample_order
from tests.helpers import CPU, Child, choices
from tests.training.helpers import change, run, start

KINDS: dict[str, dict[str, object]] = {
    "causal": {},
    "windowed": {"model__mode": "windowed"},
    "long": {"model__context": 300, "model__layers": 3},
    "local, long": {"model__context": 300, "model__attention": ["local", "full"], "model__layers": 2},
    "linear": {"model__attention": "linear"},
    "compressed": {"model__attention": "compressed", "model__compression": 4},
    "linformer": {"model__attention": "linformer", "model__mode": "windowed", "model__projected_length": 5},
    "induced": {
        "model__attention": ["induced", "full"],
        "model__layers": 2,
        "model__mode": "windowed",
        "model__inducing_points": 3,
        "model__position": "learned",
    },
    "global in one layer": {"model__attention": ["full", "global"], "model__layers": 2},
    "copy": {"model__copy": True, "model__embed_dim": 8, "model__tie_embeddings": False},
    "copy, windowed": {"model__copy": True, "model__mode": "windowed"},
    "bf16": {"train__precision": "bf16"},
}
LAYERS = {"model__layers": 8, "train__loss_chunk": 64}


@pytest.mark.parametrize("kind", KINDS)
def test_operations_are_those_of_a_step(tiny: Config, store: TokenStore, kind: str) -> None:
    config = change(tiny, **KINDS[kind])
    state = start(config)
    with FlopCounterMode(display=False) as counter:
        train_step(state, 1e-3)
    assert step_flops(state.model, config, store) == counter.get_total_flops() > 0


@pytest.mark.parametrize(("mode", "width"), [("causal", None), ("windowed", 8)])
def test_an_adaptive_output_counts_by_the_shares_of_its_tails(
    tiny: Config, store: TokenStore, mode: str, width: int | None
) -> None:
    plain = change(tiny, model__mode=mode, model__embed_dim=width)
    config = change(plain, model__output="adaptive", model__output_cutoffs=[20, 60])
    size, ids = store.tokenizer.vocab_size, store.split("train").ids
    logits = 22 + 40 * np.mean((ids >= 20) & (ids < 60)) + (size - 60) * np.mean(ids >= 60)
    assert 22 < logits < 0.8 * size
    targets = 2 * (16 if mode == "causal" else 1)
    # The gradient of the bias is a product, too.
    saved = 2 * targets * (6 * (width or 16) * (size - logits) + 2 * (size - 22))
    expected = step_flops(build_uninitialized(plain.model, size), plain, store) - saved
    assert step_flops(start(config).model, config, store) == pytest.approx(expected)
    assert costs(config, store)["flops_per_step"] == pytest.approx(expected)
    assert costs(config, store)["memory_bytes"]["logits"] == 4 * targets * 22


@pytest.fixture(scope="module")
def sized(tiny: Config) -> Config:
    """Large enough for tensors to take more than what is around them."""
    sizes = {"model__dim": 64, "model__layers": 4, "model__context": 64, "train__batch_size": 8}
    return change(tiny, **sizes, train__micro_batch=8)


@pytest.fixture(scope="module")
def teacher(sized: Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teacher")
    run(change(sized, train__steps=1, train__eval_tokens=50, train__sample_tokens=1), folder / "run")
    return folder


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"train__precision": "bf16"},
        {"train__micro_batch": 2},
        {"model__output": "adaptive"},
        {"model__copy": True},
        {"train__teacher": ["run"]},
        {"train__teacher": ["run", "run"]},
        {"train__activation_checkpointing": True, **LAYERS, "train__precision": "bf16"},
        {"train__activation_checkpointing": True, **LAYERS, "train__teacher": ["run"]},
    ],
)
def test_the_peak_of_a_step_is_near_the_estimate(
    sized: Config, store: TokenStore, request: pytest.FixtureRequest, fields: dict[str, Any]
) -> None:
    of_teachers = 0.0
    if teachers := fields.get("train__teacher", []):
        folder = request.getfixturevalue("teacher")
        fields = {**fields, "train__teacher": [str(folder / name) for name in teachers]}
        of_teachers = len(teachers) * memory_estimate(sized, store.tokenizer.vocab_size, "fp32")["weights"]
    config = change(sized, **fields)
    state = start(config)
    # Elsewhere, for the profiler's library takes its settings once in a process, and other tests have theirs.
    child = Child(lambda say: say(str(most_allocated(lambda: train_step(state, 1e-3)))))
    peak = int(child.hear())
    assert child.end() == 0
    parts = memory_estimate(config, store.tokenizer.vocab_size, config.train.precision)
    assert parts["weights"] == 4 * sum(parameter.numel() for parameter in state.model.parameters())
    assert parts.get("teacher", 0) == of_teachers
    assert 0.8 < peak / (parts["gradients"] + parts["activations"] + parts["logits"]) < 1.05


def test_the_estimate_of_memory_is_always_the_same(tiny: Config) -> None:
    assert len({memory_estimate(tiny, 500, "fp32")["activations"] for _ in range(5)}) == 1


def most_allocated(work: Callable[[], object]) -> int:
    """The most bytes of tensors that existed at one time of those that `work` made, by the allocator's own account."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        work()
    assert profiler.profiler is not None
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes: list[int] = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(accumulate(changes))


@pytest.mark.parametrize("mode", choices("model.mode"))
def test_a_blank_batch_of_one_row_is_compiled_as_a_real_one(tiny: Config, store: TokenStore, mode: str) -> None:
    config = change(tiny, model__mode=mode)
    batch = sample_order(config, store).batch(store.split("train").ids, 0, 1)
    for blank, real in zip(blank_batch(config.model, 1, CPU), batch, strict=True):
        assert (blank.shape, blank.stride(), blank.dtype) == (real.shape, real.stride(), real.dtype)


@pytest.mark.parametrize("kind", choices("train.optimizer"))
def test_the_memory_of_the_optimizer_is_that_of_its_state(tiny: Config, kind: str) -> None:
    config = change(tiny, train__optimizer=kind)
    model = LanguageModel(config.model, 500)
    optimizer = make_optimizer(model, config.train)
    model(*blank_batch(config.model, config.train.micro_batch_size, CPU)).sum().backward()
    optimizer.step_unless(torch.tensor(False))
    kept = sum(4 * value.numel() for state in optimizer.state.values() for value in state.values() if value.ndim)
    assert memory_estimate(config, 500, "fp32")["optimizer"] == kept


@pytest.mark.parametrize(
    ("budget", "steps"),
    [
        ({"train__steps": 12}, 12),
        ({"train__steps": None, "train__epochs": 0.5}, 24),
        ({"train__steps": None, "train__max_minutes": 1}, None),
        ({"train__max_minutes": 1}, 12),
    ],
)
def test_a_dry_run_has_all_figures(tiny: Config, store: TokenStore, budget: dict[str, Any], steps: int | None) -> None:
    found = costs(change(tiny, **budget), store)
    assert (found["tokens_per_epoch"], found["tokens_per_step"]) == (store.split("train").tokens, 4 * 16)
    assert found["memory_bytes"]["total"] == sum(v for k, v in found["memory_bytes"].items() if k != "total")
    assert found.get("steps") == steps
    assert (found["device"], found["precision"]) == ("cpu", "fp32")
    assert found["device_memory_bytes"] > found["memory_bytes"]["total"]


def test_ema_weights_take_as_much_memory_as_the_weights(tiny: Config) -> None:
    found = [memory_estimate(change(tiny, train__ema=ema), 500, "fp32") for ema in (0.9, None)]
    assert [each["averaged weights"] for each in found] == [found[0]["weights"], 0]
