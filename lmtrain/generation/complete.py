"""Prompts to texts, many prompts in one batch.

Shapes: P prompts, T tokens of the longest prompt.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lmtrain.data.tokenizer import Tokenizer
from lmtrain.generation.beam import beam_search
from lmtrain.generation.options import Options
from lmtrain.generation.sampling import OnToken, sample
from lmtrain.generation.search import Hypothesis
from lmtrain.generation.spacing import in_corpus_spacing
from lmtrain.generation.stops import Stops
from lmtrain.generation.text import TextStreamer
from lmtrain.model.cuda_graph import step_function
from lmtrain.model.ensemble import Predictor


@dataclass(frozen=True)
class Completion:
    """A generated text."""

    text: str
    """The text that follows the prompt, without what a stop rule cuts off."""
    ids: tuple[int, ...]
    """All generated ids: also those whose text a stop rule cuts off."""
    tokens: tuple[str, ...]
    """The ids in readable form."""
    token_log_probs: tuple[float, ...]
    """The log-probability of each id by the model, in nats; see `Hypothesis`."""
    log_prob: float
    """The sum of `token_log_probs`."""
    score: float
    """log_prob / length ** length_penalty."""
    reason: str
    """Why the text ends: `length`, `line`, `sentence`, `document`, or `stop string '...'`."""


@dataclass(frozen=True)
class PromptCompletions:
    """A prompt with its completions, best first."""

    prompt: str
    completions: list[Completion]
    tokens_per_second: float
    """Generated tokens of the whole batch per second."""


@torch.no_grad()
def complete(
    model: Predictor,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    options: Options,
    *,
    first: int = 0,
    on_token: OnToken | None = None,
) -> list[PromptCompletions]:
    """Continue each prompt.

    The model reads the prompt (see `in_corpus_spacing`) as part of a text: with a word tokenizer at the start of a
    line, after `<eos>`. An empty prompt is `<eos>`. A longer input is cut to its last `context` tokens.
    A sample depends on the seed, the prompt's number (`first` is that of the first prompt), and the sample's number, so
    in fp32 the batch changes a text only through rounding. `on_token(row, token)` is called with each token as it is
    generated, except in a beam search. `<unk>` is never generated.
    """
    if not prompts:
        return []
    start = time.perf_counter()
    blocked = [] if tokenizer.unk_id is None else [tokenizer.unk_id]
    ends = Stops(tokenizer, options).is_end
    ids = [tokenizer.encode(in_corpus_spacing(tokenizer, prompt)) for prompt in prompts]
    step = step_function(model)
    log_probs, state = model.start(*_padded(model, tokenizer, ids), options.max_tokens)
    if options.beams > 1:
        hypotheses = beam_search(log_probs, state, step, options, is_end=ends, blocked=blocked)
    else:
        count = options.samples
        if count > 1:
            rows = torch.arange(len(ids), device=log_probs.device).repeat_interleave(count)
            log_probs, state = log_probs[rows], state.select(rows)
        seeds = [f"{options.seed} {first + prompt} {number}" for prompt in range(len(ids)) for number in range(count)]
        read = [prompt for prompt in ids for _ in range(count)]
        texts = sample(
            log_probs, state, step, options, is_end=ends, blocked=blocked, seeds=seeds, prompts=read, on_token=on_token
        )
        groups = [texts[row : row + count] for row in range(0, len(texts), count)]
        hypotheses = [sorted(group, key=lambda text: -text.score) for group in groups]
    generated = sum(len(text.ids) for texts in hypotheses for text in texts)
    speed = generated / (time.perf_counter() - start)
    return [
        PromptCompletions(
            prompt,
            [_completion(tokenizer, prompt, text, options) for text in texts[: options.returned]],
            speed,
        )
        for prompt, texts in zip(prompts, hypotheses, strict=True)
    ]


def _padded(model: Predictor, tokenizer: Tokenizer, ids: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Return the model's input (P, T), padded on the left, and what is not padding, (P, T) bool."""
    # Other tokenizers have one `<eos>` per document: a model that has read few documents does not know what follows it.
    start = [tokenizer.eos_id] if tokenizer.kind == "word" else []
    inputs = [([*start, *prompt] or [tokenizer.eos_id])[-model.config.context :] for prompt in ids]
    longest = max(map(len, inputs))
    device = next(model.parameters()).device
    tokens = [[tokenizer.eos_id] * (longest - len(row)) + row for row in inputs]
    valid = [[False] * (longest - len(row)) + [True] * len(row) for row in inputs]
    return torch.tensor(tokens, device=device), torch.tensor(valid, device=device)


def _completion(tokenizer: Tokenizer, prompt: str, text: Hypothesis, options: Options) -> Completion:
    streamer = TextStreamer(tokenizer, prompt, options)
    final = [streamer.push(token) for token in text.ids]
    return Completion(
        text="".join(final) + streamer.close(),
        ids=text.ids,
        tokens=tuple(tokenizer.token(index) for index in text.ids),
        token_log_probs=text.token_log_probs,
        log_prob=sum(text.token_log_probs),
        score=text.score,
        reason=streamer.ending.reason,
    )
