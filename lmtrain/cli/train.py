"""`lmtrain train`: training and resuming, and three programs that train nothing: fields, dry run and profile."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lmtrain.cli.options import ConfigFile, Json, Overrides, Quiet, require_single_process, run_name
from lmtrain.cli.output import floor, note, show, show_costs, show_profile
from lmtrain.errors import UsageError
from lmtrain.system import launcher
from lmtrain.system.signals import INTERRUPTED

if TYPE_CHECKING:
    from lmtrain.config.schema import Config


def train(
    overrides: Overrides = None,
    config: ConfigFile = None,
    fields: Annotated[
        bool, typer.Option("--fields", help="Describe the fields whose names begin with the arguments, or all.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Prepare the data, print the configuration and its costs; train nothing.")
    ] = False,
    profile: Annotated[
        bool,
        typer.Option("--profile", help="Time a few steps, print where the time goes, write a trace; save no model."),
    ] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train a model, or resume a run that was interrupted.

    Downloads and tokenizes the corpus first if that is missing.
    """
    if fields + dry_run + profile > 1:
        raise UsageError("--fields, --dry-run and --profile exclude each other: give one of them")
    if profile:
        require_single_process("train --profile")
    if (fields or dry_run) and not launcher.is_main_process():
        return
    if fields:
        _fields(overrides or [])
        return
    from lmtrain.system.allocator import retain_heap

    retain_heap()
    from lmtrain.config.loader import load

    settings = load(config, overrides or [])
    run_dir = settings.run.dir / (settings.run.name or run_name(config))
    if dry_run:
        _dry_run(settings, as_json, quiet)
    elif profile:
        _profile(settings, run_dir, as_json, quiet)
    else:
        _train(settings, run_dir, as_json, quiet)


def _fields(prefixes: list[str]) -> None:
    """Print the fields whose dotted names begin with one of `prefixes`."""
    from lmtrain.config.fields import as_text
    from lmtrain.config.schema import Config

    texts = {prefix: as_text(prefix) for prefix in prefixes or [""]}
    for prefix, text in texts.items():
        if not text:
            sections = ", ".join(Config.model_fields)
            raise UsageError(f"no field begins with {prefix!r}: the sections are {sections}")
    print("\n".join(texts.values()))


def _dry_run(config: "Config", as_json: bool, quiet: bool) -> None:
    """Prepare the data, check the configuration against it, and print what training would cost."""
    from lmtrain.data.prepare import prepare_store
    from lmtrain.training.other_runs import check_other_runs

    store = prepare_store(config, note=note, progress=not quiet)
    check_other_runs(config, store)
    show_costs(config, store, as_json)


def _profile(config: "Config", run_dir: Path, as_json: bool, quiet: bool) -> None:
    """Time a few steps."""
    from lmtrain.data.prepare import prepare_store
    from lmtrain.training.profiling import profile_steps

    store = prepare_store(config, note=note, progress=not quiet)
    show_profile(profile_steps(config, store, run_dir / "profile", _ignore if quiet else note), as_json)


def _train(config: "Config", run_dir: Path, as_json: bool, quiet: bool) -> None:
    """Train to the end of the budget, in every process of the run; the main process prints the outcome."""
    from lmtrain.data.prepare import prepare_store
    from lmtrain.system.distributed import join_processes
    from lmtrain.training.loop import fit

    with join_processes(config.train.device, config.train.timeout_minutes) as processes:
        message = note if processes.is_main else _ignore
        with processes.main_first():
            store = prepare_store(config, note=message, progress=not quiet)
        outcome = fit(config, store, run_dir, note=message, quiet=quiet, processes=processes)
    score = outcome.score
    if score is None:
        message(f"interrupted at step {outcome.step:,}; the checkpoint is saved: rerun the same command to resume")
        raise typer.Exit(INTERRUPTED)
    if processes.is_main:
        figures = {"run": str(run_dir), "status": outcome.status, "step": outcome.step, "minutes": outcome.minutes}
        text = (
            f"{run_dir}: {outcome.status} at step {outcome.step:,} after {outcome.minutes:.1f} minutes; "
            f"best checkpoint: step {outcome.best_step:,}, "
            f"valid {score.headline(store.tokenizer.kind, floor(store, 'valid'))}"
        )
        show({**figures, "best_step": outcome.best_step, "valid": score.summary()}, text, as_json)


def _ignore(_message: str) -> None:
    """Takes the place of `note` in processes that print nothing."""
