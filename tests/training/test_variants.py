"""Training with every kind of attention, post-norm and copying, on the sample corpus."""

from pathlib import Path

import pytest
import torch

from lmtrain.config.schema import Config
from lmtrain.data.tokens import TokenStore
from lmtrain.generation.complete import complete
from lmtrain.generation.options import Options
from lmtrain.model.trained import load_trained
from lmtrain.storage import checkpoint
from lmtrain.training.loop import fit
from lmtrain.training.state import prepare
from tests.training.test_loop import change

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = {
    "model__attention_window": 3,
    "model__attention_stride": 4,
    "model__attention_globals": 2,
    "model__compression": 3,
    "model__projected_length": 5,
    "model__inducing_points": 3,
}
LEARNING = {
    **{f"model__{place}": 0.0 for place in ("dropout", "attention_dropout", "input_dropout")},
    "model__output_dropout": 0.0,
    "train__micro_batch": None,
    "train__steps": 60,
    "train__eval_steps": 60,
    "train__lr": 0.02,
    "train__ema": None,
}
CAUSAL = ("full", "local", "strided", "global", "local+global", "compressed", "linear")
WINDOWED = (*CAUSAL, "linformer", "induced")


@pytest.mark.parametrize(
    "fields",
    [
        *({"model__attention": kind} for kind in CAUSAL),
        *({"model__attention": kind, "model__mode": "windowed", "model__position": "learned"} for kind in WINDOWED),
        {"model__norm_position": "post", "model__copy": True},
        {"model__output": "adaptive"},
        {"model__output": "adaptive", "model__mode": "windowed", "model__copy": True},
        {"model__attention": ("local", "linear"), "model__layers": 2},
    ],
    ids=str,
)
def test_a_short_run_learns_and_generates(
    tiny: Config, store: TokenStore, tmp_path: Path, fields: dict[str, object]
) -> None:
    batch = 128 if fields.get("model__mode") == "windowed" else 32  # one target a window
    stride = None if fields.get("model__mode") == "windowed" else 16  # without overlaps, as the untrained one is judged
    config = change(tiny, train__batch_size=batch, eval__stride=stride, **LEARNING, **SIZES, **fields)
    outcome = fit(config, store, tmp_path / "run", resume=False, note=lambda message: None, quiet=True)
    assert outcome.score is not None
    start = prepare(config, store, lambda message: None)  # a model that knows the frequencies of words, and no more
    inputs = torch.tensor(store.split("valid").ids[:320].astype("int64")).view(20, 16)
    targets = inputs.roll(-1, 1) if config.model.mode == "causal" else inputs.roll(-1, 0)[:, 0]
    with torch.no_grad():
        untrained = start.model.eval()(inputs, targets).mean().item()
    assert outcome.score.loss < 0.96 * untrained
    trained = load_trained(tmp_path / "run", "best", "auto", torch.device("cpu"))
    (done,) = complete(trained.model, trained.tokenizer, ["The river"], Options(max_tokens=20))
    assert len(done.completions[0].ids) == 20
    assert checkpoint.run_config(tmp_path / "run").model == config.model
