"""`lmtrain export`: a run as a folder that transformers loads."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from lmtrain.cli.options import (
    Checkpoint,
    ConfigFile,
    Json,
    Overrides,
    Quiet,
    Weights,
    WeightsChoice,
    run_folders,
)
from lmtrain.cli.output import show
from lmtrain.errors import UsageError
from lmtrain.system.messages import ignore, note


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run: its folder or name.")],
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="The folder to write. An earlier export there is replaced.")
    ],
    overrides: Overrides = None,
    config: ConfigFile = None,
    to: Annotated[
        Literal["hf"], typer.Option(help="hf: the files of Hugging Face's transformers, with a model card.")
    ] = "hf",
    checkpoint: Checkpoint = None,
    weights: WeightsChoice = Weights.auto,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write a trained run as a folder that Hugging Face's transformers loads.

    Of the configuration only run.dir has an effect: the folder of all runs.
    """
    from lmtrain.config.loader import shown
    from lmtrain.export.hugging_face import export as write

    for override in overrides or []:
        if not override.startswith("run.dir="):
            raise UsageError(f"{shown(override)}: export accepts only run.dir=FOLDER")
    (run_dir,) = run_folders([run], config, overrides or [])
    found = write(run_dir, folder, checkpoint, weights.value, ignore if quiet else note)
    step = found.info["step"]
    about = {"folder": str(folder), "run": str(run_dir), "step": step, "weights": found.kind, "to": to}
    show(about, f"{folder}: {run_dir} step {step:,} ({found.kind} weights)", as_json)
