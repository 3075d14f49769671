"""Training with every kind of attention, post-norm, copying and scheduled sampling, on the sample corpus."""

from pathlib import Path

import pytest
import torch

from lmtrain.config.schema import Config
from lmtrain.data.tokens import TokenStore
from lmtrain.generation.complete import complete
from lmtrain.generation.options import Options
from lmtrain.model.trained import load_trained
from lmtrain.storage import checkpoint
from lmtrain.training.costs import memory_estimate
from lmtrain.training.loop import fit, train_step
from lmtrain.training.state import prepare
from tests.reading import read
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
    **{f"model__{place}": 0.0 for place in ("dropout", "attention_dropout", "embedding_dropout", "input_dropout")},
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
        {"train__scheduled_sampling": 0.5},
        {"model__output": "adaptive", "train__scheduled_sampling": 0.2},
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


def test_the_adversarial_softmax_makes_training_harder_and_takes_memory(tiny: Config, store: TokenStore) -> None:
    plain = change(tiny, train__micro_batch=None)
    harder = change(plain, train__adversarial_softmax=0.05)
    losses = [float(train_step(prepare(config, store, lambda message: None), 0.0).loss) for config in (plain, harder)]
    assert losses[0] < losses[1] < losses[0] + 0.5
    activations = [memory_estimate(config, 100, "fp32")["activations"] for config in (plain, harder)]
    targets = plain.train.batch_size * plain.model.context
    assert activations[1] - activations[0] > 4 * targets * plain.model.dim  # their rows of the output layer


def test_scheduled_sampling_replaces_inputs_and_leaves_targets(tiny: Config, store: TokenStore) -> None:
    training = prepare(tiny, store, lambda message: None)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    plain = training.forward

    def forward(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        seen.append((inputs.clone(), targets.clone()))
        return plain(inputs, targets)

    training.forward = forward
    for share in (0.0, 1.0, 0.5):
        training.counters.step = 0
        train_step(training, 0.0, share)
    clean, full, half = (torch.cat([inputs for inputs, _ in seen[i : i + 2]]) for i in (0, 2, 4))
    assert all(torch.equal(seen[i][1], seen[i % 2][1]) for i in range(6))
    assert torch.equal(clean[:, 0], full[:, 0])
    assert torch.equal(clean[:, 0], half[:, 0])
    assert (clean != full)[:, 1:].float().mean() > 0.8  # a prediction is sometimes right
    assert 0.3 < (clean != half)[:, 1:].float().mean() < 0.7


def test_scheduled_sampling_is_repeated_bit_for_bit(tiny: Config, store: TokenStore, tmp_path: Path) -> None:
    config = change(tiny, train__scheduled_sampling=0.7)
    weights = []
    for name in ("first", "second"):
        fit(config, store, tmp_path / name, resume=False, note=lambda message: None, quiet=True)
        weights.append(read(checkpoint.choose(tmp_path / name, "last")).tensors["model"])
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
