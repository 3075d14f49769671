"""AdamW against torch's unfused one, EMA weights against a loop; Muon against plain steps and singular values."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lmtrain.config.schema import Config
from lmtrain.config.train import TrainConfig
from lmtrain.data.tokens import TokenStore
from lmtrain.model.build import build_model, set_embedding
from lmtrain.model.cooccurrence import cooccurrence_embedding
from lmtrain.model.language_model import LanguageModel
from lmtrain.training.loop import train_step
from lmtrain.training.optimizers import (
    COEFFICIENTS,
    AdamW,
    Muon,
    make_optimizer,
    optimizer_tensors,
    orthogonalized,
    update_ema,
)
from lmtrain.training.sharding import copy_all
from tests.helpers import choices
from tests.training.helpers import change, start, take_step, without_dropout


class _Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.linear = nn.Linear(3, 2)

    @property
    def output(self) -> nn.Embedding:
        """Tied."""
        return self.embedding


def _train(model: _Tiny, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        torch.manual_seed(step)
        model.linear(model.embedding(torch.randint(5, (4,)))).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def _pair() -> tuple[_Tiny, _Tiny]:
    torch.manual_seed(0)
    left, right = _Tiny(), _Tiny()
    right.load_state_dict(left.state_dict())
    return left, right


def test_matrices_decay_and_vectors_do_not() -> None:
    ours, plain = _pair()
    config = TrainConfig(lr=0.1, weight_decay=0.5, beta1=0.8, beta2=0.9, eps=1e-6)
    groups = [
        {"params": [plain.embedding.weight, plain.linear.weight], "weight_decay": 0.5},
        {"params": [plain.linear.bias], "weight_decay": 0.0},
    ]
    _train(ours, make_optimizer(ours, config), 5)  # type: ignore[arg-type]
    _train(plain, torch.optim.AdamW(groups, lr=0.1, betas=(0.8, 0.9), eps=1e-6, foreach=False, fused=False), 5)
    for left, right in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)


def test_ema_weights_equal_a_loop() -> None:
    model, _ = _pair()
    ema = {name: value.detach().clone() for name, value in model.named_parameters()}
    expected = {name: value.double() for name, value in ema.items()}
    optimizer = make_optimizer(model, TrainConfig(lr=0.1))  # type: ignore[arg-type]
    for step in range(20):
        _train(model, optimizer, 1)
        update_ema(ema, model, 0.6, step)
        rate = min(0.6, (1 + step) / (10 + step))
        expected = {
            name: rate * value + (1 - rate) * model.get_parameter(name).double() for name, value in expected.items()
        }
    for name, value in ema.items():
        torch.testing.assert_close(value.double(), expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("tied", [True, False])
def test_word_embeddings_move_more_slowly_and_gains_faster(tied: bool, tiny: Config) -> None:
    """AdamW's first step moves every element by the rate of its group."""
    config = change(
        tiny, model__tie_embeddings=tied, model__embed_dim=16, model__token_shift=True, train__weight_decay=0.0
    )
    state = start(config)
    before = {name: value.detach().clone() for name, value in state.model.named_parameters()}
    train_step(state, 1e-3)
    moved = {name: float((value.detach() - before[name]).abs().max()) for name, value in state.model.named_parameters()}
    small = {"embedding.weight"} if tied else {"embedding.weight", "output.weight"}
    for name, step in moved.items():
        factor = 1 / 4 if name in small else 5 if name.endswith(("norm.weight", "shift.gain")) else 1
        assert step == pytest.approx(factor * 1e-3, rel=1e-2), name
    assert {"norm.weight", "pool.norm.weight", "shift.gain"} <= moved.keys()


@pytest.mark.parametrize("tied", [True, False])
def test_training_starts_from_the_vectors_of_its_text(tied: bool, tiny: Config, store: TokenStore) -> None:
    config = change(tiny, model__tie_embeddings=tied)
    state = start(config)
    torch.manual_seed(config.run.seed)
    model = build_model(config.model, store.tokenizer.vocab_size)
    words, width = model.embedding.weight.shape
    set_embedding(model, cooccurrence_embedding(store.split("train").ids, words, width))
    assert torch.equal(state.model.embedding.weight, model.embedding.weight)
    assert torch.equal(state.model.output.weight, model.embedding.weight)  # type: ignore[arg-type]
    assert float(model.embedding.weight.detach().square().mean().sqrt()) == pytest.approx(1 / width, rel=1e-3)


