"""Several processes train like one: the same windows, the same gradients, the same checkpoints and scores."""

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lmtrain.config.schema import Config
from lmtrain.data.ids import Ids
from lmtrain.data.order import Mode, batch
from lmtrain.data.tokens import TokenStore
from lmtrain.errors import LmtrainError
from lmtrain.model.language_model import LanguageModel
from lmtrain.storage import checkpoint, run_checkpoints
from lmtrain.system.distributed import join_processes
from lmtrain.system.process_group import SINGLE_PROCESS, ProcessGroup
from lmtrain.training import loop
from lmtrain.training.loop import StepResult, fit, train_step
from lmtrain.training.parallel import choose_kind, share_batch
from lmtrain.training.state import Training, new_training
from tests.helpers import read
from tests.training.helpers import (
    change,
    cpu,
    gradients,
    last_hash,
    logged,
    run,
    silent,
    start,
    verified_steps,
    with_forward,
    without_dropout,
    worsen,
)
from tests.training.ranks import meeting_place, output, together, variables

pytestmark = pytest.mark.usefixtures("one_thread")

ROUNDING = 2e-5
"""Relative tolerance of losses and norms of a few steps where only the order of sums differs."""
SHORT: dict[str, Any] = {
    "train__steps": 5,
    "train__eval_steps": 3,
    "train__log_steps": 1,
    "eval__batch_size": 5,  # evaluations of three batches, which two or four processes don't share evenly
}
Work = Callable[[ProcessGroup], Any]


def distribute(size: int, work: Work, folder: Path) -> list[Any]:
    """What `work` returns in each of `size` processes; 0 = in this one only."""
    if size == 0:
        return [work(SINGLE_PROCESS)]

    def recorded(processes: ProcessGroup) -> None:
        (folder / f"{processes.rank}.json").write_text(json.dumps(work(processes)))

    assert together(size, recorded, folder) == [0] * size, [output(folder, rank) for rank in range(size)]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]


def train(
    config: Config, store: TokenStore, run_dir: Path, processes: ProcessGroup, stop: int | None = None
) -> dict[str, Any]:
    """Train, recording the windows of each micro-batch; only the last process gets a signal, in step `stop`."""
    windows: list[list[int]] = []
    taken = 0

    def recorded(ids: Ids, starts: np.ndarray, context: int, mode: Mode) -> tuple[Tensor, Tensor]:
        windows.append(starts.tolist())
        return batch(ids, starts, context, mode)

    def step(training: Training, lr: float) -> StepResult:
        nonlocal taken
        result = train_step(training, lr)
        taken += 1
        if taken == stop and processes.rank == processes.world_size - 1:
            signal.raise_signal(signal.SIGTERM)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "batch", recorded)
        patch.setattr(loop, "train_step", step)
        outcome = fit(config, store, run_dir, resume=True, note=print, quiet=True, processes=processes)
    nats = outcome.score.nats if outcome.score is not None else None
    return {
        "windows": windows,
        "status": outcome.status,
        "step": outcome.step,
        "best_step": outcome.best_step,
        "nats": nats,
    }


def assert_close_runs(one: Path, other: Path) -> None:
    for (kind, step, figures), (*place, others) in zip(logged(one), logged(other), strict=True):
        assert [kind, step] == place
        assert others == pytest.approx(figures, rel=ROUNDING), (kind, step)
    ours, theirs = (read(run_checkpoints.choose(folder, "last")) for folder in (one, other))
    assert ours.info["step"] == theirs.info["step"]
    for group, named in ours.tensors.items():
        checkpoint.check_fit(theirs.tensors[group], named)
        for name, tensor in named.items():
            assert torch.allclose(theirs.tensors[group][name], tensor, rtol=1e-5, atol=2e-6), f"{group} {name}"


def windows_by_step(found: list[dict[str, Any]], per_step: int) -> list[list[int]]:
    """The windows of each step, in the order of the processes; `per_step` micro-batches are a step."""
    steps = len(found[0]["windows"]) * len(found) // per_step
    each = per_step // len(found)
    return [
        [start for rank in found for micro in rank["windows"][step * each : (step + 1) * each] for start in micro]
        for step in range(steps)
    ]


