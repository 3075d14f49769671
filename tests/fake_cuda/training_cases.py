"""Training steps, evaluation and checkpoints on a CUDA device, as far as this can be seen without one."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lmtrain.config.schema import Config
from lmtrain.data import order
from lmtrain.data.tokens import TokenStore
from lmtrain.evaluation.adaptive import adapted
from lmtrain.nn.adaptive import AdaptiveSoftmax
from lmtrain.storage import checkpoint
from lmtrain.system.signals import StopSignal
from lmtrain.training import loop, noise, saving, state, validation
from lmtrain.training.costs import blank_batch
from lmtrain.training.optim import optimizer_tensors
from lmtrain.training.state import Training
from tests.fake_cuda.device import CUDA, fake_cuda, on_host
from tests.model.models import CAUSAL, SIZES, WINDOWED
from tests.training.helpers import change, with_forward

PLAIN: dict[str, Any] = {"train__precision": "bf16", "train__ema": 0.9}
EVERYTHING: dict[str, Any] = {
    "model__copy": True,
    "model__embed_dim": 12,
    "model__activation": "swiglu",
    "model__qk_norm": True,
    "model__output_bias": True,
    "train__token_noise": 0.1,
}
"""What configs/wikitext2.yaml has, and more."""
LEARNED: dict[str, Any] = {"model__position": "learned", "model__pool_query": "recency", "model__norm": "layer"}
ALIBI: dict[str, Any] = {"model__position": "alibi", "model__pool_query": "seed", "model__pool_residual": "seed"}
VARIANTS: dict[str, dict[str, Any]] = {
    "everything": EVERYTHING,
    "muon, fp32": EVERYTHING | {"train__optimizer": "muon", "train__precision": "fp32", "train__clip": None},
    "fp16": {"train__precision": "fp16", "model__norm": "scale", "model__position": "sinusoidal"},
    "muon, fp16": {"train__optimizer": "muon", "train__precision": "fp16", "model__position": "none"},
    "every attention": {"model__layers": len(CAUSAL), "model__attention": CAUSAL, "train__micro_batch": None},
    "long": {"model__context": 300, "model__attention": "local", "train__loss_chunk": 99},
    "learned": LEARNED | {"model__norm_position": "post", "train__activation_checkpointing": True},
    "alibi": ALIBI | {"model__attention": "local+strided", "train__ema": None},
    "adaptive": {"model__output": "adaptive", "model__copy": True, "model__output_bias": True},
    "windowed": {"model__mode": "windowed", "model__copy": True, "train__optimizer": "muon"},
    "every windowed attention": {
        **{"model__mode": "windowed", "model__position": "learned", "train__micro_batch": None},
        **{"model__layers": len(WINDOWED), "model__attention": WINDOWED},
    },
}


def prepare(tiny: Config, store: TokenStore, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]) -> Training:
    monkeypatch.setattr(state, "choose_device", lambda _name: CUDA)
    monkeypatch.setattr(AdaptiveSoftmax, "set_shares", lambda adaptive, counts: None)  # it reads numbers, on the host
    monkeypatch.setattr(state, "compiled_forward", lambda model, *_: model)
    monkeypatch.setattr(loop, "batch", on_host(order.batch))
    monkeypatch.setattr(loop, "noisy", on_host(noise.noisy))
    sizes = {f"model__{name}": value for name, value in SIZES.items()}
    return state.prepare(change(tiny, **(sizes | PLAIN | changes)), store, print)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_step_keeps_to_the_device_and_never_waits(
    tiny: Config, store: TokenStore, monkeypatch: pytest.MonkeyPatch, variant: str
) -> None:
    with fake_cuda(monkeypatch) as watch:
        training = prepare(tiny, store, monkeypatch, VARIANTS[variant])
        watch.waits.clear()
        result = loop.train_step(training, 1e-3)
        assert watch.waits == []
        state_of_it = optimizer_tensors(training.model, training.optimizer)
        assert {value.device for value in (*result, *training.model.state_dict().values(), *state_of_it.values())} == {
            torch.device("cuda", 0)
        }
        float(result.loss)
    assert watch.waits == ["read"]


@pytest.mark.parametrize("mode", ["causal", "windowed"])
def test_evaluation(tiny: Config, store: TokenStore, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    with fake_cuda(monkeypatch):
        training = prepare(tiny, store, monkeypatch, {"model__copy": True, "model__mode": mode})
        with validation.swapped_weights(training.model, training.ema):
            assert validation.validate(training, store, 1, 3, StopSignal(lambda number: number, sys.exit)).tokens == 3


@pytest.mark.parametrize(("rule", "cache"), [("rms", True), ("sgd", False)])
def test_adaptation(tiny: Config, store: TokenStore, monkeypatch: pytest.MonkeyPatch, rule: str, cache: bool) -> None:
    with fake_cuda(monkeypatch):
        training = prepare(tiny, store, monkeypatch, {"model__copy": True, "eval__dynamic_rule": rule})
        forward = adapted(
            training.model.eval(),
            training.config.eval,
            store.split("train"),
            dynamic=True,
            cache=cache,
            segment=8,
            device=CUDA,
            precision="bf16",
        )
        for _ in range(2):
            text = torch.zeros(1, 16, dtype=torch.long, device=CUDA)
            nats = forward(text, text[:, 8:])
            assert nats.device == torch.device("cuda", 0)


@pytest.mark.parametrize("variant", ["everything", "muon, fp16"])
def test_what_is_saved_lies_in_the_hosts_memory_and_goes_back(
    tiny: Config, store: TokenStore, monkeypatch: pytest.MonkeyPatch, variant: str
) -> None:
    with fake_cuda(monkeypatch) as watch:
        training = prepare(tiny, store, monkeypatch, VARIANTS[variant])
        loop.train_step(training, 1e-3)
        tensors, info = state.snapshot(training, store, None, {"seconds": 1.0, "metrics_bytes": 0})
        watch.waits.clear()
        copies = {group: saving._copies(named, is_main=True) for group, named in tensors.items()}
        assert {copy.device.type for named in copies.values() for copy in named.values()} == {"cpu"}
        assert len(watch.waits) == sum(map(len, tensors.values())), "each is read when it has arrived"
        counters = training.counters
        training = prepare(tiny, store, monkeypatch, VARIANTS[variant])
        found: Any = checkpoint.Checkpoint(Path("folder"), copies, info)  # type: ignore[arg-type]
        state.restore(training, found)
        assert training.counters.step == counters.step == 1
        put_back = optimizer_tensors(training.model, training.optimizer).values()
        assert {value.device for value in put_back} == {torch.device("cuda", 0)}
        loop.train_step(training, 1e-3)


def test_a_compiled_step_is_one_graph_and_stays_it(
    tiny: Config, store: TokenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    traced = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        traced.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    with fake_cuda(monkeypatch, compiling=True):
        training = prepare(tiny, store, monkeypatch, EVERYTHING)
        model = training.model
        training = with_forward(
            training, lambda forward: torch.compile(forward, dynamic=False, fullgraph=True, backend=backend)
        )
        for step in range(2):
            loop.train_step(training, 1e-3 * (1 + step))
            with torch.no_grad(), validation.swapped_weights(training.model, training.ema):
                model.eval()(*blank_batch(training.config, CUDA))
            model.train()
        assert len(traced) == 1
