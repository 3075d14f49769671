"""Prompts to texts: many prompts in one batch, each text the same as if its prompt were alone.

Shapes: P prompts, R = P times the texts drawn for each, T tokens of the longest prompt, V vocabulary.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lmtrain.data.tokenizer import Tokenizer
from lmtrain.errors import UsageError
from lmtrain.generation.beam import beam_search
from lmtrain.generation.options import Options
from lmtrain.generation.sampling import Watch, sample
from lmtrain.generation.search import Hypothesis, Rules, Step
from lmtrain.generation.stops import Stops
from lmtrain.generation.words import banned_ids, bias_of_ids
from lmtrain.generation.writing import as_read, write
from lmtrain.model.cuda_graph import step_function
from lmtrain.model.decoding_state import State
from lmtrain.model.language_model import LanguageModel


@dataclass(frozen=True)
class Completion:
    """A text that goes on from a prompt."""

    text: str
    """What was generated, as it follows the prompt, without what a stop rule cuts off."""
    ids: tuple[int, ...]
    """The generated ids, those included that a stop rule cuts off the text."""
    tokens: tuple[str, ...]
    """The ids for people to read."""
    token_log_probs: tuple[float, ...]
    """The model's own, in nats; see `Hypothesis`."""
    log_prob: float
    """Their sum."""
    score: float
    """log_prob / length ** alpha; after a beam search with the bias of its tokens in the sum."""
    reason: str
    """Why it ends: `length`, `line`, `sentence`, `document`, `stop string '...'`, or `nothing allowed`, where the rules
    left no token to go on with."""


@dataclass(frozen=True)
class Completed:
    """A prompt with its completions, best first."""

    prompt: str
    shown: str
    """The prompt as it is printed before a completion's text."""
    completions: list[Completion]
    first_token_seconds: float
    """From the start of the batch to the first token of its texts."""
    tokens_per_second: float
    """Of all texts of the batch together."""


@torch.no_grad()
def complete(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    options: Options | None = None,
    *,
    first: int = 0,
    watch: Watch | None = None,
    step: Step[State] | None = None,
) -> list[Completed]:
    """Continue each prompt.

    The model reads `<eos>` and the prompt (see `as_read`), as in evaluation, and of a longer prompt the last `context`
    tokens. What is drawn for a prompt depends on the seed, its number (`first` is that of the first prompt) and the
    draw's number, not on the batch. `watch(row, token)` hears of tokens as they are made, except in a beam search.
    `step` is how the model goes on, by default `step_function(model)`.

    Raises UsageError for banned or favoured words that are no tokens.
    """
    if not prompts:
        return []
    options = options or Options()
    stops = Stops(tokenizer, options.stop, options.stop_strings)
    rules = rules_of(tokenizer, options, stops)
    clock = _Clock(step or step_function(model))
    ids = [tokenizer.encode(as_read(tokenizer, prompt, options)) for prompt in prompts]
    log_probs, state = model.start(*_batch(model, tokenizer, ids))
    if options.beams > 1:
        found = beam_search(
            log_probs,
            state,
            clock.step,
            rules,
            beams=options.beams,
            results=options.results,
            alpha=options.alpha,
            stopping=options.stopping,
            prompts=ids,
        )
    else:
        found = _draw(log_probs, state, clock, rules, options, ids, first, watch)
    first_token, rate = clock.stop(sum(len(text.ids) for texts in found for text in texts))
    shown = [_shown(tokenizer, prompt, texts, options, stops) for prompt, texts in zip(prompts, found, strict=True)]
    return [
        Completed(prompt, before, completions[: options.results], first_token, rate)
        for prompt, (before, completions) in zip(prompts, shown, strict=True)
    ]


def rules_of(tokenizer: Tokenizer, options: Options, stops: Stops) -> Rules:
    """What the search has to keep to.

    Raises UsageError where it leaves no word, or names a word that is no token, and ValueError for numbers out of
    their range.
    """
    banned = banned_ids(tokenizer, options.ban, options.allow_unknown)
    if len(banned | (stops.end_ids if options.min_tokens > 1 else set())) >= tokenizer.vocab_size:
        raise UsageError("every word of the vocabulary is banned: leave out some --ban, or give --allow-unk")
    return Rules(
        max_tokens=options.max_tokens,
        min_tokens=options.min_tokens,
        end_ids=stops.end_ids,
        is_end=stops.is_end,
        banned=banned,
        bias=bias_of_ids(tokenizer, options.bias),
        no_repeat=options.no_repeat,
    )


