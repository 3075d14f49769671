"""A language model from its configuration: construction, and all initial weights."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lmtrain.config.schema import ModelConfig
from lmtrain.errors import LmtrainError
from lmtrain.model.language_model import LanguageModel
from lmtrain.model.windowed import WindowedLanguageModel
from lmtrain.nn.attention import ResidualProjection

FINAL_GAIN = 4.0
"""The final norm's initial gain."""


def build_model(config: ModelConfig, vocab_size: int) -> LanguageModel:
    """Return the model of a configuration with its initial weights, which come from torch's default generator.

    Raises LmtrainError if the vocabulary is too small.
    """
    model = construct(config, vocab_size)
    initialize(model)
    return model


def build_uninitialized(config: ModelConfig, vocab_size: int) -> LanguageModel:
    """Return the model with arbitrary weights: for loading, or to read shapes. Large weights occupy no memory until
    they are written."""
    with _SkipInitialization():
        return construct(config, vocab_size)


class _SkipInitialization(TorchFunctionMode):
    """Inside, layers do not write the initial values of their weights.

    Not the meta device, on which the tables computed at construction (positions, slopes) would be lost too.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        skipped = func in (nn.init.kaiming_uniform_, nn.init.uniform_, nn.init.normal_)
        return None if skipped else func(*args, **(kwargs or {}))


def construct(config: ModelConfig, vocab_size: int) -> LanguageModel:
    """Return the model of the configuration's mode, before `initialize`."""
    model_class = LanguageModel if config.mode == "causal" else WindowedLanguageModel
    try:
        return model_class(config, vocab_size)
    except ValueError as error:  # the one thing that a configuration can't be checked for without the vocabulary
        raise LmtrainError(f"model.output_cutoffs: {error}; set others, or model.output=softmax") from error


@torch.no_grad()
def initialize(model: LanguageModel) -> None:
    """Set the initial weights, from torch's default generator. Parameters that are not set here keep the values that
    their layers give them.

    n is the number of a matrix's inputs, E the embedding's width, N the number of blocks and pool.

    | parameter                           | initial value             | reason                                        |
    | ----------------------------------- | ------------------------- | --------------------------------------------- |
    | inner projections, in/out projection | normal, 1 / sqrt(n)       | keeps unit mean square                        |
    | `ResidualProjection`                | that / sqrt(2 N)          | 2 N sublayers add up to unit mean square      |
    | embedding, untied output layer      | normal, 1 / E             | a vector of unit mean square then gives       |
    |                                     |                           | logits of one at most, even for its own token. |
    |                                     |                           | The input is scaled to 1/2, which learns      |
    |                                     |                           | fastest. Training: `set_embedding`            |
    | learned positions                   | normal, 1/2               | as large as the scaled embedding              |
    | global tokens                       | normal, 1/2               | likewise                                      |
    | pooling seed                        | normal, 1 / sqrt(d_head)  | the pool starts close to a plain mean, or one |
    |                                     |                           | weighted by recency only                      |
    | pooling slopes                      | 4 .. 0.02, log-spaced     | several time scales from the start            |
    | output bias                         | 0                         | training: `set_output_bias`                   |
    | clusters of an adaptive output      | 0, their bias log(words)  | a cluster is as probable as its words         |
    | copying gate                        | 0, its bias -2            | an eighth of the prediction is the pointer's  |
    | norms                               | identity up to scale      |                                               |
    | final norm                          | FINAL_GAIN                | a gain of 1 takes long to grow to what        |
    |                                     |                           | confident predictions need                    |
    """
    config = model.config
    depth = 2 * (config.layers + 1)
    for module in model.modules():
        if isinstance(module, nn.Linear) and module is not model.output:
            scale = depth if isinstance(module, ResidualProjection) else 1
            module.weight.normal_(std=(module.in_features * scale) ** -0.5)
    width = model.embedding.embedding_dim
    model.embedding.weight.normal_(std=1 / width)
    for gain in model.norm.parameters():
        gain.mul_(FINAL_GAIN)
    if isinstance(model.output, nn.Linear):
        model.output.weight.normal_(std=1 / width)
    if model.position is not None:
        model.position.weight.normal_(std=0.5)
    if model.encoder.global_tokens is not None:
        model.encoder.global_tokens.normal_(std=0.5)
    if model.adaptive is not None:
        model.adaptive.clusters.weight.zero_()
    if model.copying is not None:
        model.copying.gate.weight.zero_()
    model.pool.seed.normal_(std=(config.dim // config.heads) ** -0.5)


@torch.no_grad()
def set_embedding(model: LanguageModel, vectors: Tensor) -> None:
    """Set the embedding, and an untied output layer, to vectors (V, E) of unit mean square, at their initial scale."""
    for weight in (model.embedding.weight, *model.output.parameters()):
        weight.copy_(vectors / model.embedding.embedding_dim)


@torch.no_grad()
def set_output_bias(model: LanguageModel, counts: Tensor) -> None:
    """Set the output bias to log((counts + 1) / their sum): counts (V,), how often each token occurs in training."""
    smoothed = counts.double() + 1
    model.output_bias.copy_((smoothed / smoothed.sum()).log())
    if model.adaptive is not None:
        model.adaptive.set_bias(model.output_bias)
