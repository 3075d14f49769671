"""The Typer app, assembled from the commands, and the exit codes. Commands import torch and datasets when they run, so
that help and shell completion answer at once."""

import io
import sys
import threading
from typing import Annotated, Any, NoReturn

import typer

from lmtrain import __version__
from lmtrain.cli import data, evaluate, export, generate, train
from lmtrain.cli.options import Command
from lmtrain.errors import AlreadyReported, LmtrainError, UsageError
from lmtrain.system import launcher
from lmtrain.system.allocator import retain_heap
from lmtrain.system.messages import escaped_lines, log

WRONG_USAGE = 2
PARSER_ERROR: Any = typer.BadParameter.__mro__[1]
"""The parser's base class of all usage errors; typer exports only its subclass BadParameter."""
HINT = "A field is set without dashes, as section.field=value; a prompt that begins with - needs -- before it."

app = typer.Typer(
    name="lmtrain",
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command(cls=Command, epilog="Example: lmtrain download wikitext-2")(data.download)
app.command(cls=Command, epilog="Example: lmtrain tokenize wikitext-2 tokenizer.kind=bpe tokenizer.vocab_size=8192")(
    data.tokenize
)
app.command(
    cls=Command, epilog="Examples: lmtrain train book.txt; lmtrain train -c wikitext2-cpu train.max_minutes=20"
)(train.train)
app.command("eval", cls=Command, epilog="Example: lmtrain eval --split test --cache eval.stride=32")(evaluate.evaluate)
app.command(cls=Command, epilog='Example: lmtrain generate "The river" --stop sentence --samples 3')(generate.generate)
app.command(cls=Command, epilog="Example: lmtrain export book book-hf")(export.export)


def _print_version(is_set: bool) -> None:
    if is_set:
        print(f"lmtrain {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Train language models from end to end: download, tokenize, train, eval, generate, export."""
    if context.invoked_subcommand in ("train", "eval", "generate"):  # those that compute, before they import torch
        retain_heap()


def main() -> None:
    """Run the command line. An expected failure prints one message without a traceback and exits with 1, or with 2 if
    the command itself is wrong."""
    threading.excepthook = _thread_failed
    try:
        status = app(prog_name="lmtrain", standalone_mode=False)
        if status:
            raise SystemExit(status)
    except PARSER_ERROR as error:
        shown = io.StringIO()
        error.message = error.message.removeprefix("Value error, ")  # of pydantic, which newer versions of typer use
        error.show(shown)
        if hasattr(error, "possibilities"):  # an unknown option
            print(HINT, file=shown)
        print(escaped_lines(shown.getvalue()), end="", file=sys.stderr)
        raise SystemExit(WRONG_USAGE) from None
    except AlreadyReported:
        raise SystemExit(1) from None
    except LmtrainError as error:
        _fail(str(error), WRONG_USAGE if isinstance(error, UsageError) else 1)
    except MemoryError:
        _fail("out of memory")
    except UnicodeEncodeError as error:
        remedy = "rename the file" if error.encoding == "utf-8" else "set PYTHONIOENCODING=utf-8"
        _fail(f"{error.object[error.start]!r} can't be written in {error.encoding}: {remedy}")
    except OSError as error:
        _fail(f"{error.filename or 'input or output'}: {error.strerror or error}")


def _thread_failed(failure: threading.ExceptHookArgs) -> None:
    """Print the traceback of a thread's error, except an OSError: that of TensorBoard's writer thread is raised again
    in the main thread, which reports it."""
    if not isinstance(failure.exc_value, OSError):
        threading.__excepthook__(failure)


def _fail(message: str, status: int = 1) -> NoReturn:
    if launcher.is_distributed():
        from lmtrain.system.distributed import report_once

        report_once(message)
    else:
        log.error(f"lmtrain: {message}")
    raise SystemExit(status)