State = dict[str, Tensor]


def _polynomials(matrix: Tensor) -> Tensor:
    """The same polynomials, of the singular values."""
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    values = values / torch.linalg.vector_norm(values)
    for a, b, c in COEFFICIENTS:
        values = a * values + b * values**3 + c * values**5
    result: Tensor = left @ torch.diag(values) @ right
    return result


def test_batched_steps_equal_plain_ones() -> None:
    """Nesterov momentum, decoupled weight decay, and an update whose root mean square is 0.2 times the rate."""
    torch.manual_seed(0)
    shapes = [(8, 8), (24, 8), (8, 24), (8, 8), (8, 24), (1, 8)]
    ours = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    plain = [parameter.detach().clone() for parameter in ours]
    momentum = [torch.zeros_like(parameter) for parameter in plain]
    groups: list[dict[str, Any]] = [{"params": ours}, {"params": [nn.Parameter(torch.zeros(3))], "lr": 1e-3}]
    optimizer = Muon(groups, torch.float32, lr=1e-2, weight_decay=0.3)
    for step in range(10):
        torch.manual_seed(step)
        lr = 1e-2 / (1 + step)
        for index, parameter in enumerate(ours):
            gradient = torch.randn_like(parameter)
            parameter.grad = gradient.clone()
            momentum[index] = 0.95 * momentum[index] + 0.05 * gradient
            update = _polynomials(0.95 * momentum[index] + 0.05 * gradient)
            plain[index] = (1 - lr * 0.3) * plain[index] - lr * 0.2 * max(parameter.shape) ** 0.5 * update
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step_unless(torch.tensor(False))
    for left, right in zip(ours, plain, strict=True):
        torch.testing.assert_close(left.detach(), right, rtol=0, atol=1e-5)


@pytest.mark.parametrize("rank", [1, 2, 24])
def test_rounding_to_bf16_does_not_grow(rank: int) -> None:
    """Of low rank, whose singular values begin at the end of the polynomials' range."""
    torch.manual_seed(2)
    matrices = torch.randn(50, 24, rank) @ torch.randn(50, rank, 96)
    largest = torch.linalg.svdvals(orthogonalized(matrices, torch.bfloat16).float())[:, 0]
    assert float(largest.min()) > 0.6
    assert float(largest.max()) < 1.4


@pytest.mark.parametrize("shape", [(3, 12, 12), (3, 8, 24), (3, 24, 8)])
def test_singular_values_become_about_one_and_their_vectors_stay(shape: tuple[int, int, int]) -> None:
    torch.manual_seed(1)
    left, values, right = torch.linalg.svd(torch.randn(shape), full_matrices=False)
    spread = values.new_tensor([2.0**-index for index in range(values.shape[-1])]).clamp_min(0.02)
    found = orthogonalized(1e3 * left @ torch.diag_embed(spread.expand_as(values)) @ right, torch.float32)
    inner = left.mT @ found @ right.mT
    diagonal = inner.diagonal(dim1=-2, dim2=-1)
    assert float(diagonal.min()) > 0.6
    assert float(diagonal.max()) < 1.3
    torch.testing.assert_close(inner, torch.diag_embed(diagonal), rtol=0, atol=1e-4)
    assert not orthogonalized(torch.zeros(shape), torch.float32).any()


def _model(config: Config) -> LanguageModel:
    torch.manual_seed(0)
    return build_model(config.model, 50)


def _hidden(model: LanguageModel) -> set[str]:
    hidden = {id(weight) for weight in model.hidden_matrices()}
    return {name for name, value in model.named_parameters() if id(value) in hidden}


@pytest.mark.parametrize("output", ["softmax", "adaptive"])
def test_the_matrices_of_all_layers_but_embeddings_and_outputs_are_hidden_ones(tiny: Config, output: str) -> None:
    shape = {"model__embed_dim": 8, "model__position": "learned", "model__tie_embeddings": False}
    config = change(tiny, model__copy=True, model__output=output, **shape)
    block = {"attention.query", "attention.key", "attention.value", "attention.output"}
    pool = {"key", "value", "output"}
    both = {"feed_forward.hidden", "feed_forward.output"}
    expected = {f"encoder.blocks.0.{name}.weight" for name in block | both} | {
        f"pool.{name}.weight" for name in pool | both
    }
    expected |= {"in_projection.weight", "out_projection.weight"}
    expected |= {"copying.pointer.query.weight", "copying.pointer.key.weight"}
    assert _hidden(_model(config)) == expected


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    return {name: value.clone() for name, value in (model.state_dict() | optimizer_tensors(model, optimizer)).items()}


