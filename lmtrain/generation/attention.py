"""How the pool weighted the tokens before each generated one.

Shapes: N generated tokens shown, T tokens that any of them could attend to, H heads.
"""

from collections.abc import Sequence

import numpy as np
import torch

from lmtrain.data.tokenizer import Tokenizer
from lmtrain.generation.complete import model_input
from lmtrain.model.language_model import LanguageModel

MAX_ROWS, MAX_COLUMNS = 48, 256
"""A larger picture is not readable."""


@torch.no_grad()
def pool_weights(
    model: LanguageModel, tokenizer: Tokenizer, prompt: str, ids: Sequence[int]
) -> tuple[list[str], list[str], np.ndarray]:
    """The first 48 generated tokens, the last 256 tokens that they could attend to, and the weights (H, N, T).

    Each token is predicted from what the model held at that step: where its context was full, only its end (see
    `LanguageModel.step`). A row's weights sum to 1 over all tokens that it could attend to, and are 0 elsewhere.
    """
    context = model.config.context
    device = next(model.parameters()).device
    inputs = model_input(tokenizer, tokenizer.encode(prompt), context)
    shown = list(ids[:MAX_ROWS])
    stream = [*inputs, *shown[:-1]]
    weights = np.zeros((model.config.heads, len(shown), len(stream)), np.float32)
    first = 0
    for row in range(len(shown)):
        end = len(inputs) + row
        if end - first > context:
            first = end - (max(1, context // 2) if model.causal else context)
        tokens = torch.tensor([stream[first:end]], device=device)
        weights[:, row, first:end] = model.pool_weights(tokens).cpu().numpy()
    start = max(int(weights.any(axis=(0, 1)).argmax()), len(stream) - MAX_COLUMNS)
    columns = [tokenizer.token(index) for index in stream[start:]]
    return [tokenizer.token(index) for index in shown], columns, weights[:, :, start:]
