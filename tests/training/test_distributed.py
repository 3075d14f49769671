"""Several processes train like one, to the same checkpoints and scores, and any number of them resumes a run."""

import itertools
import re
import shutil
import signal
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

import lmtrain
from lmtrain.config.schema import Config
from lmtrain.errors import LmtrainError
from lmtrain.model.cuda_graph import WARM_UP
from lmtrain.storage import checkpoint, run_checkpoints
from lmtrain.storage.tensor_files import LazyTensor
from lmtrain.system.distributed import join_processes
from lmtrain.system.process_group import SINGLE_PROCESS, ProcessGroup
from lmtrain.training import loop, meter
from lmtrain.training.loop import train_step
from lmtrain.training.parallel import choose_strategy, with_micro_batch
from lmtrain.training.saving import CheckpointSaver
from lmtrain.training.sharding import is_sharded, local_rows
from lmtrain.training.train_state import TrainState, restore, snapshot
from tests.helpers import tensors_of
from tests.training.helpers import (
    CIRCUMSTANCES,
    change,
    last_hash,
    logged,
    run,
    run_state,
    start,
    state_of,
    verified_steps,
    worsen,
)
from tests.training.ranks import meeting_place, together, variables

ROUNDING = 2e-5
"""Relative tolerance of losses and norms of a few steps where only the order of sums differs."""
SHORT: dict[str, Any] = {
    "train__steps": 5,
    "train__eval_steps": 3,
    "train__log_steps": 1,
    "eval__batch_size": 5,  # evaluations of three batches, which two or four processes don't share evenly
    "eval__stride": 12,  # otherwise most of the time would be that of the final score
}


def train(config: Config, run_dir: Path, processes: ProcessGroup) -> list[Any]:
    """The run's status, its last and its best step, and its score; nothing if a signal ends it."""
    try:
        outcome, _ = run(config, run_dir, processes=processes)
    except KeyboardInterrupt:
        return []
    return [outcome.status, outcome.step, outcome.best_step, outcome.valid.nats]


def assert_close_runs(one: Path, other: Path) -> None:
    for (kind, step, figures), (*place, others) in zip(logged(one), logged(other), strict=True):
        assert [kind, step] == place
        assert others == pytest.approx(figures, rel=ROUNDING), (kind, step)
    assert run_checkpoints.choose(one, "last").name == run_checkpoints.choose(other, "last").name
    theirs = tensors_of(other)
    for group, named in tensors_of(one).items():
        checkpoint.check_shapes(theirs[group], named)
        for name, tensor in named.items():
            assert torch.allclose(theirs[group][name], tensor, rtol=1e-5, atol=2e-6), f"{group} {name}"


