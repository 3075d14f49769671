"""What the pool looked at when each word of a text was chosen.

Shapes: N generated tokens shown, T tokens that any of them could see, H heads.
"""

from collections.abc import Sequence

import numpy as np
import torch

from lmtrain.data.tokenizer import Tokenizer
from lmtrain.generation.complete import reads
from lmtrain.model.language_model import LanguageModel

MOST_WORDS, MOST_COLUMNS = 48, 256
"""A picture of more can't be read."""


@torch.no_grad()
def pool_weights(
    model: LanguageModel, tokenizer: Tokenizer, prompt: str, ids: Sequence[int]
) -> tuple[list[str], list[str], np.ndarray]:
    """The first 48 generated tokens, the last 256 tokens that they could see, and the weights (H, N, T).

    Every token is predicted from what the model had before it: where its context was full, from less (see
    `LanguageModel.step`). A row's weights sum to 1 over all that the token could see. A weight of 0 is also what a
    token has that came later or was not seen any more.
    """
    context = model.config.context
    device = next(model.parameters()).device
    read = reads(tokenizer, tokenizer.encode(prompt), context)
    shown = list(ids[:MOST_WORDS])
    everything = [*read, *shown[:-1]]
    weights = np.zeros((model.config.heads, len(shown), len(everything)), np.float32)
    first = 0
    for row in range(len(shown)):
        end = len(read) + row
        if end - first > context:
            first = end - (max(1, context // 2) if model.causal else context)
        tokens = torch.tensor([everything[first:end]], device=device)
        weights[:, row, first:end] = model.pool_weights(tokens).cpu().numpy()
    start = max(int(weights.any(axis=(0, 1)).argmax()), len(everything) - MOST_COLUMNS)
    columns = [tokenizer.token(index) for index in everything[start:]]
    return [tokenizer.token(index) for index in shown], columns, weights[:, :, start:]
