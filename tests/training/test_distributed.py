"""Several processes train as one would: the same windows, the same gradients, the same checkpoints."""

import json
import signal
import time
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
from lmtrain.storage import checkpoint
from lmtrain.storage.files import read_manifest, verify
from lmtrain.system.distributed import join_processes
from lmtrain.system.process_group import SINGLE_PROCESS, ProcessGroup
from lmtrain.training import loop, state
from lmtrain.training.loop import StepResult, fit, train_step
from lmtrain.training.parallel import choose_kind, share_batch
from tests.reading import read
from tests.training.ranks import meeting_place, said, together, variables
from tests.training.resuming import worsen
from tests.training.test_loop import change, last_hash, run

pytestmark = pytest.mark.usefixtures("one_thread")

FOLLOWED = ("loss", "raw_loss", "grad_norm", "lr", "epoch", "skipped_steps")
ROUNDING = 2e-5
"""How far losses and norms of a few steps may lie apart, relatively, where only the order of sums differs."""
SHORT: dict[str, Any] = {
    "train__steps": 5,
    "train__eval_steps": 3,
    "train__log_steps": 1,
    "eval__batch_size": 5,  # evaluations in three batches, which two or four processes don't share evenly
}


def curve(run_dir: Path) -> list[tuple[str, int, list[float]]]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [(row["kind"], row["step"], [row[name] for name in FOLLOWED if name in row]) for row in rows]


def assert_close_curves(one: Path, other: Path) -> None:
    for (kind, step, figures), (*place, others) in zip(curve(one), curve(other), strict=True):
        assert [kind, step] == place
        assert others == pytest.approx(figures, rel=ROUNDING), (kind, step)


def assert_close_state(one: Path, other: Path) -> None:
    ours, theirs = (read(checkpoint.choose(folder, "last")) for folder in (one, other))
    assert ours.info["step"] == theirs.info["step"]
    for group, named in ours.tensors.items():
        checkpoint.check_fit(theirs.tensors[group], named)
        for name, tensor in named.items():
            assert torch.allclose(theirs.tensors[group][name], tensor, rtol=1e-5, atol=2e-6), f"{group} {name}"


def training_work(config: Config, store: TokenStore, run_dir: Path, notes: Path, stop: int | None = None) -> Any:
    """Train, write down the windows of each step, and let the last process alone get a signal in the step `stop`."""

    def work(processes: ProcessGroup) -> None:
        windows: list[list[int]] = []
        taken = 0

        def noted(ids: Ids, starts: np.ndarray, context: int, mode: Mode) -> tuple[Tensor, Tensor]:
            windows.append(starts.tolist())
            return batch(ids, starts, context, mode)

        def stepped(training: state.Training, lr: float, sampling: float) -> StepResult:
            nonlocal taken
            result = train_step(training, lr, sampling)
            taken += 1
            if taken == stop and processes.rank == processes.world_size - 1:
                signal.raise_signal(signal.SIGTERM)
            return result

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop, "batch", noted)
            patch.setattr(loop, "train_step", stepped)
            outcome = fit(config, store, run_dir, resume=True, note=print, quiet=True, processes=processes)
        told = {"windows": windows, "status": outcome.status, "step": outcome.step}
        (notes / f"{processes.rank}.json").write_text(json.dumps(told))

    return work


def train(
    config: Config, store: TokenStore, run_dir: Path, size: int, kind: str = "ddp", stop: int | None = None
) -> list[dict[str, Any]]:
    """Train on `size` processes, 0 = this one alone; what each has to tell."""
    config = change(config, train__parallel=kind)
    log = run_dir.with_name(f"{run_dir.name}-log")
    log.mkdir(exist_ok=True)
    work = training_work(config, store, run_dir, log, stop)
    if size == 0:
        work(SINGLE_PROCESS)
    else:
        assert together(size, work, log) == [0] * size, [said(log, rank) for rank in range(size)]
    return [json.loads((log / f"{rank}.json").read_text()) for rank in range(max(size, 1))]


def windows_by_step(told: list[dict[str, Any]], per_step: int) -> list[list[int]]:
    """The windows of each step, in the order of the processes."""
    steps = len(told[0]["windows"]) * len(told) // per_step
    each = per_step // len(told)
    return [
        [start for rank in told for micro in rank["windows"][step * each : (step + 1) * each] for start in micro]
        for step in range(steps)
    ]


