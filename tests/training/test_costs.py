"""Operations against torch's counter over a real step, and the memory estimate against what autograd saves."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lmtrain.config.schema import Config
from lmtrain.data.tokens import TokenStore
from lmtrain.model.language_model import LanguageModel
from lmtrain.model.objective import Objective
from lmtrain.storage import run_folder
from lmtrain.system.device import autocast
from lmtrain.training.costs import blank_batch, costs, memory_estimate, step_flops
from lmtrain.training.loop import train_step
from lmtrain.training.optim import make_optimizer
from tests.training.helpers import change, start

KINDS: dict[str, dict[str, object]] = {
    "causal": {},
    "windowed": {"model__mode": "windowed"},
    "long": {"model__context": 300, "model__layers": 3},
    "local, long": {"model__context": 300, "model__attention": ["local", "full"], "model__layers": 2},
    "linear": {"model__attention": "linear"},
    "compressed": {"model__attention": "compressed", "model__compression": 4},
    "linformer": {"model__attention": "linformer", "model__mode": "windowed", "model__projected_length": 5},
    "induced": {
        "model__attention": ["induced", "full"],
        "model__layers": 2,
        "model__mode": "windowed",
        "model__inducing_points": 3,
        "model__position": "learned",
    },
    "copy": {"model__copy": True, "model__embed_dim": 8, "model__tie_embeddings": False},
    "copy, windowed": {"model__copy": True, "model__mode": "windowed"},
    "bf16": {"train__precision": "bf16"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_operations_are_those_of_a_step(tiny: Config, store: TokenStore, kind: str) -> None:
    config = change(tiny, train__batch_size=4, train__micro_batch=2, **KINDS[kind])
    training = start(config, store)
    with FlopCounterMode(display=False) as counter:
        train_step(training, 1e-3)
    assert step_flops(training.model, config) == counter.get_total_flops() > 0


def test_recomputation_is_not_counted(tiny: Config) -> None:
    model = LanguageModel(tiny.model, 100)
    expected = step_flops(model, tiny)
    assert step_flops(model, change(tiny, train__loss_chunk=5, train__activation_checkpointing=True)) == expected


@pytest.mark.parametrize("mode", ["causal", "windowed"])
def test_an_adaptive_output_counts_by_the_shares_of_its_tails(tiny: Config, store: TokenStore, mode: str) -> None:
    plain = change(tiny, model__mode=mode)
    config = change(plain, model__output="adaptive", model__output_cutoffs=[20, 60])
    size, ids = store.tokenizer.vocab_size, store.split("train").ids[:]
    logits = 22 + 40 * np.mean((ids >= 20) & (ids < 60)) + (size - 60) * np.mean(ids >= 60)
    assert 22 < logits < 0.8 * size
    targets = 2 * (16 if mode == "causal" else 1)
    saved = 2 * targets * (6 * 16 * (size - logits) + 2 * (size - 22))  # the bias's gradient is a product too
    expected = step_flops(LanguageModel(plain.model, size), plain) - saved
    assert step_flops(start(config, store).model, config) == pytest.approx(expected)
    assert costs(config, store)["flops_per_step"] == pytest.approx(expected)
    assert costs(config, store)["memory_bytes"]["logits"] == 4 * targets * 22


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("output", ["softmax", "adaptive", "teacher"])
def test_the_activations_are_those_that_autograd_keeps(
    tiny: Config, precision: str, output: str, tmp_path: Path
) -> None:
    config = change(tiny, train__micro_batch=4, model__output="softmax" if output == "teacher" else output)
    plain = memory_estimate(config, 500, precision)
    model: torch.nn.Module = LanguageModel(config.model, 500)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if output == "teacher":
        run_folder.create_run(tmp_path, config, Path(__file__))  # the tokenizer is not read
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
    if output == "teacher":
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
