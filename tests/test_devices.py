"""No part of the model creates a tensor on another device than its input's.

The device is torch's `meta`, under FakeTensorMode: it rejects operations on tensors of two devices, and whatever needs
a value that is on the device, so that a machine without a GPU can check both. The tests marked `gpu` compare what a GPU
computes with the CPU.
"""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch._dynamo  # keeps functions of torch in tables, so it must see them before they are replaced here
from torch._subclasses.fake_tensor import FakeTensorMode

from lmtrain.config.schema import ModelConfig
from lmtrain.model.build import construct
from lmtrain.model.language_model import LanguageModel

DEVICE = torch.device("meta")
SMALL: dict[str, Any] = {"context": 16, "dim": 8, "layers": 1, "heads": 2, "ff_dim": 16, "attention_window": 3}
MODELS: dict[str, dict[str, Any]] = {
    "rotary": {"copy": True, "embed_dim": 6, "qk_norm": True, "activation": "swiglu"},
    "alibi": {"attention": "local+strided+global", "position": "alibi", "norm": "layer"},
    "linear": {"attention": "linear", "position": "sinusoidal", "norm": "scale"},
    "compressed": {"attention": "compressed", "position": "learned", "pool_query": "seed", "pool_residual": "seed"},
    "adaptive": {"output": "adaptive", "output_cutoffs": [4, 9, 15], "copy": True},
}
WINDOWED: dict[str, dict[str, Any]] = {
    "windowed": {"mode": "windowed", "copy": True},
    "linformer": {"mode": "windowed", "attention": "linformer", "position": "learned"},
    "induced": {"mode": "windowed", "attention": "induced", "position": "learned"},
}


def on_device(fields: dict[str, Any]) -> LanguageModel:
    """A model whose tensors are all on the device."""
    return construct(ModelConfig.model_validate(SMALL | fields), 23).to(DEVICE)


def ids(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.long, device=DEVICE)


@pytest.fixture(autouse=True)
def no_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device has none."""
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)


@pytest.mark.parametrize("name", MODELS | WINDOWED)
def test_the_loss_and_the_gradients_are_on_the_device_of_the_input(name: str) -> None:
    dropout = {"dropout": 0.1, "input_dropout": 0.1, "output_dropout": 0.1, "attention_dropout": 0.1}
    model = on_device((MODELS | WINDOWED)[name] | dropout).train()
    with FakeTensorMode(allow_non_fake_inputs=True):
        nats = model(ids(2, 16), ids(2, model.config.targets))
        nats.sum().backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert gradients
    assert {tensor.device for tensor in (nats, *gradients)} == {DEVICE}


@pytest.mark.parametrize("name", MODELS)
def test_a_decoding_step_is_on_the_device_of_the_input(name: str) -> None:
    model = on_device(MODELS[name]).eval()
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        log_probs, state = model.start(ids(2, 5))
        for _ in range(2):
            log_probs, state = model.step(state, ids(2))
    assert log_probs.device == DEVICE