@pytest.mark.parametrize("variant", ["plain", "all at once", "taught"])
def test_one_and_two_processes_give_the_same_bits(
    tiny: Config, store: TokenStore, tmp_path: Path, variant: str
) -> None:
    together_changes: dict[str, Any] = {
        "train__optimizer": "muon",
        "train__precision": "bf16",
        "train__scheduled_sampling": 0.8,
        "train__activation_checkpointing": True,
    }
    if variant == "taught":
        run(tiny, store, tmp_path / "teacher")
        together_changes = {"train__teacher": str(tmp_path / "teacher"), "run__seed": 2}
    config = change(tiny, **SHORT, **(together_changes if variant != "plain" else {}))
    assert config.train.micro_batch == config.train.batch_size // 2
    alone = train(config, store, tmp_path / "alone", 0)
    two = train(config, store, tmp_path / "two", 2)
    assert last_hash(tmp_path / "two") == last_hash(tmp_path / "alone")
    assert curve(tmp_path / "two") == curve(tmp_path / "alone")
    assert windows_by_step(two, 2) == windows_by_step(alone, 2)


def test_the_final_score_is_of_one_checkpoint_however_late_it_is_written(
    tiny: Config, store: TokenStore, tmp_path: Path
) -> None:
    """The best is being written still when the process that does not write it asks for it."""
    config = change(tiny, train__steps=3, train__eval_steps=1)

    def work(processes: ProcessGroup) -> None:
        save = checkpoint.save

        def slowly(*arguments: Any) -> Path:
            if arguments[1] == 2:
                time.sleep(1.5)
            return save(*arguments)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop, "train_step", worsen)
            patch.setattr(checkpoint, "save", slowly)
            outcome = fit(config, store, tmp_path / "two", resume=True, note=print, quiet=True, processes=processes)
        assert outcome.score is not None
        told = {"best": outcome.best_step, "nats": outcome.score.nats}
        (tmp_path / f"{processes.rank}.json").write_text(json.dumps(told))

    assert together(2, work, tmp_path / "log") == [0, 0], [said(tmp_path / "log", rank) for rank in range(2)]
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "train_step", worsen)
        alone = run(config, store, tmp_path / "alone")[0]
    assert alone.score is not None
    assert found == [{"best": 2, "nats": alone.score.nats}] * 2


def test_four_processes_see_the_same_windows_and_resume_on_any_number(
    tiny: Config, store: TokenStore, tmp_path: Path
) -> None:
    config = change(tiny, **SHORT, train__micro_batch=1)
    alone = windows_by_step(train(config, store, tmp_path / "alone", 0), 4)
    chain = [(4, "fsdp", 1), (2, "ddp", 1), (0, "auto", 1), (2, "fsdp", None)]
    seen: list[list[int]] = []
    for size, kind, stop in chain:
        told = train(config, store, tmp_path / "chain", size, kind, stop)
        ended = len(seen) + 1 if stop else SHORT["train__steps"]
        assert {(rank["step"], rank["status"]) for rank in told} == {(ended, "interrupted" if stop else "finished")}
        for folder in checkpoint.folders(tmp_path / "chain"):
            verify(folder, read_manifest(folder, checkpoint.FORMAT))
        seen += windows_by_step(told, 4)
    assert seen == alone
    assert_close_curves(tmp_path / "alone", tmp_path / "chain")
    assert_close_state(tmp_path / "alone", tmp_path / "chain")
    assert curve(tmp_path / "chain") != curve(tmp_path / "alone")  # else nothing was added up in another order


def test_sharded_equals_alone(tiny: Config, store: TokenStore, tmp_path: Path) -> None:
    changes = {"train__precision": "bf16", "train__activation_checkpointing": True}
    config = change(tiny, **SHORT, **changes, model__qk_norm=True, model__norm="layer", train__scheduled_sampling=0.5)
    train(config, store, tmp_path / "alone", 0)
    train(config, store, tmp_path / "sharded", 2, "fsdp")
    assert_close_curves(tmp_path / "alone", tmp_path / "sharded")
    assert_close_state(tmp_path / "alone", tmp_path / "sharded")


def gradients(training: state.Training) -> dict[str, Tensor]:
    """The gradients that a step gives its optimizer."""
    kept: dict[str, Tensor] = {}

    def keep() -> None:
        kept.update({name: value.grad.clone() for name, value in training.model.named_parameters()})  # type: ignore[union-attr]

    training.optimizer.step = keep  # type: ignore[assignment, method-assign]
    train_step(training, 1e-3)
    return kept


