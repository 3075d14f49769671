"""`lmtrain train`: training and resuming; and `--fields`, `--dry-run` and `--profile`, which train no model."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lmtrain.cli.options import ConfigFile, Json, Overrides, Quiet, Source, arguments
from lmtrain.cli.output import show
from lmtrain.errors import UsageError
from lmtrain.system import launcher
from lmtrain.system.messages import log

if TYPE_CHECKING:
    from lmtrain.training.finished import Outcome
    from lmtrain.training.plan import RunPlan


def train(
    source: Source = None,
    overrides: Overrides = None,
    config: ConfigFile = None,
    resume: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="Resume this run with its own configuration; RUN: its folder or name."),
    ] = None,
    fields: Annotated[
        bool,
        typer.Option(
            "--fields", help="List the configuration fields under a prefix (`--fields train`), or all of them."
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Prepare the data, print the configuration and its sizes; train nothing.")
    ] = False,
    profile: Annotated[
        bool,
        typer.Option("--profile", help="Time a few steps, print where the time goes, write a trace; save no model."),
    ] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train a model, or resume an interrupted run.

    Downloads and tokenizes the corpus first if it is missing. Without --config, an existing run (run.name, by default
    the name of the text) is resumed with its own configuration; sizes and budget (10 minutes) of a new one follow from
    the text and the machine.
    """
    if fields + dry_run + profile > 1:
        raise UsageError("give only one of --fields, --dry-run and --profile")
    if fields:
        if as_json or config or resume:
            raise UsageError("--fields prints the defaults as text: leave --json, --config and --resume out")
        _fields(arguments(source, overrides))
        return
    from lmtrain.config.loader import with_source
    from lmtrain.training.plan import plan_run

    plan = plan_run(config, with_source(arguments(source, overrides)), resume)
    if dry_run:
        _dry_run(plan, as_json)
    elif profile:
        _profile(plan, as_json)
    else:
        from lmtrain.api.train import train_plan

        _show_outcome(plan.run_dir, train_plan(plan), as_json)


def _fields(prefixes: list[str]) -> None:
    """Print the fields whose dotted names begin with one of `prefixes`; all without any."""
    from lmtrain.config.fields import as_text
    from lmtrain.config.names import suggestion

    texts = {prefix: as_text(prefix) for prefix in prefixes or [""]}
    for prefix, text in texts.items():
        if not text:
            raise UsageError(f"no field begins with {prefix!r}{suggestion(prefix)}")
    print("\n".join(texts.values()))


def _dry_run(plan: "RunPlan", as_json: bool) -> None:
    """Print the configuration, and the sizes of the model, the data and the budget."""
    from lmtrain.config.loader import dump
    from lmtrain.training.announce import plan_lines, plan_sizes
    from lmtrain.training.plan import prepare

    config, store = prepare(plan)
    sizes = plan_sizes(config, store)
    lines = [dump(config).rstrip(), "---", *plan_lines(config, sizes, store.tokenizer.kind)]
    show({"config": config.model_dump(mode="json"), **sizes}, "\n".join(lines), as_json)


def _profile(plan: "RunPlan", as_json: bool) -> None:
    """Time a few steps; print where their time goes, and where the trace is."""
    from lmtrain.training.plan import prepare
    from lmtrain.training.profiling import profile_steps, profile_text

    result = profile_steps(*prepare(plan), plan.run_dir / "profile")
    show(result, f"{profile_text(result)}\n\n{result['trace']}: open it at ui.perfetto.dev", as_json)


def _show_outcome(run_dir: Path, outcome: "Outcome", as_json: bool) -> None:
    """Print how the run ended, in the main process."""
    if not launcher.is_main_process():
        return
    score = outcome.valid
    figures = {"run": str(run_dir), "status": outcome.status, "step": outcome.step, "minutes": outcome.minutes}
    heading = (
        f"{run_dir}: {outcome.status} at step {outcome.step:,} after {outcome.minutes:,.1f} minutes; the best "
        f"checkpoint, of step {outcome.best_step:,}, on valid (context {score.context}, stride {score.stride}):"
    )
    lines = [f"  {line}" for line in score.lines()]
    show({**figures, "best_step": outcome.best_step, "valid": score.summary()}, "\n".join([heading, *lines]), as_json)
    run, runs = shlex.quote(str(run_dir)), shlex.quote(str(run_dir.parent))
    log.info(f'next: lmtrain generate "Once" --run {run}; tensorboard --logdir {runs}')
