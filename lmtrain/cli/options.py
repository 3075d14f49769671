"""The arguments and options that the commands share."""

import json
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

ConfigFile = Annotated[Path | None, typer.Option("--config", "-c", help="YAML configuration; see configs/.")]
Source = Annotated[
    str | None,
    typer.Argument(help="sample, wikitext-2, wikitext-2-raw, wikitext-103, a hub id (owner/name), a folder or a file."),
]
Subset = Annotated[str | None, typer.Option(help="The hub data set's configuration name.")]
Revision = Annotated[str | None, typer.Option(help="The hub data set's revision.")]
TextColumn = Annotated[str | None, typer.Option(help="The column or key that holds the text. [default: text]")]
DataDir = Annotated[Path | None, typer.Option(help="The folder for corpora and token stores. [default: data]")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")]
Force = Annotated[bool, typer.Option("--force", help="Make it anew even where it is there and unchanged.")]
Run = Annotated[Path | None, typer.Option("--run", "-r", help="A run folder. [default: the latest in runs/]")]
Which = Annotated[
    str | None, typer.Option("--checkpoint", help="best, last, or a step number. [default: the best undamaged one]")
]


class Device(StrEnum):
    """Where to compute; `auto` takes a CUDA device where there is one."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Precision(StrEnum):
    """The arithmetic of the matrices; `auto` takes bf16 where the hardware has it, else fp16 on a GPU and fp32 on a
    CPU. int8 is not for training."""

    auto = "auto"
    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"
    int8 = "int8"


class Weights(StrEnum):
    """Which weights of a checkpoint to use; `auto` takes the averaged ones where they were kept."""

    auto = "auto"
    raw = "raw"
    ema = "ema"


class Stop(StrEnum):
    """Where a generated text ends before it has its full length."""

    none = "none"
    line = "line"
    sentence = "sentence"
    document = "document"


class Resume(StrEnum):
    """What to do with a run folder that holds checkpoints."""

    auto = "auto"
    never = "never"


WhichDevice = Annotated[Device, typer.Option("--device", help="auto takes CUDA where it is.")]
WhichWeights = Annotated[Weights, typer.Option("--weights", help="auto takes the averaged ones where they were kept.")]


def as_overrides(given: Mapping[str, str | Path | float | None]) -> list[str]:
    """The options that were given, as `section.field=value`; texts in quotes: YAML would take some for a number or a
    comment."""
    return [
        f"{key}={value if isinstance(value, int | float) else json.dumps(str(value), ensure_ascii=False)}"
        for key, value in given.items()
        if value is not None
    ]
