"""The arguments and options that the commands share, and how a help page lists them."""

import logging
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from lmtrain.errors import UsageError
from lmtrain.system.messages import log_level

Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="SECTION.FIELD=VALUE", help="Configuration fields to set; `lmtrain train --fields` lists them."
    ),
]
Source = Annotated[
    str | None,
    typer.Argument(
        metavar="SOURCE",
        help="A text file, a folder, a hub id (owner/name), wikitext-2, wikitext-2-raw, wikitext-103, or sample (built "
        "in, the default).",
    ),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", "-c", metavar="FILE", help="A YAML file, or a recipe by its name, such as wikitext2-cpu."),
]
RunConfigFile = Annotated[
    Path | None,
    typer.Option("--config", "-c", metavar="FILE", help="Use the run that was trained with this file or recipe."),
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


def _set_log_level(context: typer.Context, quiet: bool) -> None:
    context.with_resource(log_level(logging.WARNING if quiet else logging.INFO))


Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="Only warnings and errors on stderr.", callback=_set_log_level)
]
Runs = Annotated[
    list[Path] | None,
    typer.Option(
        "--run",
        "-r",
        metavar="RUN",
        help="A run: its folder or name. Repeat it to average the probabilities of several runs. [default: the latest]",
    ),
]
Checkpoint = Annotated[
    str | None,
    typer.Option(
        "--checkpoint", metavar="STEP", help="best, last, or a step number. [default: the best undamaged one]"
    ),
]
Precision = Literal["auto", "fp32", "bf16", "fp16"]
DeviceChoice = Annotated[
    Literal["auto", "cpu", "cuda"], typer.Option("--device", help="Where to compute. auto: CUDA if available.")
]
WeightsChoice = Annotated[
    Literal["auto", "raw", "ema"], typer.Option("--weights", help="auto: EMA weights if the checkpoint has them.")
]

ACCEPTED = {
    "eval": ("eval", "data", "run.name", "run.dir"),
    "generate": ("run.name", "run.dir"),
    "export": ("run.dir",),
}
"""The fields and sections that the commands of a trained run accept: the rest is what it was trained with."""


class Command(TyperCommand):
    """A command whose help lists its options in groups and leaves out the Python types of its arguments."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments and options, group after group, in the order of their first members."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            if record := parameter.get_help_record(ctx):
                if parameter.param_type_name == "argument":
                    groups.setdefault("Arguments", []).append((record[0].partition(" <")[0], record[1]))
                else:
                    groups.setdefault(getattr(parameter, "rich_help_panel", None) or "Options", []).append(record)
        for name, records in groups.items():
            with formatter.section(name):
                formatter.write_dl(records)


def arguments(source: str | None, overrides: list[str] | None) -> list[str]:
    """Return the first argument, if there is one, and the overrides as one list."""
    return [*([] if source is None else [source]), *(overrides or [])]


def run_folders(command: str, runs: list[Path] | None, config: Path | None, overrides: list[str]) -> list[Path]:
    """Return the folders of the runs to use; the first of these that is given decides: `runs`, run.name in `overrides`
    or in the environment, run.name in the file `config`, the name of that file. Without any, it is the latest run.

    Raises UsageError if the command does not accept an override, and if `runs` and run.name are both given.
    """
    from lmtrain.config.loader import load_fields, overrides_of
    from lmtrain.config.mistakes import shown
    from lmtrain.storage.run_folder import default_name, find_run

    for override in overrides:
        if not overrides_of([override], *ACCEPTED[command]):
            forms = (f"{name}=VALUE" if "." in name else f"{name}.FIELD=VALUE" for name in ACCEPTED[command])
            raise UsageError(
                f"{shown(override)}: {command} accepts only its options (-h) and {', '.join(forms)}, because "
                "everything else is what the run was trained with"
            )
    if runs and overrides_of(overrides, "run.name"):
        raise UsageError("give --run or run.name, not both")
    settings = load_fields(config, overrides, "run.dir", "run.name").run
    if runs:
        return [find_run(run, settings.dir) for run in runs]
    name = settings.name or (default_name(config) if config is not None else None)
    return [find_run(None if name is None else settings.dir / name, settings.dir)]
