"""The recipe for your own text: sizes, regularization and budget that follow from the text and the machine.

It is used if there is no `--config`. Every field of it can be overridden.
"""

import math

from lmtrain.config.schema import Config, ModelConfig
from lmtrain.config.train import TrainConfig

MINUTES = 10.0
"""The budget if no field sets one."""
SIZES = (
    # core-minutes, width, blocks, training tokens per core-minute
    (60, 128, 4, 350_000),
    (240, 192, 6, 130_000),
    (1_200, 256, 8, 60_000),
    (math.inf, 384, 12, 22_000),
)
"""The size of the model by budget, and about how fast it trains, by which the passes over the text are estimated."""
DROPOUTS = (
    # passes over the text, dropout in the blocks, dropout of the input and the output
    (3, 0.0, 0.0),
    (8, 0.1, 0.1),
    (14, 0.1, 0.2),
    (28, 0.15, 0.3),
    (math.inf, 0.2, 0.4),
)
"""Dropout by the number of passes over the text: without it, a text that is read often is memorized."""
CONTEXT = 1_024
"""The longest window: a text, above all a program, repeats what came long before. Attention in the blocks is local, so
that long windows cost little more; the pool and the pointer read all of them."""
LARGE_VOCABULARY = 8_192
"""Above this, the output layer is most of a small model: an adaptive softmax of narrow embeddings costs a CPU less. On
a GPU the output is plain, so that the step can be captured as a CUDA graph."""


def automatic(
    tokens: int,
    vocab_size: int,
    cores: int,
    cuda: bool,
    minutes: float | None,
    epochs: float = math.inf,
    context: int | None = None,
) -> Config:
    """Return the recipe for a training text of `tokens` on a machine; without `minutes` another field sets the budget.

    `cores` are those of the CPU or, for a GPU, the number of them that would be as fast. The budget in core-minutes
    decides the size of the model; a budget that is not in minutes counts as `MINUTES`. The number of passes over the
    text, at most `epochs`, decides the dropout. `context` is given if something else decides it. A step reads 2,048
    tokens, but at most 4 windows; on a GPU 8,192 and 32.
    """
    work = (minutes or MINUTES) * cores
    width, blocks, speed = next(size for most, *size in SIZES if work <= most)
    passes = epochs if minutes is None else min(epochs, work * speed / tokens)
    inner, outer = next(dropouts for most, *dropouts in DROPOUTS if passes <= most)
    context = context or min(CONTEXT, 2 ** int(math.log2(max(8, tokens / 4))))
    is_large = vocab_size > LARGE_VOCABULARY
    tokens_per_step, most_windows = (8_192, 32) if cuda else (2_048, 4)
    return Config(
        model=ModelConfig(
            context=context,
            dim=width,
            embed_dim=128 if is_large else None,
            layers=blocks,
            heads=4,
            attention="local",
            attention_window=64,
            token_shift=True,
            copy=True,
            output="adaptive" if is_large and not cuda else "softmax",
            dropout=inner,
            input_dropout=outer,
            output_dropout=outer,
        ),
        train=TrainConfig(
            batch_size=max(1, min(most_windows, tokens_per_step // context)),
            max_minutes=minutes,
            optimizer="muon",
            lr=3e-3,
            schedule="linear",
            warmup=0.03,
            final_lr=0.0,
            ema=0.995,
        ),
    )