def test_two_ddp_processes_give_the_same_bits_as_one(tiny: Config, store: TokenStore, tmp_path: Path) -> None:
    """Weights, metrics, windows and final score; from another run's weights, with a teacher, in a time budget."""
    run(tiny, store, tmp_path / "base")
    older = run_checkpoints.folders(tmp_path / "base")[0]
    assert older != run_checkpoints.best_folder(tmp_path / "base")
    plain = change(tiny, **SHORT, train__parallel="ddp")
    variants = {
        "plain": plain,
        "muon": change(plain, train__optimizer="muon", train__precision="bf16", train__activation_checkpointing=True),
        "others": change(
            plain, train__init_from=str(tmp_path / "base"), train__teacher=str(tmp_path / "base"), run__seed=2
        ),
    }
    assert plain.train.micro_batch == plain.train.batch_size // 2
    timed = change(plain, train__steps=None, train__max_minutes=0.05, train__eval_steps=1000)
    late = change(plain, train__steps=3, train__eval_steps=1)
    best_folder, save = run_checkpoints.best_folder, checkpoint.save

    def another_best(run_dir: Path) -> Path | None:
        """The base may be training still, and another process then sees another best checkpoint."""
        return older if run_dir == tmp_path / "base" else best_folder(run_dir)

    def slowly(*arguments: Any) -> Path:
        """The best checkpoint is still being written when the other process would look for it."""
        if arguments[1] == 2:
            time.sleep(1.5)
        return save(*arguments)

    def work(processes: ProcessGroup) -> dict[str, Any]:
        folder = tmp_path / str(processes.world_size)
        with pytest.MonkeyPatch.context() as patch:
            if not processes.is_main:
                patch.setattr(run_checkpoints, "best_folder", another_best)
            found = {name: train(config, store, folder / name, processes) for name, config in variants.items()}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("tests.training.test_distributed.train_step", worsen)
            patch.setattr(checkpoint, "save", slowly)
            found["late"] = train(late, store, folder / "late", processes)
        with pytest.MonkeyPatch.context() as patch:
            if not processes.is_main:
                real = time.monotonic
                patch.setattr(time, "monotonic", lambda: 2 * real())  # a clock that is wrong
            found["timed"] = train(timed, store, folder / "timed", processes)
        return found

    (single,) = distribute(0, work, tmp_path)
    two = distribute(2, work, tmp_path / "log")
    for name in variants:
        assert last_hash(tmp_path / "2" / name) == last_hash(tmp_path / "1" / name)
        assert logged(tmp_path / "2" / name) == logged(tmp_path / "1" / name)
        assert windows_by_step([rank[name] for rank in two], 2) == windows_by_step([single[name]], 2)
        assert [rank[name]["nats"] for rank in two] == [single[name]["nats"]] * 2
    assert [(rank["late"]["best_step"], rank["late"]["nats"]) for rank in two] == [(2, single["late"]["nats"])] * 2
    assert two[0]["timed"]["step"] == two[1]["timed"]["step"] > 0


def test_a_chain_of_process_counts_reads_the_same_windows(tiny: Config, store: TokenStore, tmp_path: Path) -> None:
    """Each part is stopped by a signal to one process."""
    config = change(tiny, **SHORT, train__micro_batch=1)
    single = windows_by_step([train(config, store, tmp_path / "single", SINGLE_PROCESS)], 4)
    windows: list[list[int]] = []
    for size, kind, stop in ((4, "fsdp", 1), (2, "ddp", 1), (0, "auto", 1), (2, "fsdp", None)):
        part = change(config, train__parallel=kind)

        def work(processes: ProcessGroup, part: Config = part, stop: int | None = stop) -> dict[str, Any]:
            return train(part, store, tmp_path / "chain", processes, stop)

        found = distribute(size, work, tmp_path / f"log-{size}-{kind}")
        ended = len(windows) + 1 if stop else SHORT["train__steps"]
        assert {(rank["step"], rank["status"]) for rank in found} == {(ended, "interrupted" if stop else "finished")}
        assert ended in verified_steps(tmp_path / "chain")
        windows += windows_by_step(found, 4)
    assert windows == single
    assert_close_runs(tmp_path / "single", tmp_path / "chain")
    assert logged(tmp_path / "chain") != logged(tmp_path / "single")  # else nothing was summed in another order


def test_a_sharded_run_equals_a_single_process(tiny: Config, store: TokenStore, tmp_path: Path) -> None:
    run(tiny, store, tmp_path / "base")
    fields: dict[str, Any] = {
        "train__precision": "bf16",
        "train__activation_checkpointing": True,
        "model__norm": "layer",
    }
    variants = {
        "checkpointing": change(tiny, **SHORT, **fields, train__parallel="fsdp"),
        "init_from": change(tiny, **SHORT, train__init_from=str(tmp_path / "base"), train__parallel="fsdp"),
    }

    def work(processes: ProcessGroup) -> None:
        for name, config in variants.items():
            train(config, store, tmp_path / str(processes.world_size) / name, processes)

    distribute(0, work, tmp_path)
    distribute(2, work, tmp_path / "log")
    for name in variants:
        assert_close_runs(tmp_path / "1" / name, tmp_path / "2" / name)


