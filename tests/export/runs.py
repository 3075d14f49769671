"""Runs that were never trained, of any model and tokenizer."""

from pathlib import Path

import torch
from torch import Tensor

from lmtrain.config.schema import Config, ModelConfig
from lmtrain.data.tokenizer import Tokenizer
from lmtrain.model.build import build_model
from lmtrain.storage import checkpoint, run_folder
from tests.data.helpers import TRAINED

CONTEXT = 12


def stored_run(folder: Path, tokenizer: Tokenizer = TRAINED["word"], **fields: object) -> Path:
    """A run whose only checkpoint has random weights: two blocks of width 8, with these fields of the model."""
    sizes = {"context": CONTEXT, "dim": 8, "layers": 2, "heads": 2, "ff_dim": 16}
    model = ModelConfig.model_validate(sizes | fields)
    torch.manual_seed(0)
    weights: dict[str, Tensor] = dict(build_model(model, tokenizer.vocab_size).named_parameters())
    with torch.no_grad():
        weights["embedding.weight"].mul_(10)  # else all words are about equally likely
        if "output.weight" in weights:
            weights["output.weight"].mul_(10)
    run_folder.create_run(folder, Config(model=model))
    tokenizer.save(folder / run_folder.TOKENIZER)
    info = {"score": 1.25, "tokenizer": tokenizer.sha256, "model": model.model_dump(mode="json")}
    checkpoint.save(folder, 7, {"model": weights}, info)
    return folder
