"""Tokenizers and language models for tests of whole completions."""

import torch
from torch import Tensor

from lmtrain.config.schema import ModelConfig, TokenizerConfig
from lmtrain.data.tokenizer import Tokenizer
from lmtrain.model.build import build_model
from lmtrain.model.decoding_state import State, WindowState
from lmtrain.model.language_model import LanguageModel

NUMBERED = Tokenizer.train([" ".join(f"w{number}" for number in range(60))], TokenizerConfig(kind="word"))
"""Sixty words, w0 to w59."""


class Script(LanguageModel):
    """Predicts the tokens of a script, one after another, whatever it reads."""

    def __init__(self, tokenizer: Tokenizer, text: str) -> None:
        super().__init__(ModelConfig(context=8, dim=4, heads=1, layers=0), tokenizer.vocab_size)
        self.script = [*tokenizer.encode(text), tokenizer.eos_id]
        self.read: list[int] = []
        self.at = 0

    def start(self, tokens: Tensor, valid: Tensor | None = None, max_tokens: int | None = None) -> tuple[Tensor, State]:
        self.read, self.at = tokens[0].tolist(), 0
        return self._predict(), WindowState(tokens, torch.ones_like(tokens, dtype=torch.bool))

    def step(self, state: State, tokens: Tensor) -> tuple[Tensor, State]:
        self.at += 1
        return self._predict(), state

    def _predict(self) -> Tensor:
        scores = torch.full((1, self.vocab_size), -9.0)
        scores[0, self.script[self.at]] = -0.1
        return scores


def random_model(mode: str, tokenizer: Tokenizer, seed: int = 3) -> LanguageModel:
    torch.manual_seed(seed)
    config = ModelConfig(mode=mode, context=6, dim=8, layers=1, heads=2)
    model = build_model(config, tokenizer.vocab_size)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(2)  # far from uniform, so that no choice depends on rounding
    return model.eval()
