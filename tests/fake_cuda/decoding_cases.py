"""Generating text on a CUDA device, as far as this can be seen without one."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lmtrain.config.schema import ModelConfig
from lmtrain.data.tokens import TokenStore
from lmtrain.generation.attention import pool_weights
from lmtrain.generation.complete import complete
from lmtrain.generation.options import Options
from lmtrain.generation.sampling import Sampling
from lmtrain.model.build import build_model
from lmtrain.model.cuda_graph import GraphedSteps, step_function
from lmtrain.model.language_model import LanguageModel
from lmtrain.model.packing import pack
from tests.fake_cuda.device import CUDA, FakeCuda, fake_cuda
from tests.model.models import CAUSAL, SIZES

MODELS: dict[str, dict[str, Any]] = {
    "rotary": {"copy": True, "embed_dim": 6, "output_bias": True, "qk_norm": True, "activation": "swiglu"},
    "every attention": {**SIZES, "layers": len(CAUSAL), "attention": CAUSAL, "position": "learned"},
    "alibi": {**SIZES, "attention": "local", "position": "alibi", "pool_query": "recency", "norm": "layer"},
    "adaptive": {"output": "adaptive", "pool_query": "seed", "position": "sinusoidal", "copy": True},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"no_repeat": 2, "min_tokens": 2, "ban": ("the",), "bias": (("of", 1.0),)},
    "sampling": {"samples": 3, "sampling": Sampling(0.8, 50, 0.9, 0.01, 1.2)},
    "beams": {"beams": 3, "results": 2},
}


def build(store: TokenStore, **fields: Any) -> LanguageModel:
    sizes = {"context": 16, "dim": 8, "layers": 1, "heads": 2, "ff_dim": 16}
    model = build_model(ModelConfig.model_validate(sizes | fields), store.tokenizer.vocab_size)
    model.to(CUDA).eval()
    return model


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs that record by letting the step run, and do nothing when replayed. The host may take no part in it."""

    @contextmanager
    def graph(_graph: object) -> Iterator[None]:
        watch = FakeCuda.current
        before = list(watch.waits)
        yield
        assert watch.waits == before, "a graph can't record what the host takes part in"

    stream = SimpleNamespace(wait_stream=lambda other: None)
    for name, stand_in in (
        ("CUDAGraph", lambda: SimpleNamespace(replay=lambda: None)),
        ("Stream", lambda: stream),
        ("current_stream", lambda: stream),
        ("stream", lambda stream: nullcontext()),
        ("graph", graph),
    ):
        monkeypatch.setattr(torch.cuda, name, stand_in)


@pytest.mark.usefixtures("recording")
@pytest.mark.parametrize(
    ("fields", "precision"), [("rotary", "bf16"), ("every attention", "fp32"), ("alibi", "bf16"), ("adaptive", "fp32")]
)
def test_a_step_can_be_recorded(
    store: TokenStore, monkeypatch: pytest.MonkeyPatch, fields: str, precision: str
) -> None:
    with fake_cuda(monkeypatch) as watch:
        model = build(store, **MODELS[fields])
        pack(model, precision)
        owner: Any = step_function(model).__self__  # type: ignore[attr-defined]
        assert isinstance(owner, GraphedSteps)
        valid = torch.ones(2, 5, dtype=torch.bool, device=CUDA)
        _, state = model.start(torch.zeros(2, 5, dtype=torch.long, device=CUDA), valid)
        watch.waits.clear()
        for _ in range(2):
            log_probs, state = owner.step(state, torch.zeros(2, dtype=torch.long, device=CUDA))
            state = state.select(torch.tensor([1, 0], device=CUDA))
        assert log_probs.device == torch.device("cuda", 0)
        assert log_probs.dtype == torch.float32
        assert set(watch.waits) == {"aten._to_copy.default"}, "the rows to select, and no more"


@pytest.mark.usefixtures("recording")
@pytest.mark.parametrize("options", OPTIONS)
def test_texts(store: TokenStore, monkeypatch: pytest.MonkeyPatch, options: str) -> None:
    with fake_cuda(monkeypatch):
        model = build(store, **MODELS["rotary"])
        texts = complete(model, store.tokenizer, ["the", "of the the"], Options(max_tokens=20, **OPTIONS[options]))
    assert [len(text.completions) for text in texts] == [Options(**OPTIONS[options]).results] * 2


def test_pictures_and_windows(store: TokenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_cuda(monkeypatch):
        for fields in ({}, {"pool_query": "seed"}, {"mode": "windowed", "copy": True}):
            model = build(store, **fields)
            words, _, weights = pool_weights(model, store.tokenizer, "the", [1, 2, 3])
            assert weights.shape[:2] == (2, len(words))
        log_probs = model.predict(torch.zeros(2, 5, dtype=torch.long, device=CUDA))
        assert log_probs.device == torch.device("cuda", 0)
