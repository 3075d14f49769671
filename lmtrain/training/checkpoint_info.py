"""What the checkpoint of a run stores besides its tensors."""

import json
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from lmtrain.errors import LmtrainError
from lmtrain.storage.checkpoint import Checkpoint

MAX_COUNT = 2**48
Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class Counters:
    """All numbers that a checkpoint must restore for a resumed run to equal an uninterrupted one."""

    step: Count = 0
    evaluated: Count = 0
    best: Finite | None = None
    stale: Count = 0
    """These four as in `TrainState`."""
    scaler: dict[str, int | Finite] = field(default_factory=dict)
    """`GradScaler.state_dict()`."""
    skipped: Count = 0
    """`StepStatistics.skipped`."""
    in_a_row: Count = 0
    """`StepStatistics.in_a_row`."""
    window: tuple[Finite, Finite, Count] = (0.0, 0.0, 0)
    """`StepStatistics.sums`: those since the last logged step."""


@dataclass(frozen=True)
class CheckpointInfo:
    """What a resumed run reads in the manifest of a checkpoint: its counters, and how it was written."""

    counters: Counters
    seconds: Amount
    """The time that the run had taken."""
    metrics_bytes: Count
    """Length of metrics.jsonl."""
    threads: int
    tokenizer: str
    """Hash of the tokenizer."""
    store: str | None = None
    """Hash of the token store. None in a checkpoint of an earlier version, whose stores had another form."""
    processes: Annotated[int, Field(ge=1)] = 1
    teacher: str | None = None
    """Hash of the teacher's checkpoint, or of the checkpoints of several."""
    prepared: Amount = 0.0
    """Seconds before the first step: `Budget.setup_seconds`."""
    precision: str | None = None
    compiled: bool | None = None
    micro_batch: int | None = None


NEW_RUN = CheckpointInfo(Counters(), seconds=0.0, metrics_bytes=0, threads=0, tokenizer="")
"""The info of a run that has no checkpoint yet."""


def read_info(checkpoint: Checkpoint) -> CheckpointInfo:
    """Parse and validate the manifest. Raises LmtrainError if a field is missing or invalid."""
    try:
        return TypeAdapter(CheckpointInfo).validate_json(json.dumps(checkpoint.info), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"][:2])
        raise LmtrainError(f"{checkpoint.folder} can't be resumed: {name} in its manifest: {first['msg']}") from None