def test_two_ddp_processes_give_the_same_bits_as_one(
    tiny: Config, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although the other process has a wrong clock, and sees another best checkpoint of the teacher's run."""
    older = run_checkpoints.folders(base)[0]
    assert older != run_checkpoints.best_folder(base)
    plain = change(tiny, **SHORT, train__parallel="ddp")
    assert plain.train.micro_batch == plain.train.batch_size // 2
    variants = {
        "plain": plain,
        "muon": change(plain, train__optimizer="muon", train__precision="bf16", train__activation_checkpointing=True),
        "others": change(plain, train__init_from=str(base), train__teacher=str(base), run__seed=2),
        "late": change(plain, train__steps=3, train__eval_steps=1),
    }
    timed = change(plain, train__steps=None, train__max_minutes=0.005, train__eval_steps=1000)
    best_first, save, looks = run_checkpoints.best_first, checkpoint.save, itertools.count()

    def slowly(*arguments: Any) -> Path:
        """The best checkpoint of the run `late` is still being written when the other process would look for it."""
        if arguments[:2] == (tmp_path / "2/late", 2):
            time.sleep(1.5)
        return save(*arguments)

    def work(processes: ProcessGroup) -> dict[str, list[Any]]:
        monkeypatch.setattr(checkpoint, "save", slowly)
        clock = SimpleNamespace(monotonic=lambda: 0.01 * (1 + processes.rank) * next(looks))
        monkeypatch.setattr(meter, "time", clock)
        if not processes.is_main:
            monkeypatch.setattr(
                run_checkpoints,
                "best_first",
                lambda run_dir: [older] if run_dir == base else best_first(run_dir),
            )
        found = {}
        for name, config in variants.items():
            monkeypatch.setattr(loop, "train_step", worsen if name == "late" else train_step)
            found[name] = train(config, tmp_path / str(processes.world_size) / name, processes)
        if processes.world_size == 2:
            found["timed"] = train(timed, tmp_path / "timed", processes)
        return found

    single = work(SINGLE_PROCESS)
    two = together(2, work, tmp_path / "log")
    assert single["late"][2] == 2
    for name in variants:
        assert [rank[name] for rank in two] == [single[name]] * 2
        assert last_hash(tmp_path / "2" / name) == last_hash(tmp_path / "1" / name)
        assert logged(tmp_path / "2" / name) == logged(tmp_path / "1" / name)
    assert two[0]["timed"] == two[1]["timed"]


def test_a_run_resumes_with_any_number_of_processes(
    tiny: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part is stopped by a signal to one process."""
    config = change(tiny, **SHORT, train__micro_batch=1)
    run(config, tmp_path / "single")

    def step(state: TrainState, lr: float) -> None:
        train_step(state, lr)
        processes = state.processes
        if state.step <= 3 and processes.rank == processes.world_size - 1:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(loop, "train_step", step)
    for ended, (size, kind) in enumerate(((4, "fsdp"), (2, "ddp"), (1, "ddp"), (2, "fsdp")), start=1):
        work = partial(train, change(config, train__parallel=kind), tmp_path / "chain")
        found = [work(SINGLE_PROCESS)] if size == 1 else together(size, work, tmp_path / f"log-{ended}")
        assert [rank[:2] for rank in found] == [[] if ended < 4 else ["finished", 5]] * size
        state = run_state(tmp_path / "chain")
        assert (state["status"], state["step"]) == (("interrupted", ended) if ended < 4 else ("finished", 5))
        assert state["step"] in verified_steps(tmp_path / "chain")
    assert_close_runs(tmp_path / "single", tmp_path / "chain")
    assert logged(tmp_path / "chain") != logged(tmp_path / "single")  # otherwise nothing was summed in another order


def test_a_sharded_run_equals_a_single_process(tiny: Config, base: Path, tmp_path: Path) -> None:
    sharded = change(tiny, **SHORT, train__parallel="fsdp")
    variants = {
        "checkpointing": change(
            sharded, train__precision="bf16", train__activation_checkpointing=True, model__norm="layer"
        ),
        "scale": change(sharded, model__norm="scale"),  # one gain, which one process holds
        "init_from": change(sharded, train__init_from=str(base)),
    }

    def work(processes: ProcessGroup) -> None:
        for name, config in variants.items():
            train(config, tmp_path / str(processes.world_size) / name, processes)

    work(SINGLE_PROCESS)
    together(2, work, tmp_path / "log")
    for name in variants:
        assert_close_runs(tmp_path / "1" / name, tmp_path / "2" / name)
    trained = lmtrain.load(tmp_path / "2" / "init_from", checkpoint="last", weights="ema", device="cpu")
    stored = tensors_of(tmp_path / "2" / "init_from")["ema"]
    assert all(torch.equal(value, stored[name]) for name, value in trained.model.named_parameters())


def test_each_process_reads_holds_and_writes_only_its_rows_of_a_sharded_state(
    tiny: Config, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the state keeps its bits."""
    before, expected = base, last_hash(base)
    groups = tensors_of(before)
    total = sum(tensor.numel() for named in groups.values() for tensor in named.values())
    optimizer_bytes = sum(tensor.nbytes for tensor in groups["optimizer"].values() if tensor.ndim)
    elements: list[int] = []
    get_rows = LazyTensor.__getitem__

    def counted(stored: LazyTensor, rows: Any) -> Tensor:
        tensor = get_rows(stored, rows)
        elements.append(tensor.numel())
        return tensor

    def work(kind: str, source: Path, target: Path, processes: ProcessGroup) -> list[int]:
        state = start(change(tiny, train__parallel=kind, train__batch_size=12), processes)
        found = checkpoint.load(run_checkpoints.choose(source, "last"))
        monkeypatch.setattr(LazyTensor, "__getitem__", counted)
        for name in ("full_tensor", "redistribute"):
            monkeypatch.setattr(DTensor, name, None)  # no tensor may be gathered
        restore(state, found)
        with CheckpointSaver(target, 1, processes) as saver:
            saver.save(state.step, *snapshot(state, None, **CIRCUMSTANCES))
        moments = [value for entries in state.optimizer.state.values() for value in entries.values() if value.ndim]
        return [sum(elements), sum((local_rows(value)[1] if is_sharded(value) else value).nbytes for value in moments)]

    for size, kind in ((3, "fsdp"), (2, "fsdp"), (1, "ddp")):
        after = tmp_path / f"{size}-{kind}"
        found = together(size, partial(work, kind, before, after), tmp_path / f"log-{size}")
        assert last_hash(after) == expected
        files = {path.name for path in run_checkpoints.choose(after, "last").glob("model*")}
        parts = {f"model-{number:05d}-of-{size:05d}.safetensors" for number in range(1, size + 1)}
        assert files == (parts if kind == "fsdp" else {"model.safetensors"})
        assert total <= sum(read for read, _ in found) < 1.01 * total
        assert sum(held for _, held in found) == optimizer_bytes
        before = after


def test_scalar_gains_of_older_checkpoints_are_read(tiny: Config, tmp_path: Path) -> None:
    """By a sharded run that resumes, and by a trained model."""
    config = change(tiny, model__norm="scale", train__parallel="fsdp")
    new, old = tmp_path / "new", tmp_path / "old"
    run(config, new)
    found, tensors = checkpoint.load(run_checkpoints.choose(new, "last")), tensors_of(new)
    shutil.copytree(new, old)
    shutil.rmtree(old / "checkpoints")
    scalars = {
        group: {name: tensor.squeeze() if ".length" in name else tensor for name, tensor in named.items()}
        for group, named in tensors.items()
    }
    assert sum(not tensor.shape for tensor in scalars["model"].values()) == 5  # two of the block, its end's, the pool's
    checkpoint.save(old, found.info["step"], scalars, found.info)

    def work(processes: ProcessGroup) -> None:
        state = start(config, processes)
        restore(state, checkpoint.load(run_checkpoints.choose(old, "last")))
        with CheckpointSaver(tmp_path / "resumed", 1, processes) as saver:
            saver.save(state.step, *snapshot(state, None, **CIRCUMSTANCES))

    together(2, work, tmp_path / "log")
    assert last_hash(tmp_path / "resumed") == last_hash(new)
    trained = lmtrain.load(old, checkpoint="last", weights="raw", device="cpu")
    assert all(torch.equal(value, tensors["model"][name]) for name, value in trained.model.named_parameters())


@pytest.mark.parametrize("kind", ["full", "compressed", "linear"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_recomputed_activations_give_the_same_bits(tiny: Config, kind: str, precision: str) -> None:
    config = change(tiny, model__attention=kind, model__layers=2, train__precision=precision, model__compression=4)
    plain, recomputed = (start(change(config, train__activation_checkpointing=on)) for on in (False, True))
    for state in (plain, recomputed):
        train_step(state, 1e-2)
    assert state_of(plain) == state_of(recomputed)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train__batch_size": 6}, r"=6 can't be divided among 4 processes in parts of train.micro_batch=2"),
        ({"train__batch_size": 6, "train__micro_batch": None}, r"divided among 4 processes: make it a multiple of 4"),
    ],
)
def test_a_batch_that_cannot_be_divided_is_rejected(tiny: Config, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(LmtrainError, match=message):
        with_micro_batch(change(tiny, **changes), ProcessGroup(0, 4))


@pytest.mark.parametrize(
    ("changes", "needed"),
    [
        ({"train__optimizer": "muon"}, "train.optimizer=adamw"),
        ({"train__teacher": "runs/other"}, "train.teacher=null"),
        ({"train__compile": True, "train__precision": "fp16"}, "train.compile=false and train.precision=bf16 or fp32"),
    ],
)
def test_what_cannot_be_sharded_is_rejected(tiny: Config, changes: dict[str, Any], needed: str) -> None:
    config = change(tiny, train__parallel="fsdp", **changes)
    with pytest.raises(LmtrainError, match=re.escape(f"train.parallel=fsdp needs {needed}: set that, or train.")):
        choose_strategy(config, config.train.precision, ProcessGroup())
    assert choose_strategy(change(config, train__parallel="ddp"), "fp32", ProcessGroup()) == "ddp"


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_one_process_over_nccl_trains_like_one_without_a_group(
    tiny: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    # Samples long enough that their steps are captured as a CUDA graph, beside NCCL.
    config = change(tiny, **SHORT, train__device="cuda", train__parallel=kind, train__sample_tokens=WARM_UP + 4)
    run(config, tmp_path / "single")
    server = meeting_place()
    for name, value in variables(0, 1, server.port).items():
        monkeypatch.setenv(name, value)
    with join_processes("cuda") as processes:
        run(config, tmp_path / "group", processes=processes)
    assert_close_runs(tmp_path / "single", tmp_path / "group")
