"""`lmtrain export`: a run as a folder that transformers loads."""

from pathlib import Path
from typing import Annotated

import typer

from lmtrain.cli.options import Checkpoint, Json, Quiet, WeightsChoice, run_folders
from lmtrain.cli.output import show


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run: its folder or name.")],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder to write, a new one.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="run.dir=FOLDER", help="The folder in which runs are found by name.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", metavar="FILE", help="Take run.dir from this file or recipe.")
    ] = None,
    checkpoint: Checkpoint = None,
    weights: WeightsChoice = "auto",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Export a run for Hugging Face's transformers.

    Writes a folder that transformers loads, with a model card.
    """
    from lmtrain.export.hugging_face import export as write

    (run_dir,) = run_folders("export", [run], config, overrides or [])
    exported = write(run_dir, folder, checkpoint, weights)
    step = exported.info["step"]
    about = {"folder": str(folder), "run": str(run_dir), "step": step, "weights": exported.weights}
    show(about, f"{folder}: {run_dir} step {step:,} ({exported.weights} weights)", as_json)
