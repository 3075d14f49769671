"""What TensorBoard shows at each evaluation: continuations of prompts, and an image of the pooling weights."""

from dataclasses import replace

import torch

from lmtrain.config.schema import Config
from lmtrain.data.tokens import TokenStore
from lmtrain.generation.complete import complete
from lmtrain.generation.options import SAMPLED
from lmtrain.model.language_model import LanguageModel
from lmtrain.training.monitor import Monitor

IMAGE_TOKENS = 8


@torch.no_grad()
def show(model: LanguageModel, store: TokenStore, config: Config, step: int, monitor: Monitor) -> None:
    """Write a sample after each of `train.sample_prompts`, and how each head pools the start of the first document."""
    model.eval()
    device = next(model.parameters()).device
    prompts, options = config.train.sample_prompts, replace(SAMPLED, max_tokens=config.train.sample_tokens)
    for sample in complete(model, store.tokenizer, prompts, options):
        monitor.text(step, f"sample: {sample.prompt}", sample.shown + sample.completions[0].text)
    ids = store.split("valid").ids[: min(IMAGE_TOKENS, config.model.context)]
    if len(ids):
        tokens = torch.tensor(ids.astype("int64"), device=device)[None]
        weights = model.pool_weights(tokens).cpu().numpy()
        monitor.weights(step, "pooling weights", [store.tokenizer.token(int(token)) for token in ids], weights)
    model.train()
