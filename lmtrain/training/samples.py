"""What TensorBoard shows at each evaluation: continuations of prompts, and an image of the pooling weights."""

import torch

from lmtrain.config.schema import Config
from lmtrain.data.tokens import TokenStore
from lmtrain.generation.complete import complete
from lmtrain.generation.options import Options
from lmtrain.generation.sampling import Sampling
from lmtrain.model.language_model import LanguageModel
from lmtrain.training.monitor import Monitor

SAMPLING = Sampling(temperature=0.8, top_p=0.95)
IMAGE_TOKENS = 8


@torch.no_grad()
def show(model: LanguageModel, store: TokenStore, config: Config, step: int, monitor: Monitor) -> None:
    """Write a sample after each of `train.sample_prompts`, and how each head pools the start of the first document."""
    model.eval()
    device = next(model.parameters()).device
    prompts, options = config.train.sample_prompts, Options(max_tokens=config.train.sample_tokens, sampling=SAMPLING)
    for sample in complete(model, store.tokenizer, prompts, options):
        monitor.text(step, f"sample: {sample.prompt}", sample.shown + sample.completions[0].text)
    ids = store.split("valid").ids[: min(IMAGE_TOKENS, config.model.context)]
    if len(ids):
        tokens = torch.tensor(ids.astype("int64"), device=device)[None]
        weights = model.pool_weights(tokens).float().cpu().numpy()
        monitor.weights(step, "pooling weights", [store.tokenizer.token(int(token)) for token in ids], weights)
    model.train()