def reads(tokenizer: Tokenizer, prompt_ids: Sequence[int], context: int) -> list[int]:
    """The ids with which the model starts."""
    return [tokenizer.eos_id, *prompt_ids][-context:]


def _batch(model: LanguageModel, tokenizer: Tokenizer, ids: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Tokens (P, T), padded on the left, and which of them are real, (P, T) bool."""
    read = [reads(tokenizer, prompt, model.config.context) for prompt in ids]
    longest = max(map(len, read))
    device = next(model.parameters()).device
    padded = [[tokenizer.eos_id] * (longest - len(row)) + row for row in read]
    valid = [[False] * (longest - len(row)) + [True] * len(row) for row in read]
    return torch.tensor(padded, device=device), torch.tensor(valid, device=device)


def _draw(
    log_probs: Tensor,
    state: State,
    clock: "_Clock",
    rules: Rules,
    options: Options,
    ids: Sequence[Sequence[int]],
    first: int,
    watch: Watch | None,
) -> list[list[Hypothesis]]:
    """The `samples` texts of each prompt, best first; greedy at temperature 0."""
    count = options.samples
    if count > 1:
        rows = torch.arange(len(ids), device=log_probs.device).repeat_interleave(count)
        log_probs, state = log_probs[rows], state.select(rows)
    found = sample(
        log_probs,
        state,
        clock.step,
        rules,
        options.sampling,
        streams=[f"{options.seed} {first + prompt} {number}" for prompt in range(len(ids)) for number in range(count)],
        prompts=[prompt for prompt in ids for _ in range(count)],
        watch=watch,
    )
    scored = [
        Hypothesis(text.ids, text.token_log_probs, text.score / max(1, len(text.ids)) ** options.alpha, text.finished)
        for text in found
    ]
    drawn = [scored[start : start + count] for start in range(0, len(scored), count)]
    return [sorted(texts, key=lambda text: -text.score) for texts in drawn]


def _shown(
    tokenizer: Tokenizer, prompt: str, texts: Sequence[Hypothesis], options: Options, stops: Stops
) -> tuple[str, list[Completion]]:
    """The prompt and its completions as they are written."""
    before, completions = prompt, []
    for text in texts[: options.results]:
        before, written = write(tokenizer, prompt, text.ids, options, stops)
        completions.append(
            Completion(
                text=written,
                ids=text.ids,
                tokens=tuple(tokenizer.token(index) for index in text.ids),
                token_log_probs=text.token_log_probs,
                log_prob=sum(text.token_log_probs),
                score=text.score,
                reason=_reason(text, options, stops),
            )
        )
    return before, completions


def _reason(text: Hypothesis, options: Options, stops: Stops) -> str:
    ending = stops.ending(text.ids) if text.finished else None
    if ending is not None:
        return ending.reason
    return "length" if len(text.ids) == options.max_tokens else "nothing allowed"


class _Clock:
    """The model's step function, and the times of one batch.

    The first step is asked for when the first tokens are known.
    """

    def __init__(self, step: Step[State]) -> None:
        self._step = step
        self._start = time.perf_counter()
        self._first: float | None = None

    def step(self, state: State, tokens: Tensor) -> tuple[Tensor, State]:
        if self._first is None:
            self._first = time.perf_counter()
        return self._step(state, tokens)

    def stop(self, tokens: int) -> tuple[float, float]:
        """Seconds to the first token, and tokens per second over the whole."""
        end = time.perf_counter()
        return (self._first or end) - self._start, tokens / max(end - self._start, 1e-9)


def as_json(completed: Completed) -> dict[str, Any]:
    """Everything about one prompt, as plain values."""
    return {
        "prompt": completed.prompt,
        "completions": [vars(completion) for completion in completed.completions],
        "timings": {
            "first_token_seconds": completed.first_token_seconds,
            "tokens_per_second": completed.tokens_per_second,
        },
    }
