"""The memory estimate against what a step allocates at its peak."""

from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from torch.profiler import ProfilerActivity, profile

from lmtrain.config.schema import Config
from lmtrain.data.tokens import TokenStore
from lmtrain.training.costs import memory_estimate
from lmtrain.training.loop import train_step
from tests.helpers import Child
from tests.training.helpers import change, run, start

pytestmark = pytest.mark.usefixtures("one_thread")

LAYERS = {"model__layers": 8, "train__loss_chunk": 64}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"train__precision": "bf16"},
        {"train__micro_batch": 2},
        {"model__output": "adaptive"},
        {"model__copy": True},
        {"train__teacher": "run"},
        {"train__activation_checkpointing": True, **LAYERS, "train__precision": "bf16"},
        {"train__activation_checkpointing": True, **LAYERS, "train__teacher": "run"},
    ],
)
def test_the_peak_of_a_step_is_near_the_estimate(
    tiny: Config, store: TokenStore, tmp_path: Path, fields: dict[str, Any]
) -> None:
    sizes = {"model__dim": 64, "model__layers": 4, "model__context": 64, "train__batch_size": 8}
    config = change(tiny, **sizes, train__micro_batch=8, train__precision="fp32")
    if "train__teacher" in fields:
        run(change(config, train__steps=1), store, tmp_path / "run")
        fields = {**fields, "train__teacher": str(tmp_path / "run")}
    config = change(config, **fields)
    training = start(config, store)
    train_step(training, 1e-3)  # makes the optimizer's state, and leaves no gradients
    # Elsewhere, for the profiler's library takes its settings once in a process, and other tests have theirs.
    child = Child(lambda say: say(str(most_allocated(lambda: train_step(training, 1e-3)))))
    peak = int(child.hear())
    assert child.end() == 0
    parts = memory_estimate(config, store.tokenizer.vocab_size, config.train.precision)
    assert 0.8 < peak / (parts["gradients"] + parts["activations"] + parts["logits"]) < 1.05


def most_allocated(work: Callable[[], object]) -> int:
    """The most bytes of tensors that existed at one time of those that `work` made, by the allocator's own account."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    assert profiler.profiler is not None
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes: list[int] = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(accumulate(changes))