def test_gradients_are_those_of_the_sum_over_all_targets(tiny: Config, store: TokenStore, tmp_path: Path) -> None:
    config = change(without_dropout(tiny), train__batch_size=8, train__clip=None, train__parallel="ddp")
    plain = start(config, store)
    inputs, targets = batch(plain.samples.ids, plain.samples.order.starts(0, 8), 16, "causal")
    (plain.model(inputs, targets).sum() / targets.numel()).backward()
    expected = {name: value.grad for name, value in plain.model.named_parameters()}
    real = torch.distributed.all_reduce

    def work(processes: ProcessGroup) -> None:
        for micros in (1, 2, 4):  # per process
            shared = share_batch(change(config, train__micro_batch=4 // micros), processes)
            training = new_training(shared, store, silent, processes)
            reduced: list[int] = []

            def counted(tensor: Tensor, *rest: Any, reduced: list[int] = reduced, **more: Any) -> Any:
                reduced.append(tensor.numel())
                return real(tensor, *rest, **more)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(torch.distributed, "all_reduce", counted)
                found = gradients(training)
            size = sum(value.numel() for value in training.model.parameters())
            assert sorted(reduced) == [1, size], "each gradient is summed once, and the loss"
            for name, value in expected.items():
                assert value is not None
                assert torch.allclose(found[name], value, rtol=1e-6, atol=1e-6 * float(value.abs().max())), name

    distribute(2, work, tmp_path)


@pytest.mark.parametrize("kind", ["full", "compressed", "linear"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_recomputed_activations_give_the_same_gradients(
    tiny: Config, store: TokenStore, kind: str, precision: str
) -> None:
    config = change(tiny, model__attention=kind, model__layers=2, train__precision=precision, model__compression=4)
    saved: list[int] = []

    def found(recompute: bool) -> dict[str, Tensor]:
        sizes: list[int] = []

        def pack(tensor: Tensor) -> Tensor:
            sizes.append(tensor.nbytes)
            return tensor

        def measured(forward: Any) -> Any:
            def call(inputs: Tensor, targets: Tensor) -> Tensor:
                with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                    nats: Tensor = forward(inputs, targets)
                return nats

            return call

        training = start(change(config, train__activation_checkpointing=recompute), store)
        result = gradients(with_forward(training, measured))
        saved.append(sum(sizes))
        return result

    plain, again = found(False), found(True)
    assert all(torch.equal(plain[name], again[name]) for name in plain)
    assert saved[1] < saved[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train__batch_size": 6}, r"=6 can't be shared by 4 processes in parts of train.micro_batch=2"),
        ({"train__batch_size": 6, "train__micro_batch": None}, r"shared by 4 processes: make it a multiple of 4"),
    ],
)
def test_a_batch_that_can_not_be_divided_is_rejected(tiny: Config, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(LmtrainError, match=message):
        share_batch(change(tiny, **changes), ProcessGroup(0, 4))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"train__optimizer": "muon"}, "train.optimizer=muon"),
        ({"model__norm": "scale"}, "model.norm=scale"),
        ({"train__compile": True}, "train.compile=True"),
        ({"train__precision": "fp16"}, "train.precision=fp16"),
    ],
)
def test_what_can_not_be_sharded_is_rejected(tiny: Config, changes: dict[str, Any], field: str) -> None:
    config = change(tiny, train__parallel="fsdp", **changes)
    model = LanguageModel(config.model, 10)
    with pytest.raises(LmtrainError, match=f"{field} can't be sharded"):
        choose_kind(config, model, cpu(), config.train.precision, ProcessGroup())
    assert choose_kind(change(config, train__parallel="auto"), model, cpu(), "fp32", ProcessGroup()) == "ddp"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_one_process_over_nccl(
    tiny: Config, store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    config = change(tiny, **SHORT, train__device="cuda", train__parallel=kind)
    run(config, store, tmp_path / "single")
    server = meeting_place()
    for name, value in variables(0, 1, server.port).items():
        monkeypatch.setenv(name, value)
    with join_processes("cuda", 1.0) as processes:
        fit(config, store, tmp_path / "group", resume=True, note=print, quiet=True, processes=processes)
    assert_close_runs(tmp_path / "single", tmp_path / "group")
