"""A trained run, read back: its model, its tokenizer, and text from a prompt."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lmtrain import checkpoint
from lmtrain.data.tokenizer import Tokenizer
from lmtrain.decoding.beam import beam_search
from lmtrain.decoding.search import Hypothesis, IsEnd, greedy
from lmtrain.errors import LmtrainError
from lmtrain.nn.language_model import LanguageModel
from lmtrain.schema import Config


@dataclass(frozen=True)
class Trained:
    """A run's model at one checkpoint, ready to use."""

    run_dir: Path
    config: Config
    tokenizer: Tokenizer
    model: LanguageModel
    step: int
    weights: str
    device: torch.device
    info: dict[str, Any]


def load_trained(run_dir: Path, which: str, weights: str, device: torch.device) -> Trained:
    """Load the checkpoint `which` (`best`, `last` or a step) with its `ema` or `raw` weights (`auto`: ema if kept).

    Raises LmtrainError when the checkpoint is damaged, has no such weights, or belongs to another tokenizer.
    """
    config = checkpoint.run_config(run_dir)
    tokenizer = Tokenizer.load(run_dir / checkpoint.TOKENIZER)
    folder = checkpoint.choose(run_dir, which)
    loaded = checkpoint.load(folder, groups=("model", "ema"))
    if weights == "ema" and "ema" not in loaded.tensors:
        raise LmtrainError(f"{folder} has no averaged weights: use --weights raw, or train with train.ema")
    if loaded.info.get("tokenizer") != tokenizer.sha256:
        raise LmtrainError(f"{run_dir / checkpoint.TOKENIZER} is not the tokenizer that {folder} was trained with")
    averaged = weights != "raw" and "ema" in loaded.tensors
    tensors = loaded.tensors["model"] | (loaded.tensors["ema"] if averaged else {})
    try:
        with torch.device("meta"):  # a configuration that asks for other shapes may ask for any amount of memory
            wanted = dict(LanguageModel(config.model, tokenizer.vocab_size).named_parameters())
        checkpoint.check_fit(tensors, wanted)
    except (RuntimeError, ValueError) as error:
        raise LmtrainError(f"{folder} does not fit {run_dir / checkpoint.CONFIG}: {error}") from error
    model = LanguageModel(config.model, tokenizer.vocab_size)
    model.load_state_dict(tensors)
    model.to(device).eval()
    return Trained(
        run_dir, config, tokenizer, model, loaded.info["step"], "ema" if averaged else "raw", device, loaded.info
    )


@dataclass(frozen=True)
class Completion:
    """A text that goes on from a prompt, with the search's own figures."""

    prompt: str
    text: str
    """What was generated, as it follows the prompt."""
    hypothesis: Hypothesis

    def summary(self) -> dict[str, Any]:
        """Everything, as plain values."""
        return {
            "prompt": self.prompt,
            "text": self.text,
            "score": self.hypothesis.score,
            "finished": self.hypothesis.finished,
            "ids": list(self.hypothesis.ids),
            "token_log_probs": list(self.hypothesis.token_log_probs),
        }


@torch.no_grad()
def complete(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    max_tokens: int,
    beams: int = 1,
    results: int = 1,
    alpha: float = 0.0,
    stop: str = "none",
    allow_unknown: bool = False,
) -> list[Completion]:
    """Continue `prompt` greedily (one beam) or by beam search; the best `results` texts, best first.

    The model reads `<eos>` and the prompt, as in evaluation, and of a longer prompt the last `context` tokens. `stop`
    ends a text at the end of a `line` or of a `document`. `<unk>` is not produced unless `allow_unknown`.
    """
    device = next(model.parameters()).device
    prompt_ids = tokenizer.encode(prompt)
    read = [tokenizer.eos_id, *prompt_ids][-model.config.context :]
    banned = {tokenizer.unk_id} if tokenizer.unk_id is not None and not allow_unknown else set()
    is_end = _end_rule(tokenizer, stop)
    log_probs, state = model.start(torch.tensor([read], device=device))
    if beams == 1:
        found = greedy(log_probs, state, model.step, max_tokens=max_tokens, is_end=is_end, banned=banned)
    else:
        (found,) = beam_search(
            log_probs,
            state,
            model.step,
            beams=beams,
            results=results,
            alpha=alpha,
            max_tokens=max_tokens,
            is_end=is_end,
            banned=banned,
        )
    return [Completion(prompt, _text(tokenizer, prompt_ids, hypothesis, stop), hypothesis) for hypothesis in found]


def unseen_words(tokenizer: Tokenizer, prompt: str) -> list[str]:
    """The words of a prompt that the model reads as `<unk>`."""
    if tokenizer.unk_id is None:
        return []
    return [word for word in prompt.split() if word != "<unk>" and tokenizer.encode(word) == [tokenizer.unk_id]]


def _end_rule(tokenizer: Tokenizer, stop: str) -> IsEnd:
    """When a generated text is over. A word-level document ends where the next one's heading, `= Title =`, begins."""
    if stop == "none":
        return lambda ids: False
    if stop == "line":
        return lambda ids: ids[-1] in tokenizer.line_end_ids
    if tokenizer.kind != "word":
        return lambda ids: ids[-1] == tokenizer.eos_id
    mark = tokenizer.encode("=")[0]
    return lambda ids: len(ids) > 2 and ids[-3] == tokenizer.eos_id and ids[-2] == mark != ids[-1]


def _text(tokenizer: Tokenizer, prompt_ids: Sequence[int], hypothesis: Hypothesis, stop: str) -> str:
    ids = list(hypothesis.ids)
    if hypothesis.finished and stop == "document" and tokenizer.kind == "word":
        ids = ids[:-2]
    before, whole = tokenizer.decode(prompt_ids), tokenizer.decode([*prompt_ids, *ids])
    return whole[len(before) :] if whole.startswith(before) else tokenizer.decode(ids)
