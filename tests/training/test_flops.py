"""Operations against torch's counter over a real step."""

import numpy as np
import pytest
from torch.utils.flop_counter import FlopCounterMode

from lmtrain.config.schema import Config
from lmtrain.data.tokens import TokenStore
from lmtrain.model.build import build_uninitialized
from lmtrain.training.flops import step_flops
from lmtrain.training.loop import train_step
from tests.training.helpers import change, start

KINDS: dict[str, dict[str, object]] = {
    "causal": {},
    "windowed": {"model__mode": "windowed"},
    "local, long": {"model__context": 300, "model__attention": ["local", "full"], "model__layers": 2},
    "copy": {"model__copy": True, "model__embed_dim": 8, "model__tie_embeddings": False},
    "bf16": {"train__precision": "bf16"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_operations_are_those_of_a_step(tiny: Config, store: TokenStore, kind: str) -> None:
    config = change(tiny, **KINDS[kind])
    state = start(config)
    with FlopCounterMode(display=False) as counter:
        train_step(state, 1e-3)
    assert step_flops(state.model, config, store) == counter.get_total_flops() > 0


@pytest.mark.parametrize(("mode", "width"), [("causal", None), ("windowed", 8)])
def test_an_adaptive_output_counts_by_the_shares_of_its_tails(
    tiny: Config, store: TokenStore, mode: str, width: int | None
) -> None:
    plain = change(tiny, model__mode=mode, model__embed_dim=width)
    config = change(plain, model__output="adaptive", model__output_cutoffs=[20, 60])
    size, ids = store.tokenizer.vocab_size, store.split("train").ids
    logits = 22 + 40 * np.mean((ids >= 20) & (ids < 60)) + (size - 60) * np.mean(ids >= 60)
    assert 22 < logits < 0.8 * size
    targets = 2 * (16 if mode == "causal" else 1)
    # The gradient of the bias is a product, too.
    saved = 2 * targets * (6 * (width or 16) * (size - logits) + 2 * (size - 22))
    expected = step_flops(build_uninitialized(plain.model, size), plain, store) - saved
    assert step_flops(start(config).model, config, store) == pytest.approx(expected)
