"""Makes the stored run of the current checkpoint format, and prints its entry for tests/storage/test_old_formats.py.

    python -m tests.stored.make

It is for a new format: the stored runs of old formats stay as they are, to show that they can still be read.
"""

import os
import shutil
import tempfile
from pathlib import Path

import torch

import lmtrain
from lmtrain.config.loader import load
from lmtrain.config.schema import Config
from lmtrain.data.tokenizing import prepare_store
from lmtrain.data.tokens import TokenStore
from lmtrain.storage import checkpoint, run_checkpoints, run_folder
from lmtrain.training.loop import fit
from tests.helpers import state_hash

HERE = Path(__file__).parent
TEXT = "the river ran past the old mill and the mill stood still\n" * 40
OVERRIDES = [
    "data.source=text.txt",
    "tokenizer.kind=byte",
    "model.context=8",
    "model.dim=4",
    "model.layers=1",
    "model.heads=2",
    "model.ff_dim=8",
    "model.dropout=0.1",
    "train.device=cpu",
    "train.precision=fp32",
    "train.compile=false",
    "train.threads=1",
    "train.batch_size=4",
    "train.steps=10",
    "train.eval_steps=10",
    "train.keep=1",
    "train.ema=0.9",
]


def example() -> tuple[Config, TokenStore]:
    """The configuration, and its data in the working directory."""
    Path("text.txt").write_text(TEXT)
    config = load(None, OVERRIDES, {})
    return config, prepare_store(config)


def loss(run_dir: Path) -> float:
    """Nats per token of the start of the text under the stored EMA weights."""
    trained = lmtrain.load(run_dir, checkpoint="last", weights="auto", device="cpu")
    ids = torch.tensor([trained.tokenizer.encode(TEXT[:33])]).view(3, 11)
    with torch.no_grad():
        return float(trained.model(ids[:, :8], ids[:, 1:9]).mean())


def main() -> None:
    target = HERE / checkpoint.FORMAT.replace("/", "-")
    with tempfile.TemporaryDirectory() as temporary:
        os.chdir(temporary)
        fit(*example(), Path("run"))
        shutil.rmtree(target, ignore_errors=True)
        names = (".lock", run_folder.STATE, run_folder.METRICS, "events.*")
        shutil.copytree("run", target, ignore=shutil.ignore_patterns(*names))
        os.chdir(HERE)
    found = state_hash(checkpoint.load(run_checkpoints.choose(target, "last")))
    print(f'    "{target.name}": ("{found}", {loss(target):.6f}),')


if __name__ == "__main__":
    main()
