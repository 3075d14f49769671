"""Text on a terminal: written word by word as it is made, and asked for line by line.

Ctrl-C ends the text that is being made; at the prompt it clears the line. Ctrl-D leaves.
"""

import importlib.util
import sys
from collections.abc import Callable

from lmtrain.errors import LmtrainError
from lmtrain.generation.complete import Completed, complete
from lmtrain.generation.options import Options
from lmtrain.generation.stops import Stops
from lmtrain.generation.writing import Writer
from lmtrain.model.trained import Trained
from lmtrain.system.escapes import escaped, for_terminal
from lmtrain.system.signals import forget

ASK = "> "


def can_stream(options: Options) -> bool:
    """Whether the text can be written while it is made: there is one, and nothing later can displace it."""
    return options.beams == 1 and options.samples == 1


def stream(trained: Trained, prompt: str, options: Options, first: int = 0) -> Completed:
    """Write the prompt and its text to standard output, each word as it is made; `first` is the prompt's number."""
    stops = Stops(trained.tokenizer, options.stop, options.stop_strings)
    writer = Writer(trained.tokenizer, prompt, options, stops)
    _write(writer.prompt)
    text = []

    def watch(_row: int, token: int) -> None:
        text.append(writer.push(token))
        _write(text[-1])

    (completed,) = complete(
        trained.model, trained.tokenizer, [prompt], options, first=first, watch=watch, step=trained.take_step
    )
    text.append(writer.close())
    _write(text[-1] + ("" if "".join(text).endswith("\n") else "\n"))
    return completed


def converse(reply: Callable[[str, int], None]) -> None:
    """Ask for prompts on the terminal until Ctrl-D; `reply` writes the answer to each, given with its number."""
    if importlib.util.find_spec("readline"):
        import readline  # noqa: F401 -- gives `input` its line editing and its history
    number = 0
    while (prompt := _ask()) is not None:
        if not prompt:
            continue
        try:
            reply(prompt, number)
        except KeyboardInterrupt:
            forget()
            _write("\n")
        except LmtrainError as error:
            print(escaped(f"lmtrain: {error}"), file=sys.stderr)
        number += 1


def _ask() -> str | None:
    """A line from the terminal, empty after Ctrl-C; None at its end."""
    try:
        if sys.stdout.isatty():
            return input(ASK)
        print(ASK, end="", file=sys.stderr, flush=True)
        return input()
    except KeyboardInterrupt:
        forget()
        print(file=sys.stderr)
        return ""
    except EOFError:
        print(file=sys.stderr)
        return None
    except UnicodeDecodeError:
        print("lmtrain: that is not UTF-8 text", file=sys.stderr)
        return ""


def _write(text: str) -> None:
    if text:
        print(for_terminal(text), end="", flush=True)
