"""What `lmtrain generate` does with its options: complete prompts, which may be typed on a terminal."""

import signal
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from itertools import islice

from lmtrain.api.run import Run
from lmtrain.errors import LmtrainError
from lmtrain.generation.options import Options
from lmtrain.generation.spacing import in_corpus_spacing
from lmtrain.generation.text import TextStreamer, unknown_words
from lmtrain.system.machine import explain_out_of_memory
from lmtrain.system.messages import for_terminal, log, to_json
from lmtrain.system.signals import INTERRUPTED


def complete_prompts(
    trained: Run, options: Options, prompts: Iterator[str], batch_size: int, as_json_lines: bool
) -> None:
    """Read prompts, `batch_size` at a time, and print the texts for them; on a terminal, stream a single text."""
    is_single = options.beams == 1 and options.samples == 1  # its tokens are final when they are generated
    streams = sys.stdout.isatty() and is_single and not as_json_lines
    first = 0
    while batch := list(islice(prompts, batch_size)):
        _warn(trained, batch)
        with explain_out_of_memory("lower --batch-size, --samples, --beams or --max-tokens"):
            if streams and len(batch) == 1:
                _stream(trained, options, batch[0], first)
            else:
                _complete(trained, options, batch, first, as_json_lines)
        first += len(batch)


def typed_prompts() -> Iterator[str]:
    """Ask for prompts on the terminal, one after another, until Ctrl-D."""
    with suppress(ImportError):
        import readline  # noqa: F401 -- adds line editing and history to `input`
    log.info("Type a prompt and press Enter. Ctrl-D quits.")
    while True:
        previous = signal.signal(signal.SIGINT, signal.default_int_handler)  # with it, readline restores the terminal
        try:
            with redirect_stdout(sys.stdout if sys.stdout.isatty() else sys.stderr):  # where `input` writes its prompt
                prompt = input("prompt> ")
        except EOFError:
            print(file=sys.stderr)
            return
        except KeyboardInterrupt:
            print(file=sys.stderr)
            raise SystemExit(INTERRUPTED) from None
        except UnicodeDecodeError:
            raise LmtrainError("that prompt is not UTF-8 text: set the terminal to UTF-8") from None
        finally:
            signal.signal(signal.SIGINT, previous)
        yield prompt


def _stream(trained: Run, options: Options, prompt: str, number: int) -> None:
    """Write the `number`-th prompt, from 0, and its text to standard output, each word as it is generated."""
    streamer = TextStreamer(trained.tokenizer, prompt, options)
    _write(prompt)
    (completed,) = trained.complete(
        [prompt], options, first=number, on_token=lambda _row, token: _write(streamer.push(token))
    )
    is_ended = (prompt + completed.completions[0].text).endswith("\n")
    _write(streamer.close() + ("" if is_ended else "\n"))


def _complete(trained: Run, options: Options, prompts: list[str], first: int, as_json_lines: bool) -> None:
    """Complete and print a batch of prompts; the first has the number `first`."""
    for result in trained.complete(prompts, options, first=first):
        if as_json_lines:
            values = {
                "prompt": result.prompt,
                "completions": [vars(completion) for completion in result.completions],
                "timings": {"tokens_per_second": result.tokens_per_second},
                "seed": options.seed if options.temperature else None,
            }
            print(to_json({**values, **trained.about()}))
            continue
        for number, completion in enumerate(result.completions, start=1):
            if len(result.completions) > 1:
                nats = -completion.log_prob / len(completion.ids)
                scores = f"log-probability {completion.log_prob:.2f} ({nats:.2f} nats per token)"
                print(f"--- {number} of {len(result.completions)}: {scores}")
            print(for_terminal((result.prompt + completion.text).removesuffix("\n")))
    sys.stdout.flush()


def _warn(trained: Run, prompts: list[str]) -> None:
    """Warn of the parts of prompts that the model can't read."""
    tokenizer, context = trained.tokenizer, trained.config.model.context
    texts = [in_corpus_spacing(tokenizer, prompt) for prompt in prompts]
    if longest := max((length for text in texts if (length := len(tokenizer.encode(text))) > context), default=0):
        log.warning(f"a prompt has {longest:,} tokens and the context {context:,}: only the last {context:,} are read")
    if unknown := dict.fromkeys(word for text in texts for word in unknown_words(tokenizer, text)):
        log.warning(f"not in the vocabulary: {', '.join(unknown)[:200]}")


def _write(text: str) -> None:
    print(for_terminal(text), end="", flush=True)