def _step(model: LanguageModel, optimizer: AdamW, seed: int) -> None:
    torch.manual_seed(seed)
    tokens = torch.randint(50, (3, 16))
    model(tokens, tokens).sum().backward()
    optimizer.step_unless(torch.tensor(False))
    optimizer.zero_grad()


def test_everything_else_is_optimized_by_adamw(tiny: Config) -> None:
    after: dict[str, dict[str, Tensor]] = {}
    for kind in ("adamw", "muon"):
        model = _model(tiny)
        _step(model, make_optimizer(model, change(tiny, train__optimizer=kind).train), 0)
        after[kind] = model.state_dict()
    differing = {name for name in after["muon"] if not torch.equal(after["muon"][name], after["adamw"][name])}
    assert differing == _hidden(model)


@pytest.mark.parametrize("place", ["pool.key.weight", "embedding.weight"])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("kind", choices("train.optimizer"))
def test_a_skipped_step_changes_nothing(tiny: Config, kind: str, place: str, first: bool) -> None:
    config = change(tiny, train__optimizer=kind).train
    model, straight = _model(tiny), _model(tiny)
    optimizer, undisturbed = make_optimizer(model, config), make_optimizer(straight, config)
    if not first:
        _step(model, optimizer, 0)
        _step(straight, undisturbed, 0)
    before = _state(model, optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    model.get_parameter(place).grad[0] = torch.tensor(torch.nan)  # type: ignore[index]
    optimizer.step_unless(torch.tensor(True))
    optimizer.zero_grad()
    after = _state(model, optimizer)
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    _step(model, optimizer, 1)
    _step(straight, undisturbed, 1)
    after, expected = _state(model, optimizer), _state(straight, undisturbed)
    assert [name for name in expected if not torch.equal(after[name], expected[name])] == []


KEY = "pool.key.weight"
DAMAGES: dict[str, Callable[[State], State]] = {
    "missing": lambda saved: {name: value for name, value in saved.items() if not name.startswith(KEY)},
    "AdamW's": lambda saved: saved | {f"{KEY}/exp_avg": saved[f"{KEY}/momentum_buffer"]},
    "momentum of a vector": lambda saved: saved | {"pool.seed/momentum_buffer": saved["pool.seed/exp_avg"]},
    "shape": lambda saved: saved | {f"{KEY}/momentum_buffer": saved[f"{KEY}/momentum_buffer"][:-1]},
    "type": lambda saved: saved | {f"{KEY}/momentum_buffer": saved[f"{KEY}/momentum_buffer"].double()},
}


def test_state_is_restored_and_other_state_is_rejected(tiny: Config) -> None:
    config = change(tiny, train__optimizer="muon").train
    model = _model(tiny)
    optimizer = make_optimizer(model, config)
    _step(model, optimizer, 0)
    saved = {name: value.clone() for name, value in optimizer_tensors(model, optimizer).items()}
    restored = make_optimizer(model, config)
    copy_all(saved, optimizer_tensors(model, restored))
    back = optimizer_tensors(model, restored)
    assert back.keys() == saved.keys()
    assert all(torch.equal(value, back[name]) for name, value in saved.items())
    for damage in DAMAGES.values():
        with pytest.raises(ValueError, match=r"it lacks|it also has|float32"):
            copy_all(damage(saved), optimizer_tensors(model, make_optimizer(model, config)))


def test_muon_overfits_a_batch_at_a_learning_rate_of_adamw(tiny: Config) -> None:
    """With updates of the size of AdamW's."""
    config = change(tiny, train__optimizer="muon", train__precision="bf16", train__weight_decay=0)
    state = start(without_dropout(config))
    hidden = state.model.hidden_matrices()
    losses = []
    for _ in range(60):
        before = [weight.detach().clone() for weight in hidden]
        losses.append(float(take_step(state, 1e-2)[0]))
        state.step = 0  # the same batch again
    moved = [float((old - new.detach()).square().mean().sqrt()) for old, new in zip(before, hidden, strict=True)]
    assert losses[-1] < 0.5 * losses[0]
    assert 0.5e-3 < min(moved) < max(moved) < 4e-3