def test_gradients_are_those_of_the_sum_over_all_targets(tiny: Config, store: TokenStore, tmp_path: Path) -> None:
    off = dict.fromkeys(("dropout", "attention_dropout", "embedding_dropout", "input_dropout", "output_dropout"), 0.0)
    still = change(
        tiny,
        **{f"model__{name}": rate for name, rate in off.items()},
        train__batch_size=8,
        train__clip=None,
        train__parallel="ddp",
    )
    plain = state.prepare(still, store, print)
    inputs, targets = batch(plain.ids, plain.order.starts(0, 8), 16, "causal")
    (plain.model(inputs, targets).sum() / targets.numel()).backward()
    expected = {name: value.grad for name, value in plain.model.named_parameters()}

    def work(processes: ProcessGroup) -> None:
        for parts in (1, 2, 4):  # that each process takes
            config = change(still, train__micro_batch=4 // parts)
            training = state.prepare(share_batch(config, processes), store, print, processes)
            sums: list[int] = []
            real = torch.distributed.all_reduce

            def counted(tensor: Tensor, *rest: Any, real: Any = real, sums: list[int] = sums, **more: Any) -> Any:
                sums.append(tensor.numel())
                return real(tensor, *rest, **more)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(torch.distributed, "all_reduce", counted)
                found = gradients(training)
            size = sum(value.numel() for value in training.model.parameters())
            assert sorted(sums) == [1, size], "each gradient is added up once, and the loss"
            for name, value in expected.items():
                assert value is not None
                scale = float(value.abs().max())
                assert torch.allclose(found[name], value, rtol=1e-6, atol=1e-6 * scale), (parts, name)

    assert together(2, work, tmp_path) == [0, 0], said(tmp_path, 0)


@pytest.mark.parametrize("kind", ["full", "compressed", "linear"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_activations_computed_again_give_the_same_gradients(
    tiny: Config, store: TokenStore, kind: str, precision: str
) -> None:
    config = change(tiny, model__attention=kind, model__layers=2, train__precision=precision, model__compression=4)
    kept: list[int] = []

    def found(recompute: bool) -> dict[str, Tensor]:
        training = state.prepare(change(config, train__activation_checkpointing=recompute), store, print)
        honest = training.forward
        sizes: list[int] = []

        def pack(tensor: Tensor) -> Tensor:
            sizes.append(tensor.nbytes)
            return tensor

        def watched(inputs: Tensor, targets: Tensor) -> Tensor:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                return honest(inputs, targets)

        training.forward = watched
        result = gradients(training)
        kept.append(sum(sizes))
        return result

    plain, again = found(False), found(True)
    assert all(torch.equal(plain[name], again[name]) for name in plain)
    assert kept[1] < kept[0]


def test_a_budget_of_time_ends_all_processes_with_the_same_step(
    tiny: Config, store: TokenStore, tmp_path: Path
) -> None:
    config = change(tiny, train__steps=None, train__max_minutes=0.05, train__log_steps=1000, train__eval_steps=1000)

    def work(processes: ProcessGroup) -> None:
        with pytest.MonkeyPatch.context() as patch:
            if processes.rank:
                real = time.monotonic
                patch.setattr(time, "monotonic", lambda: 2 * real())  # a clock that goes wrong
            outcome = fit(config, store, tmp_path / "run", resume=True, note=print, quiet=True, processes=processes)
        (tmp_path / f"{processes.rank}.json").write_text(json.dumps(outcome.step))

    assert together(2, work, tmp_path / "log") == [0, 0], said(tmp_path / "log", 0)
    steps = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert steps[0] == steps[1] > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"train__batch_size": 6},
            r"=6 can't be shared by 4 processes in parts of train.micro_batch=2",
        ),
        ({"train__batch_size": 6, "train__micro_batch": None}, r"shared by 4 processes: make it a multiple of 4"),
    ],
)
def test_a_batch_that_cannot_be_shared(tiny: Config, changes: dict[str, Any], message: str) -> None:
    four = ProcessGroup()
    four.size = 4
    with pytest.raises(LmtrainError, match=message):
        share_batch(change(tiny, **changes), four)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"train__optimizer": "muon"}, "train.optimizer=muon"),
        ({"model__norm": "scale"}, "model.norm=scale"),
        ({"train__compile": True}, "train.compile=True"),
        ({"train__precision": "fp16"}, "train.precision=fp16"),
    ],
)
def test_what_cannot_be_sharded(tiny: Config, changes: dict[str, Any], field: str) -> None:
    config = change(tiny, train__parallel="fsdp", **changes)
    model = LanguageModel(config.model, 10)
    cpu = torch.device("cpu")
    with pytest.raises(LmtrainError, match=f"{field} can't be sharded"):
        choose_kind(config, model, cpu, config.train.precision, ProcessGroup())
    assert choose_kind(change(config, train__parallel="auto"), model, cpu, "fp32", ProcessGroup()) == "ddp"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_one_process_over_nccl(
    tiny: Config, store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    config = change(tiny, **SHORT, train__device="cuda", train__parallel=kind)
    run(config, store, tmp_path / "alone")
    server = meeting_place()
    for name, value in variables(0, 1, server.port).items():
        monkeypatch.setenv(name, value)
    with join_processes("cuda", 1.0) as processes:
        fit(config, store, tmp_path / "group", resume=True, note=print, quiet=True, processes=processes)
    assert_close_curves(tmp_path / "alone", tmp_path / "group")
