"""The state of a run: what a step touches, how it is made, saved and put back."""

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field, TypeAdapter, ValidationError
from torch import Tensor

from lmtrain.config.loader import identity_difference
from lmtrain.config.schema import Config
from lmtrain.data.ids import Ids
from lmtrain.data.order import Mixture, SampleOrder, sample_order
from lmtrain.data.tokens import TokenStore
from lmtrain.errors import LmtrainError
from lmtrain.model.build import build_model, set_output_bias
from lmtrain.model.language_model import LanguageModel
from lmtrain.model.objective import Objective
from lmtrain.storage import checkpoint
from lmtrain.storage.tensor_files import Stored
from lmtrain.system.distributed import ALONE, Workers
from lmtrain.system.runtime import choose_device, choose_precision, machine
from lmtrain.training.budget import make_budget
from lmtrain.training.compilation import Forward, compiled_forward
from lmtrain.training.optim import load_optimizer_tensors, make_optimizer, optimizer_tensors
from lmtrain.training.other_runs import load_teacher
from lmtrain.training.parallel import Parallel, choose_kind, copy_all, distribute, placed

Note = Callable[[str], None]
Part = Callable[[str], AbstractContextManager[object]]
Count = Annotated[int, Field(ge=0, le=2**48)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


@dataclass
class Counters:
    """The state of a run beside its tensors: what a checkpoint must bring back for the run to go on unchanged."""

    step: Count = 0
    evaluated: Count = 0
    """The step of the last evaluation."""
    best: Finite | None = None
    """Nats per token of the best evaluation."""
    best_step: Count = 0
    stale: Count = 0
    """Evaluations in a row without a new best."""
    scaler: dict[str, int | Finite] = field(default_factory=dict)
    """The scaler of fp16, as it was when this was saved."""
    skipped: Count = 0
    """Steps that changed nothing, as `Training` had counted them when this was saved."""
    in_a_row: Count = 0
    """How many of them were the last ones."""
    window: tuple[Finite, Finite, Count] = (0.0, 0.0, 0)
    """`Training.window` when this was saved."""


@dataclass(frozen=True)
class Past:
    """What a checkpoint says of the run beside its tensors."""

    counters: Counters
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    metrics_bytes: Count
    threads: int
    tokenizer: str
    tokens: str
    processes: Annotated[int, Field(ge=1)] = 1
    teacher: str | None = None
    prepared: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Seconds of them before the first step."""
    precision: str | None = None


def past(found: checkpoint.Checkpoint) -> Past:
    """Read and check `found.info`. Raises LmtrainError where something is missing or of another kind."""
    try:
        return TypeAdapter(Past).validate_json(json.dumps(found.info), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"][:2])
        raise LmtrainError(f"{found.folder} can't be gone on from: {place} in its manifest: {first['msg']}") from None
    except RecursionError:
        raise LmtrainError(f"{found.folder} can't be gone on from: its manifest is nested too deeply") from None


def _unwatched(_name: str) -> AbstractContextManager[object]:
    return nullcontext()


@dataclass
class Training:
    """All that a step touches."""

    config: Config
    model: LanguageModel
    forward: Forward
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    ema: dict[str, Tensor] | None
    order: SampleOrder | Mixture
    ids: Ids
    device: torch.device
    precision: str
    skipped: Tensor
    """Steps that changed nothing, () int64, left on the device."""
    in_a_row: Tensor
    """How many of them were the last ones, likewise."""
    window: Tensor
    """Of the steps since the last logged point that changed something: the sums of the loss and of the gradient's norm,
    and their number, (3,) float64, likewise."""
    counters: Counters = field(default_factory=Counters)
    part: Part = _unwatched
    """Entered around each part of a step."""
    parallel: Parallel = field(default_factory=Parallel)
    teacher: str | None = None
    """The hash of the checkpoint that is learned from."""

    @property
    def targets_per_sample(self) -> int:
        """Predictions that one window gives."""
        return 1 if self.order.mode == "windowed" else self.order.context


def prepare(config: Config, store: TokenStore, note: Note, workers: Workers = ALONE) -> Training:
    """The model at its initial weights, its optimizer, and the order of samples."""
    device = choose_device(config.train.device)
    precision = choose_precision(config.train.precision, device)
    split = store.split("train")
    ids = split.ids
    order = sample_order(split.corpora, store.weights, config.model.context, config.model.mode, config.run.seed)
    torch.manual_seed(config.run.seed)
    model = build_model(
        config.model, store.tokenizer.vocab_size, recompute_blocks=config.train.activation_checkpointing
    )
    if config.model.output_bias or model.adaptive is not None:
        counts = torch.from_numpy(ids.counts(store.tokenizer.vocab_size))
        if config.model.output_bias:
            set_output_bias(model, counts)
        if model.adaptive is not None:
            model.adaptive.set_shares(counts)
    kind = choose_kind(config, model, device, precision, workers)
    if kind != "fsdp":  # which moves the model to the device block by block, as it shards it
        model.to(device)
    teacher, teacher_hash = None, None
    if config.train.teacher is not None:
        teacher, teacher_hash = load_teacher(config.train.teacher, config, store, device, workers)
    objective = Objective(model, config.train.loss_chunk, teacher, config.train.teacher_weight)
    forward: Forward = objective
    if kind == "alone" or (kind == "ddp" and (device.type == "cuda" or config.train.compile is True)):
        budget = make_budget(config.train, order.per_epoch())
        forward = compiled_forward(objective, config, budget, device, precision, note)
    forward, parallel = distribute(kind, model, forward, precision, workers)
    return Training(
        config,
        model,
        forward,
        make_optimizer(model, config.train),
        torch.amp.GradScaler(device.type, enabled=precision == "fp16"),
        {name: value.detach().clone() for name, value in model.named_parameters()} if config.train.ema else None,
        order,
        ids,
        device,
        precision,
        torch.zeros((), dtype=torch.int64, device=device),
        torch.zeros((), dtype=torch.int64, device=device),
        torch.zeros(3, dtype=torch.float64, device=device),
        parallel=parallel,
        teacher=teacher_hash,
    )


def snapshot(
    training: Training, store: TokenStore, score: float | None, clock: dict[str, Any]
) -> tuple[checkpoint.Tensors, dict[str, Any]]:
    """The whole state of the run, for `Saver.save`: its own tensors, not copies, and its counters."""
    tensors: checkpoint.Tensors = {
        "model": dict(training.model.named_parameters()),
        "optimizer": optimizer_tensors(training.model, training.optimizer),
    }
    if training.ema is not None:
        tensors["ema"] = training.ema
    loss, norm, steps = training.window.tolist()
    counters = dataclasses.replace(
        training.counters,
        scaler=training.scaler.state_dict(),
        skipped=int(training.skipped),
        in_a_row=int(training.in_a_row),
        window=(loss, norm, int(steps)),
    )
    return tensors, {
        "counters": dataclasses.asdict(counters),
        "score": score,
        **clock,
        "tokenizer": store.tokenizer.sha256,
        "tokens": store.sha256,
        "precision": training.precision,
        "threads": torch.get_num_threads(),
        "processes": training.parallel.workers.size,
        "teacher": training.teacher,
        "machine": machine(training.device),
        "model": training.config.model.model_dump(mode="json"),
    }


def restore(training: Training, found: checkpoint.Checkpoint) -> None:
    """Put a checkpoint's whole state back, bit for bit; what is sharded is read by the rows that are held here.

    Raises LmtrainError when it has another shape, or had another teacher.
    """
    before = past(found)
    counters = before.counters
    if before.teacher != training.teacher:
        learned = "no teacher" if before.teacher is None else "another teacher, or an earlier checkpoint of it"
        raise LmtrainError(
            f"train.teacher={training.config.train.teacher}: {found.folder} has learned from {learned}: "
            "choose another run.name, or name the old one"
        )
    try:
        copy_all(found.tensors["model"], dict(training.model.named_parameters()))
        load_optimizer_tensors(training.model, training.optimizer, found.tensors.get("optimizer", {}))
        if training.ema is not None:
            copy_all(found.tensors.get("ema", {}), training.ema)
        training.scaler.load_state_dict(counters.scaler)
        training.skipped.fill_(counters.skipped)
        training.in_a_row.fill_(counters.in_a_row)
        training.window.copy_(torch.tensor(counters.window, dtype=torch.float64))
    except (RuntimeError, KeyError, ValueError) as error:
        reason = (str(error).splitlines() or [""])[-1].strip()
        raise LmtrainError(f"{found.folder} does not fit this model: {reason}") from error
    training.counters = counters


def check_same_run(config: Config, store: TokenStore, run_dir: Path, found: checkpoint.Checkpoint) -> None:
    """Refuse to go on where the configuration or the data is not what the checkpoint was trained with."""
    changed = identity_difference(checkpoint.run_config(run_dir), config)
    if changed:
        raise LmtrainError(
            f"{run_dir} was started with another configuration ({'; '.join(changed)}): "
            "choose another run.name, or give the old values"
        )
    checkpoint.check_model(found, config.model)
    before = past(found)
    for what, then, now in (
        ("tokenizer", before.tokenizer, store.tokenizer.sha256),
        ("corpus", before.tokens, store.sha256),
    ):
        if then != now:
            raise LmtrainError(f"the {what} is not the one that {run_dir} was trained on: choose another run.name")


def averaged_weights(training: Training) -> AbstractContextManager[None]:
    """The model with its averaged weights for the length of the block, where there are any."""
    return other_weights(training.model, training.ema)


@contextmanager
def other_weights(model: LanguageModel, weights: Mapping[str, Tensor | Stored] | None) -> Iterator[None]:
    """The model with these weights for the length of the block; None = its own."""
    if weights is None:
        yield
        return
    parameters = dict(model.named_parameters())
    raw = {name: value.detach().clone() for name, value in parameters.items()}
    try:
        with torch.no_grad():
            for name, value in weights.items():
                parameters[name].copy_(placed(value, parameters[name]) if isinstance(value, Stored) else value)
        yield
    finally:
        with torch.no_grad():
            for name, value in raw.items():
                parameters[name].copy_(value)
