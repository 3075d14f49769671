"""The estimate on paper against what processes hold, send and need at their peak."""

import importlib.util
import json
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from lmtrain.config.schema import Config
from lmtrain.data.tokens import TokenStore
from lmtrain.model.language_model import LanguageModel
from lmtrain.system.process_group import ProcessGroup
from lmtrain.training import state
from lmtrain.training.costs import memory_estimate
from lmtrain.training.loop import train_step
from lmtrain.training.parallel import share_batch
from tests.children import Child
from tests.training.ranks import said, together
from tests.training.test_loop import change, run

pytestmark = pytest.mark.usefixtures("one_thread")

SCRIPT = Path(__file__).parent.parent.parent / "scripts" / "estimate.py"
SPEED = {"peak": 1e12, "share": 0.5, "bandwidth": 1e9}


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("estimate", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_state_and_bytes_sent_are_counted(
    tiny: Config, store: TokenStore, tmp_path: Path, script: Any, kind: str
) -> None:
    config = change(tiny, train__parallel=kind, model__layers=2, train__batch_size=8)
    size = 2

    def work(processes: ProcessGroup) -> None:
        training = state.prepare(share_batch(config, processes), store, print, processes)
        sent: list[int] = []
        real = torch.distributed.all_reduce

        def counted(tensor: Tensor, *rest: Any, **more: Any) -> Any:
            sent.append(tensor.nbytes if tensor.numel() > 1 else 0)
            return real(tensor, *rest, **more)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.distributed, "all_reduce", counted)
            train_step(training, 1e-3)
        moments = [value for entries in training.optimizer.state.values() for value in entries.values() if value.ndim]
        held = sum(local(value).nbytes for value in moments)
        (tmp_path / f"{processes.rank}.json").write_text(json.dumps({"held": held, "sent": sum(sent)}))

    assert together(size, work, tmp_path / "log") == [0, 0], said(tmp_path / "log", 0)
    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(size)]
    found = script.estimate(config, store.tokenizer.vocab_size, kind, size, **SPEED)
    memory = found["memory_bytes"]
    held = [rank["held"] for rank in told]
    assert sum(held) == pytest.approx(size * memory["optimizer"])
    assert max(held) == pytest.approx(memory["optimizer"], rel=0.02)  # shares of odd numbers of rows differ
    if kind == "ddp":
        assert [rank["sent"] * 2 * (size - 1) / size for rank in told] == [found["sent_bytes_per_step"]] * size


def local(tensor: Any) -> Tensor:
    own: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return own


LAYERS = {"model__layers": 8, "train__loss_chunk": 64}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"train__precision": "bf16"},
        {"train__loss_chunk": 64},
        {"train__micro_batch": 2},
        {"model__output": "adaptive"},
        {"model__copy": True},
        {"train__teacher": "run"},
        {"train__activation_checkpointing": True, **LAYERS},
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
    training = state.prepare(config, store, lambda message: None)
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


def test_bytes_and_times_by_hand(tiny: Config, script: Any) -> None:
    config = change(tiny, train__batch_size=16, train__micro_batch=2, train__ema=None)
    model = LanguageModel(config.model, 100)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    alone = script.estimate(config, 100, "ddp", 1, **SPEED)
    ddp = script.estimate(config, 100, "ddp", 4, **SPEED)
    fsdp = script.estimate(config, 100, "fsdp", 4, **SPEED)
    assert (alone["sent_bytes_per_step"], ddp["sent_bytes_per_step"]) == (0, 1.5 * 4 * parameters)
    # Two micro-batches, each gathered for two passes, and the gradients added up once, all in float32.
    assert fsdp["sent_bytes_per_step"] == 0.75 * 4 * parameters * (2 * 2 + 1)
    assert fsdp["memory_bytes"]["weights"] == ddp["memory_bytes"]["weights"] / 4 == parameters
    assert ddp["computing_seconds"] == pytest.approx(alone["computing_seconds"] / 4)
    assert alone["tokens_per_second"] == pytest.approx([16 * 16 / alone["computing_seconds"]] * 2)


def test_the_table_has_a_line_for_each(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    script.main(["--gpus", "1,2", "--vocab-size", "50", "model.dim=16", "model.heads=2", "model.layers=1"])
    out = capsys.readouterr().out
    assert "estimates" in out
    assert [" ".join(line.split()[:3]) for line in out.splitlines()[2:]] == ["1 x ddp", "2 x ddp", "2 x fsdp"]
