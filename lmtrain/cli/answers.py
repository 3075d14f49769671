"""`lmtrain generate` once its options are read: completes prompts and prints the texts."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lmtrain.cli import terminal
from lmtrain.cli.output import note
from lmtrain.errors import LmtrainError
from lmtrain.generation.attention import MOST_WORDS, pool_weights
from lmtrain.generation.complete import Completed, as_json, complete
from lmtrain.generation.options import Options
from lmtrain.generation.picture import save, word_map
from lmtrain.generation.prompts import Prompt, batches
from lmtrain.generation.words import unseen_words
from lmtrain.generation.writing import as_read
from lmtrain.model.trained import Trained
from lmtrain.system.escapes import for_terminal, in_one_line, to_json
from lmtrain.system.runtime import enough_memory

REMEDY = "lower --batch-size, --samples, --beams or --max-tokens"


@dataclass(frozen=True)
class Output:
    """How results are printed: as JSON or text, for how many prompts at a time, and where a picture is saved."""

    json: bool
    batch_size: int
    picture: Path | None


def answer(trained: Trained, options: Options, prompt: str, output: Output) -> None:
    """Print the texts for one prompt, word by word on a terminal."""
    read = as_read(trained.tokenizer, prompt, options)
    _warn(trained, read)
    if output.picture is not None and not output.picture.parent.is_dir():
        raise LmtrainError(f"the folder of {output.picture} does not exist: make it first")
    if sys.stdout.isatty() and terminal.can_stream(options) and not output.json:
        with enough_memory(REMEDY):
            completed = terminal.stream(trained, prompt, options)
    else:
        (completed,) = _complete(trained, options, [Prompt(1, prompt)], 0, output.json)
    if output.picture is not None:
        _draw(trained, read, completed, output.picture)


def answer_all(trained: Trained, options: Options, prompts: Iterator[Prompt], output: Output) -> None:
    """Print the texts for many prompts, one batch at a time as they are read."""
    count = unseen = cut = 0
    for batch in batches(prompts, output.batch_size):
        _complete(trained, options, batch, count, output.json)
        count += len(batch)
        read = [as_read(trained.tokenizer, prompt.text, options) for prompt in batch]
        unseen += sum(bool(unseen_words(trained.tokenizer, text)) for text in read)
        cut += sum(_length(trained, text) > trained.config.model.context for text in read)
    if unseen:
        note(f"{unseen:,} of {count:,} prompts have words that are not in the vocabulary, read as <unk>")
    if cut:
        note(f"{cut:,} of {count:,} prompts are longer than the context {trained.config.model.context:,}: cut in front")


def converse(trained: Trained, options: Options) -> None:
    """Ask for prompts on the terminal and answer each."""

    def reply(prompt: str, number: int) -> None:
        _warn(trained, as_read(trained.tokenizer, prompt, options))
        if terminal.can_stream(options):
            with enough_memory(REMEDY):
                terminal.stream(trained, prompt, options, number)
        else:
            _complete(trained, options, [Prompt(number, prompt)], number, False)

    terminal.converse(reply)


def _complete(
    trained: Trained, options: Options, prompts: list[Prompt], first: int, json_wanted: bool
) -> list[Completed]:
    """Complete and print some prompts, of which the first has the number `first`."""
    texts = [prompt.text for prompt in prompts]
    with enough_memory(REMEDY):
        completed = complete(trained.model, trained.tokenizer, texts, options, first=first, step=trained.take_step)
    _print(trained, prompts, completed, json_wanted)
    return completed


def _print(trained: Trained, prompts: list[Prompt], completed: list[Completed], json_wanted: bool) -> None:
    about = {"run": str(trained.run_dir), "step": trained.step, "weights": trained.weights}
    for prompt, result in zip(prompts, completed, strict=True):
        if json_wanted:
            print(to_json({"id": prompt.id, **as_json(result), **about}))
            continue
        for completion in result.completions:
            text = (result.shown + completion.text).removesuffix("\n")
            scored = f"{completion.score:.4f}\t{in_one_line(text)}" if len(result.completions) > 1 else text
            print(for_terminal(scored))
    sys.stdout.flush()


def _length(trained: Trained, prompt: str) -> int:
    return len(trained.tokenizer.encode(prompt))


def _warn(trained: Trained, prompt: str) -> None:
    """Report what the model can't read of a prompt, which has already been prepared by `as_read`."""
    if not prompt.strip():
        note("the prompt is empty: starting at the beginning of a line")
    if unseen := unseen_words(trained.tokenizer, prompt):
        note(f"not in the vocabulary, read as <unk>: {', '.join(unseen)}")
    length, context = _length(trained, prompt), trained.config.model.context
    if length > context:
        note(f"the prompt has {length:,} tokens and the context {context:,}: only the last {context:,} are read")


def _draw(trained: Trained, prompt: str, completed: Completed, path: Path) -> None:
    """Draw the attention weights of the pool for each token of the best text; `prompt` is as `as_read` gives it."""
    ids = completed.completions[0].ids
    if not ids:
        raise LmtrainError(f"no text to draw into {path}: the options allowed no token")
    rows, columns, weights = pool_weights(trained.model, trained.tokenizer, prompt, ids)
    if len(rows) < len(ids):
        note(f"{path} shows the first {MOST_WORDS} words of the text")
    save(word_map(rows, columns, weights), path)
    note(f"attention weights of the pool: {path}")
