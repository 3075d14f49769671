"""Training with the logits of a few targets at a time: the same run but for rounding, in less memory."""

import pytest
import torch

from lmtrain.config.loader import load
from lmtrain.config.schema import Config
from lmtrain.data.tokens import TokenStore
from lmtrain.errors import LmtrainError
from lmtrain.training.costs import memory_estimate
from lmtrain.training.loop import train_step
from lmtrain.training.state import prepare
from tests.training.test_loop import change

pytestmark = pytest.mark.usefixtures("one_thread")


def trained(config: Config, store: TokenStore) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses of 12 steps, and the parameters after them."""
    training = prepare(config, store, lambda message: None)
    losses = [float(train_step(training, 1e-2).loss) for _ in range(12)]
    return losses, dict(training.model.named_parameters())


@pytest.mark.parametrize("fields", [{}, {"model__mode": "windowed", "model__copy": True}], ids=str)
def test_a_run_in_chunks_is_the_whole_run_but_for_rounding(
    tiny: Config, store: TokenStore, fields: dict[str, object]
) -> None:
    tiny = change(tiny, train__micro_batch=None, train__eps=1e-3, **fields)  # Adam divides rounding by eps at least
    whole, whole_parameters = trained(change(tiny, train__loss_chunk=None), store)
    chunked, parameters = trained(change(tiny, train__loss_chunk=3), store)
    assert chunked == pytest.approx(whole, rel=1e-5)
    torch.testing.assert_close(parameters, whole_parameters, rtol=1e-4, atol=1e-5)
    assert any(not torch.equal(parameters[name], whole_parameters[name]) for name in parameters)  # rounding differs


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_memory_estimate_counts_the_logits_that_exist(tiny: Config, precision: str) -> None:
    tiny = change(tiny, train__micro_batch=4)  # 64 targets
    kept = {"fp32": 4, "bf16": 2}[precision]
    whole = memory_estimate(change(tiny, train__loss_chunk=None), 5000, precision)
    chunked = memory_estimate(change(tiny, train__loss_chunk=8), 5000, precision)
    assert whole["logits"] == 4 * 64 * 5000
    assert chunked["logits"] == 4 * 8 * 5000
    assert whole["activations"] - chunked["activations"] > 0.99 * kept * 64 * 5000  # the logits' errors


@pytest.mark.parametrize("value", ["0", "-1", "some", "1.5"])
def test_a_wrong_size_is_named(value: str) -> None:
    with pytest.raises(LmtrainError, match=r"train\.loss_chunk"):
        load(None, [f"train.loss_chunk={value}"], {})


@pytest.mark.parametrize(("value", "wanted"), [("null", None), ("auto", "auto"), ("64", 64)])
def test_the_sizes_that_there_are(value: str, wanted: object) -> None:
    assert load(None, [f"train.loss_chunk={value}"], {}).train.loss_chunk == wanted
