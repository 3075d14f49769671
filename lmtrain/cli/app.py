"""The command line: parse, call one function, print. Results go to stdout, everything else to stderr.

torch and datasets are imported inside the commands, so that help and completion answer at once.
"""

import io
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from lmtrain import __version__
from lmtrain.cli import evaluate as eval_command
from lmtrain.cli import generate as generate_command
from lmtrain.cli.options import (
    ConfigFile,
    DataDir,
    Force,
    Json,
    Quiet,
    Resume,
    Revision,
    Source,
    Subset,
    TextColumn,
    as_overrides,
)
from lmtrain.cli.output import floor, note, show, show_costs, show_profile, table
from lmtrain.errors import LmtrainError, SaidElsewhere, UsageError
from lmtrain.system.escapes import with_lines
from lmtrain.system.launcher import is_distributed, is_main_process
from lmtrain.system.signals import INTERRUPTED

if TYPE_CHECKING:
    from lmtrain.config.schema import Config

WRONG_USAGE = 2
PARSER_ERROR: type[BaseException] = typer.BadParameter.__mro__[1]
"""Any mistake on the command line; typer exports only this kind of it by name."""

app = typer.Typer(
    name="lmtrain",
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Run the command line; a mistake of the user's ends in one sentence, without a traceback, and exit code 1, or 2
    where the command itself is wrong."""
    threading.excepthook = _thread_failed
    try:
        status = app(prog_name="lmtrain", standalone_mode=False)
        if status:
            raise SystemExit(status)
    except PARSER_ERROR as error:
        shown = io.StringIO()
        error.show(shown)  # type: ignore[attr-defined]
        print(with_lines(shown.getvalue()), end="", file=sys.stderr)
        raise SystemExit(WRONG_USAGE) from None
    except SaidElsewhere:
        raise SystemExit(1) from None
    except LmtrainError as error:
        _fail(str(error), WRONG_USAGE if isinstance(error, UsageError) else 1)
    except MemoryError:
        _fail("out of memory: lower train.micro_batch, train.batch_size or the model's size")
    except UnicodeEncodeError as error:
        _fail(f"{error.object[error.start]!r} can't be written in {error.encoding}: set PYTHONIOENCODING=utf-8")
    except OSError as error:
        _fail(f"{error.filename or 'input or output'}: {error.strerror or error}")


def _thread_failed(failure: threading.ExceptHookArgs) -> None:
    """TensorBoard writes in a thread, and raises what went wrong there again in the main one: say it once."""
    if not isinstance(failure.exc_value, OSError):
        threading.__excepthook__(failure)


def _fail(message: str, status: int = 1) -> NoReturn:
    if is_distributed():
        from lmtrain.system.distributed import report_once

        report_once(message, _complain)
    else:
        _complain(message)
    raise SystemExit(status)


def _complain(message: str) -> None:
    note(f"lmtrain: {message}")


def _refuse_several(command: str) -> None:
    """Training alone is shared between processes."""
    if is_distributed():
        _fail(f"{command} is work for one process: start it without torchrun, which has started several", WRONG_USAGE)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"lmtrain {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Train language models from end to end: download, tokenize, train, eval, generate."""
    if context.invoked_subcommand not in (None, "train"):
        _refuse_several(context.invoked_subcommand)


@app.command(epilog="Example: lmtrain download wikitext-2")
def download(
    source: Source = None,
    config: ConfigFile = None,
    subset: Subset = None,
    revision: Revision = None,
    text_column: TextColumn = None,
    data_dir: DataDir = None,
    force: Force = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Bring a corpus from the hub, local files, or built in.

    It is kept in the data folder, and left alone while it is unchanged.
    """
    from lmtrain.data.corpus import download as make_corpus
    from lmtrain.data.corpus import each

    resolved = _load_config(config, _data_overrides(source, subset, revision, text_column, data_dir))
    for data in each(resolved.data):
        corpus = make_corpus(data, force=force, note=note, progress=not quiet)
        counts = {split: corpus.manifest["splits"][split] for split in corpus.splits}
        show({"folder": str(corpus.folder), **corpus.manifest}, f"{corpus.folder}\n{table(counts)}", as_json)


@app.command(epilog="Example: lmtrain tokenize wikitext-2 --kind bpe --vocab-size 8192")
def tokenize(
    source: Source = None,
    config: ConfigFile = None,
    subset: Subset = None,
    revision: Revision = None,
    text_column: TextColumn = None,
    kind: Annotated[str | None, typer.Option(help="word, bpe or byte.")] = None,
    vocab_size: Annotated[int | None, typer.Option(help="Entries at most.")] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="A tokenizer.json to use, a run's for example, in place of training one.")
    ] = None,
    data_dir: DataDir = None,
    force: Force = False,
    verify: Annotated[bool, typer.Option("--verify", help="Check every file, even those checked before.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train a tokenizer, or take one that is there, and write a corpus as ids.

    Brings the corpus first if it isn't there. The tokenizer is trained on the training split alone.
    """
    from lmtrain.data.prepare import prepare_store

    overrides = _data_overrides(source, subset, revision, text_column, data_dir)
    if tokenizer is not None and (kind, vocab_size) != (None, None):
        raise UsageError("--tokenizer has a kind and a vocabulary of its own: leave --kind and --vocab-size out")
    overrides += as_overrides({"tokenizer.kind": kind, "tokenizer.vocab_size": vocab_size, "tokenizer.file": tokenizer})
    resolved = _load_config(config, overrides)
    store = prepare_store(resolved, force=force, verify=verify, note=note, progress=not quiet)
    units = ("tokens", "words", "lines", "bytes", "documents")
    counts = {split: {unit: store.manifest["splits"][split][unit] for unit in units} for split in store.splits}
    heading = f"{store.folder}\n{store.tokenizer.vocab_size:,} {store.tokenizer.kind} entries"
    show({"folder": str(store.folder), **store.manifest}, f"{heading}\n{table(counts)}", as_json)


@app.command(epilog="Example: lmtrain train --config configs/wikitext2.yaml model.dim=512 train.max_minutes=10")
def train(
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="SECTION.FIELD=VALUE", help="Configuration fields to set.")
    ] = None,
    config: ConfigFile = None,
    resume: Annotated[Resume, typer.Option(help="auto: go on from the last checkpoint. never: refuse.")] = Resume.auto,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Bring the data, print the configuration and the costs; train nothing.",
        ),
    ] = False,
    profile: Annotated[
        bool, typer.Option("--profile", help="Time a few steps, say where the time goes, write a trace; keep no model.")
    ] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train a model, or go on with one.

    Downloads and tokenizes first what isn't there. An interrupted run goes on from its last checkpoint.
    """
    if dry_run and profile:
        raise UsageError("--dry-run trains nothing and --profile times some steps: give one of them")
    if profile:
        _refuse_several("train --profile")
    if dry_run and not is_main_process():
        return
    from lmtrain.system.allocator import retain_heap

    retain_heap()
    from lmtrain.data.prepare import prepare_store

    resolved = _load_config(config, overrides or [])
    run_dir = resolved.run.dir / (resolved.run.name or _name_from(config))
    if dry_run or profile:
        store = prepare_store(resolved, note=note, progress=not quiet)
    if dry_run:
        from lmtrain.training.other_runs import check_other_runs

        check_other_runs(resolved, store)
        show_costs(resolved, store, as_json)
        return
    if profile:
        from lmtrain.training.profiling import profile_steps

        told = _say_nothing if quiet else note
        show_profile(profile_steps(resolved, store, run_dir / "profile", told), as_json)
        return
    from lmtrain.system.distributed import join_processes
    from lmtrain.training.loop import fit

    with join_processes(resolved.train.device, resolved.train.timeout_minutes) as processes:
        told = note if processes.is_main else _say_nothing
        with processes.main_first():
            store = prepare_store(resolved, note=told, progress=not quiet)
        outcome = fit(
            resolved, store, run_dir, resume=resume is Resume.auto, note=told, quiet=quiet, processes=processes
        )
    if not processes.is_main:
        raise typer.Exit(INTERRUPTED if outcome.score is None else 0)
    if outcome.score is None:
        note(f"interrupted at step {outcome.step:,}; the checkpoint is saved, and the same command goes on from it")
        raise typer.Exit(INTERRUPTED)
    score = outcome.score
    result = {"run": str(run_dir), "status": outcome.status, "step": outcome.step, "minutes": outcome.minutes}
    floors = f"{floor(store, 'valid')}{score.remark}"
    text = (
        f"{run_dir}: {outcome.status} at step {outcome.step:,} after {outcome.minutes:.1f} minutes; best checkpoint: "
        f"step {outcome.best_step:,}, valid word perplexity {score.word_perplexity:.2f}{floors}"
    )
    show({**result, "best_step": outcome.best_step, "valid": score.summary()}, text, as_json)


app.command("eval", epilog="Example: lmtrain eval --split test --stride 32 --cache eval.cache_weight=0.2")(
    eval_command.evaluate
)

app.command(
    cls=generate_command.GroupedCommand,
    epilog='Example: lmtrain generate "The river" --temperature 0.8 --stop sentence',
)(generate_command.generate)


def _data_overrides(
    source: str | None, subset: str | None, revision: str | None, text_column: str | None, data_dir: Path | None
) -> list[str]:
    given = {"source": source, "subset": subset, "revision": revision, "text_column": text_column, "dir": data_dir}
    return as_overrides({f"data.{key}": value for key, value in given.items()})


def _load_config(path: Path | None, overrides: list[str]) -> "Config":
    from lmtrain.config.loader import load

    return load(path, overrides)


def _name_from(config: Path | None) -> str:
    """The name of a run that is given none: the configuration file's, which must be one that `run.name` may be."""
    import re

    from lmtrain.config.schema import RUN_NAME

    if config is None:
        return "default"
    if re.match(RUN_NAME, config.stem) is None or not config.stem.isprintable():
        raise LmtrainError(f"--config {config}: a run can't be named {config.stem!r} after it: set run.name")
    return config.stem


def _say_nothing(_message: str) -> None:
    """Instead of a note."""
