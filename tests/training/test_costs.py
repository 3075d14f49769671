"""What training costs: counts against literal ones, the memory estimate against what autograd really keeps."""

from pathlib import Path

import numpy as np
import pytest
import torch

from lmtrain.config.schema import Config
from lmtrain.data.tokens import TokenStore
from lmtrain.model.language_model import LanguageModel
from lmtrain.model.objective import Objective
from lmtrain.storage import checkpoint
from lmtrain.system.runtime import autocast
from lmtrain.training.costs import blank_batch, costs, memory_estimate, training_flops
from lmtrain.training.optim import make_optimizer
from lmtrain.training.state import prepare
from tests.training.test_loop import change


def test_operations_are_counted_by_hand(tiny: Config) -> None:
    model = LanguageModel(tiny.model, 100)
    block = 4 * 16 * 16 + 2 * 16 * 64
    pool = 3 * 16 * 16 + 2 * 16 * 64
    per_token = 6 * (block + pool + 100 * 16) + 12 * 16 * 16
    assert training_flops(model, tiny.model) == 16 * per_token
    windowed = change(tiny, model__mode="windowed").model
    assert training_flops(model, windowed) == 16 * (per_token - 6 * 100 * 16) + 6 * 100 * 16


def test_an_output_layer_of_its_own_counts_once(tiny: Config) -> None:
    untied = change(tiny, model__tie_embeddings=False).model
    expected = training_flops(LanguageModel(tiny.model, 100), tiny.model)
    assert training_flops(LanguageModel(untied, 100), untied) == expected


@pytest.mark.parametrize("mode", ["causal", "windowed"])
def test_an_adaptive_output_counts_by_the_shares_of_its_tails(tiny: Config, store: TokenStore, mode: str) -> None:
    plain = change(tiny, model__mode=mode)
    config = change(plain, model__output="adaptive", model__output_cutoffs=[20, 60])
    size, ids = store.tokenizer.vocab_size, store.split("train").ids[:]
    logits = 22 + 40 * np.mean((ids >= 20) & (ids < 60)) + (size - 60) * np.mean(ids >= 60)
    assert 22 < logits < 0.8 * size
    saved = 6 * 16 * (size - logits) * (16 if mode == "causal" else 1)
    expected = training_flops(LanguageModel(plain.model, size), plain.model) - saved
    assert training_flops(prepare(config, store, lambda message: None).model, config.model) == pytest.approx(expected)
    assert costs(config, store)["flops_per_step"] == pytest.approx(4 * expected)
    targets = 2 * (16 if mode == "causal" else 1)
    assert costs(config, store)["memory_bytes"]["logits"] == 4 * targets * 22


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("full", 16),
        ("local", (16 * 5 - 2 * (1 + 2)) / 16),  # 5 keys, fewer at both ends
        ("strided", 4),
        ("global", (2 * 16 + 14 * 2) / 16),
        ("compressed", 16 / 4 + 4),
        ("linear", 8),
    ],
)
def test_operations_of_each_attention(tiny: Config, kind: str, keys: float) -> None:
    sizes = {"model__attention_window": 3, "model__attention_stride": 4, "model__attention_globals": 2}
    config = change(tiny, model__attention=kind, **sizes).model
    model = LanguageModel(config, 100)
    matrices = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    assert training_flops(model, config) == pytest.approx(16 * (6 * (matrices + 1600) + 12 * keys * 16))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("output", ["softmax", "adaptive", "taught"])
def test_the_activations_are_those_that_autograd_keeps(
    tiny: Config, precision: str, output: str, tmp_path: Path
) -> None:
    config = change(tiny, train__micro_batch=4, model__output="softmax" if output == "taught" else output)
    plain = memory_estimate(config, 500, precision)
    model: torch.nn.Module = LanguageModel(config.model, 500)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if output == "taught":
        checkpoint.create_run(tmp_path, config, Path(__file__))  # the tokenizer is not looked at
        config = change(config, train__teacher=str(tmp_path))
        model = Objective(LanguageModel(config.model, 500), "auto", LanguageModel(config.model, 500))
    kept, seen = 0, {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            kept += storage.nbytes()
            alive.append(tensor)
        return tensor

    alive: list[torch.Tensor] = []
    cpu = torch.device("cpu")
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), autocast(cpu, precision):
        loss = model(*blank_batch(config, cpu)).sum()
    assert loss.requires_grad
    estimate = memory_estimate(config, 500, precision)
    assert estimate["activations"] == pytest.approx(kept, rel=0.05)
    assert (estimate["weights"], estimate["optimizer"]) == (4 * parameters, 8 * parameters)
    if output == "taught":
        assert estimate["teacher"] == 4 * parameters
        assert estimate["logits"] == 3 * plain["logits"]


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_the_memory_of_the_optimizer_is_that_of_its_state(tiny: Config, kind: str) -> None:
    config = change(tiny, train__optimizer=kind)
    model = LanguageModel(config.model, 500)
    optimizer = make_optimizer(model, config.train)
    model(*blank_batch(config, torch.device("cpu"))).sum().backward()
    optimizer.step()
    kept = sum(4 * value.numel() for state in optimizer.state.values() for value in state.values() if value.ndim)
    assert memory_estimate(config, 500, "fp32")["optimizer"] == kept


def test_a_dry_run_has_all_figures(tiny: Config, store: TokenStore) -> None:
    found = costs(tiny, store)
    assert found["tokens_per_epoch"] == store.split("train").tokens
    assert found["steps"] == 12
    assert found["memory_bytes"]["total"] == sum(v for k, v in found["memory_bytes"].items() if k != "total")
    assert "steps" not in costs(change(tiny, train__steps=None, train__max_minutes=1), store)
