"""The recipe for a text of one's own: sizes, regularization and budget that follow from the text and the machine.

It is used where no configuration is given. Every field can be set beside it.
"""

import math

from lmtrain.config.loader import parse
from lmtrain.config.schema import Config

MINUTES = 10.0
"""The budget where none is given."""
TOKENS_PER_MINUTE = 300_000
"""Training tokens per minute and CPU core, of the models below; only the order of magnitude matters."""
GPU_CORES = 200
"""A GPU counts as so many CPU cores."""
LARGE_VOCABULARY = 8_192
"""From here on the output layer is most of a small model, so that it becomes an adaptive softmax."""


def automatic(tokens: int, vocab_size: int, cores: int, cuda: bool, minutes: float | None) -> Config:
    """The recipe for so many training tokens; with `minutes` None it has no budget, because there is another one.

    How often the text is read in the time decides: a small text is read many times, so that its model needs dropout and
    is small; a large one is hardly read once, so that nothing but speed counts.
    """
    passes = (minutes or MINUTES) * TOKENS_PER_MINUTE * (GPU_CORES if cuda else cores) / tokens
    dropout = 0.0 if passes < 4 else 0.1 if passes < 20 else 0.2 if passes < 60 else 0.3
    width = 128 if passes >= 4 else 256
    if cuda:
        width *= 2
    large = vocab_size > LARGE_VOCABULARY
    return parse(
        {
            "model": {
                "context": min(256, 2 ** int(math.log2(max(8, tokens / 4)))),
                "dim": width,
                "layers": 4 if width > 128 else 2,
                "heads": 4,
                "copy": True,
                "output": "adaptive" if large else "softmax",
                **({"embed_dim": 128} if large else {}),
                "dropout": dropout,
                "input_dropout": dropout,
                "output_dropout": dropout,
            },
            "train": {
                "batch_size": 32 if cuda else 4,
                "optimizer": "muon",
                "lr": 3e-3,
                "schedule": "linear",
                "warmup": 0.03,
                "final_lr": 0.0,
                **({"max_minutes": minutes} if minutes is not None else {}),
            },
        },
        "the automatic recipe",
    )
