"""Every kind of attention, post-norm, copying and the adaptive softmax learn on the sample corpus."""

from pathlib import Path

import pytest
import torch

import lmtrain
from lmtrain.config.schema import Config
from lmtrain.data.tokens import TokenStore
from lmtrain.generation.complete import complete
from lmtrain.generation.options import Options
from lmtrain.storage import run_folder
from tests.model import models
from tests.training.helpers import change, run, start, without_dropout

SIZES = {f"model__{field}": size for field, size in models.SIZES.items()}
LEARNING = {
    "train__micro_batch": None,
    "train__steps": 60,
    "train__log_steps": 60,
    "train__eval_steps": 60,
    "train__lr": 0.005,
    "train__ema": None,
}
EVERYWHERE = ("full", "local", "strided", *models.OWN_CACHE)
"""The kinds of attention of the layers of a run; those with global tokens are by themselves."""


def layered(kinds: tuple[str, ...]) -> dict[str, object]:
    return {"model__attention": kinds, "model__layers": len(kinds)}


@pytest.mark.parametrize(
    "fields",
    [
        layered(EVERYWHERE),
        layered(("local+global",)),
        {"model__norm_position": "post"},
        layered((*EVERYWHERE, "linformer", "induced")) | {"model__mode": "windowed", "model__position": "learned"},
        {"model__output": "adaptive", "model__mode": "windowed", "model__copy": True},
    ],
    ids=str,
)
def test_a_short_run_learns_and_generates(
    tiny: Config, store: TokenStore, tmp_path: Path, fields: dict[str, object]
) -> None:
    windowed = fields.get("model__mode") == "windowed"  # one target per window
    batch, stride = (128, None) if windowed else (32, 16)  # no overlap, as for the untrained model
    config = change(without_dropout(tiny), train__batch_size=batch, eval__stride=stride, **LEARNING, **SIZES, **fields)
    outcome, _ = run(config, tmp_path / "run")
    untrained_model = start(config).model  # its output bias is the frequencies of the words
    ids = torch.tensor(store.split("valid").ids[:321].astype("int64"))
    inputs, following = ids[:-1].view(20, 16), ids[1:].view(20, 16)
    targets = following[:, -config.model.targets :]
    with torch.no_grad():
        untrained = untrained_model.eval()(inputs, targets).mean().item()
    assert outcome.valid.loss < 0.96 * untrained
    trained = lmtrain.load(tmp_path / "run", checkpoint="best", weights="auto", device="cpu")
    (done,) = complete(trained.model, trained.tokenizer, ["The river"], Options(max_tokens=20))
    assert len(done.completions[0].ids) == 20
    assert run_folder.run_config(tmp_path / "run").model == config.model
