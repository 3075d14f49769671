"""`lmtrain export`: a run as a folder that transformers loads."""

from pathlib import Path
from typing import Annotated

import typer

from lmtrain.cli.options import Checkpoint, ConfigFile, Json, Overrides, Quiet, WeightsChoice, run_folders
from lmtrain.cli.output import show
from lmtrain.system.messages import ignore, note


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run: its folder or name.")],
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="The folder to write. An earlier export there is replaced.")
    ],
    overrides: Overrides = None,
    config: ConfigFile = None,
    checkpoint: Checkpoint = None,
    weights: WeightsChoice = "auto",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Export a run for Hugging Face's transformers.

    Writes a folder that transformers loads, with a model card. Of the configuration only run.dir has an effect: the
    folder of all runs.
    """
    from lmtrain.export.hugging_face import export as write

    (run_dir,) = run_folders([run], config, overrides or [], "run.dir=", rule="export accepts only run.dir=FOLDER")
    found = write(run_dir, folder, checkpoint, weights, ignore if quiet else note)
    step = found.info["step"]
    about = {"folder": str(folder), "run": str(run_dir), "step": step, "weights": found.kind}
    show(about, f"{folder}: {run_dir} step {step:,} ({found.kind} weights)", as_json)
