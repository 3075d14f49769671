"""Prompts in, texts out: what `lmtrain generate` does once its options are read."""

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
from lmtrain.system.memory import enough_memory

REMEDY = "lower --batch-size, --samples, --beams or --max-tokens"


@dataclass(frozen=True)
class Output:
    """How results are given: as JSON or text, for how many prompts at a time, and where a picture goes."""

    json: bool
    batch_size: int
    picture: Path | None


def answer(trained: Trained, options: Options, prompt: str, output: Output) -> None:
    """Print the texts for one prompt, word by word where that goes to a terminal."""
    read = as_read(trained.tokenizer, prompt, options)
    _warn(trained, read)
    if output.picture is not None and not output.picture.parent.is_dir():
        raise LmtrainError(f"the folder of {output.picture} does not exist: make it first")
    with enough_memory(REMEDY):
        if sys.stdout.isatty() and terminal.can_stream(options) and not output.json:
            completed = terminal.stream(trained, prompt, options)
        else:
            (completed,) = complete(trained.model, trained.tokenizer, [prompt], options, step=trained.take_step)
            _print(trained, [Prompt(1, prompt)], [completed], output.json)
    if output.picture is not None:
        _draw(trained, read, completed, output.picture)


def answer_all(trained: Trained, options: Options, prompts: Iterator[Prompt], output: Output) -> None:
    """Print the texts for many prompts, batch after batch as they are read."""
    count = unseen = cut = 0
    for batch in batches(prompts, output.batch_size):
        texts = [prompt.text for prompt in batch]
        with enough_memory(REMEDY):
            completed = complete(trained.model, trained.tokenizer, texts, options, first=count, step=trained.take_step)
        _print(trained, batch, completed, output.json)
        count += len(batch)
        read = [as_read(trained.tokenizer, text, options) for text in texts]
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
        with enough_memory(REMEDY):
            if terminal.can_stream(options):
                terminal.stream(trained, prompt, options, number)
            else:
                completed = complete(
                    trained.model, trained.tokenizer, [prompt], options, first=number, step=trained.take_step
                )
                _print(trained, [Prompt(number, prompt)], completed, False)

    terminal.converse(reply)


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
    """Say what the model can't read of a prompt, which is given as it reads it."""
    if not prompt.strip():
        note("the prompt is empty: starting at the beginning of a line")
    if unseen := unseen_words(trained.tokenizer, prompt):
        note(f"not in the vocabulary, read as <unk>: {', '.join(unseen)}")
    length, context = _length(trained, prompt), trained.config.model.context
    if length > context:
        note(f"the prompt has {length:,} tokens and the context {context:,}: only the last {context:,} are read")


def _draw(trained: Trained, prompt: str, completed: Completed, path: Path) -> None:
    """The picture of the best text after the prompt as it was read; the text's words are the tokens."""
    ids = completed.completions[0].ids
    if not ids:
        raise LmtrainError(f"there is no text to draw into {path}: the rules allowed no token")
    rows, columns, weights = pool_weights(trained.model, trained.tokenizer, prompt, ids)
    if len(rows) < len(ids):
        note(f"{path} shows the first {MOST_WORDS} words of the text")
    save(word_map(rows, columns, weights), path)
    note(f"what the pool looked at: {path}")
