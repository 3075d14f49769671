"""The floating-point operations of a training step, for MFU (model FLOPs utilization)."""

from functools import lru_cache

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from lmtrain.config.schema import Config, ModelConfig
from lmtrain.data.tokens import TokenStore
from lmtrain.model.build import build_uninitialized
from lmtrain.model.language_model import LanguageModel
from lmtrain.training.compilation import blank_batch


def step_flops(model: LanguageModel, config: Config, store: TokenStore) -> float:
    """Return the floating-point operations of a training step: those of the matrix products, two per multiply-add.

    Both passes over a batch count, as on a CPU: masked scores count, except those that local attention skips in long
    sequences. The optimizer, recomputed activations and the teacher do not count. A tail of an adaptive output counts
    for its fraction of the training tokens.
    """
    rows = config.train.micro_batch_size
    flops = _matrix_products(config.model, model.vocab_size, rows) * config.train.batch_size / rows
    if model.adaptive is not None:
        counts = torch.from_numpy(store.split("train").counts(model.vocab_size))
        in_tails = model.adaptive.tail_logits_per_target(counts)
        flops += 6.0 * config.targets_per_step * in_tails * (config.model.embed_dim or config.model.dim)
    return flops


@lru_cache
def _matrix_products(config: ModelConfig, vocab_size: int, rows: int) -> int:
    """Return what torch counts in both passes of a micro-batch on fake tensors, without the tails of the output."""
    with FakeTensorMode(), FlopCounterMode(display=False) as counter:
        model = build_uninitialized(config, vocab_size)
        model.loss_chunk = None
        model(*blank_batch(config, rows, torch.device("cpu"))).sum().backward()
    return counter.get_total_flops()
