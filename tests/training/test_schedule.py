"""Schedules against literal lists; budgets; when a run is evaluated."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lmtrain.config.schema import Config, ModelConfig
from lmtrain.config.train import TrainConfig
from lmtrain.data.tokens import TokenStore
from lmtrain.errors import LmtrainError
from lmtrain.training.announce import plan_sizes
from lmtrain.training.schedule import Budget, learning_rate, make_budget
from lmtrain.training.trainer import Trainer
from tests.training.helpers import change

LISTS = {
    "cosine": [0.0, 0.5, 1.0, 0.86819805, 0.55, 0.23180195, 0.1],
    "linear": [0.0, 0.5, 1.0, 0.775, 0.55, 0.325, 0.1],
    "wsd": [0.0, 0.5, 1.0, 1.0, 1.0, 0.55, 0.1],
    "constant": [0.0, 0.5, 1.0, 1.0, 1.0, 1.0, 1.0],
}


@pytest.mark.parametrize("kind", LISTS)
def test_schedules_are_these_lists(kind: str) -> None:
    """The same with a warmup in steps or as a fraction of the run, be it in steps or in time."""
    fields = {"lr": 1.0, "schedule": kind, "decay": 0.4, "final_lr": 0.1}
    for warmup in (0.2, 2):
        config = TrainConfig(**fields, warmup=warmup)
        found = [learning_rate(config, Budget(10, None), step, 0.0) for step in (0, 1, 2, 4, 6, 8, 10)]
        assert found == pytest.approx([1e-3, *LISTS[kind][1:]])
    config = TrainConfig(**fields, warmup=0.2)
    found = [learning_rate(config, Budget(None, 50.0), 3, seconds) for seconds in (0, 5, 10, 20, 30, 40, 50)]
    assert found == pytest.approx([1e-3, *LISTS[kind][1:]])


def _config(**train: Any) -> Config:
    """With as many targets in a step as windows."""
    return Config(model=ModelConfig(mode="windowed"), train=TrainConfig(**train))


def _budget(config: Config) -> Budget:
    """The budget if an epoch has 100 windows."""
    split = SimpleNamespace(tokens=config.model.context + 100)
    return make_budget(config, SimpleNamespace(split=lambda name: split))  # type: ignore[arg-type]


def test_a_budget_is_in_steps_in_seconds_or_in_both() -> None:
    assert _budget(_config(epochs=2, batch_size=32)) == Budget(7, None)
    assert _budget(_config(epochs=2, batch_size=32, max_minutes=2)) == Budget(7, 120.0)
    assert _budget(_config(batch_size=10)) == Budget(100, None)
    assert _budget(_config(tokens=320, batch_size=32)) == Budget(10, None)
    assert _budget(_config(tokens=321, batch_size=32)) == Budget(11, None)
    assert _budget(_config(tokens=1, batch_size=32, max_minutes=2)) == Budget(1, 120.0)
    causal = Config(model=ModelConfig(context=64), train=TrainConfig(tokens=10**7, batch_size=8))
    assert _budget(causal) == Budget(19532, None)
    assert _budget(_config(max_minutes=2)) == Budget(None, 120.0)
    both = _budget(_config(max_minutes=1, steps=10))
    spent = [both.progress(*done) for done in ((5, 6.0), (1, 30.0), (10, 0.0), (0, 99.0))]
    assert spent == [0.5, 0.5, 1, 1]
    late = both.with_setup(15.0)
    spent = [late.progress(*done) for done in ((0, 15.0), (0, 37.5), (0, 60.0), (9, 15.0))]
    assert spent == [0.0, 0.5, 1.0, 0.9]
    assert _budget(_config(steps=10)).with_setup(1e9).progress(5, 2e9) == 0.5
    with pytest.raises(LmtrainError, match=r"train.max_minutes=1 is over before the first step: .* took 1\.50 minutes"):
        both.with_setup(90.0)


@pytest.mark.parametrize(
    ("fields", "validation_tokens", "expected"),
    [
        ({"eval_steps": 7, "steps": 20}, 1, [7, 14]),
        ({"steps": 40}, 1, list(range(2, 41, 2))),
        ({"steps": 30}, 1, [2, 3, 5, 6, 8, 9, 11, 12, 14, 15, 17, 18, 20, 21, 23, 24, 26, 27, 29, 30]),
        ({"steps": 40}, 3000, [10, 20, 30, 40]),
        ({"steps": 40, "eval_tokens": 600}, 3000, list(range(2, 41, 2))),
        ({"steps": 40, "eval_tokens": 99999}, 600, list(range(2, 41, 2))),  # the whole split costs no more
        ({"max_minutes": 1}, 600, list(range(3, 61, 3))),
        ({"max_minutes": 1}, 3000, [10, 20, 30, 40, 50, 60]),
    ],
)
def test_evaluations_are_spread_over_the_budget_and_do_not_take_most_of_it(
    fields: dict[str, Any], validation_tokens: int, expected: list[int]
) -> None:
    """With a thousand targets in a step, which takes a second."""
    config = _config(**{"batch_size": 1000, **fields})
    store = SimpleNamespace(split=lambda name: SimpleNamespace(tokens=validation_tokens))
    state: Any = SimpleNamespace(config=config, store=store, step=0, evaluated=0)
    clock: Any = SimpleNamespace(seconds=0.0)
    unused: Any = None
    found: list[int] = []
    while state.step < (config.train.steps or 60):
        trainer = Trainer(state, Path(), _budget(config), clock, unused, unused, unused, unused)
        while not trainer.evaluation_is_due() and trainer.progress() < 1:
            state.step, clock.seconds = state.step + 1, clock.seconds + 1.0
        found += [state.step] * trainer.evaluation_is_due()
        state.evaluated = state.step
    assert found == expected


def test_with_two_budgets_the_warmup_follows_the_one_that_is_spent_first() -> None:
    config = TrainConfig(lr=1.0, schedule="linear", warmup=0.5, final_lr=0.0)
    found = [learning_rate(config, Budget(100, 60.0), *done) for done in ((5, 15.0), (5, 45.0), (25, 3.0), (75, 3.0))]
    assert found == pytest.approx([0.5] * 4)


@pytest.mark.parametrize(
    ("budget", "steps"),
    [
        ({"train__steps": 12}, 12),
        ({"train__steps": None, "train__epochs": 0.5}, 25),
        ({"train__steps": None, "train__max_minutes": 1}, None),
        ({"train__max_minutes": 1}, 12),
    ],
)
def test_a_dry_run_has_all_figures(tiny: Config, store: TokenStore, budget: dict[str, Any], steps: int | None) -> None:
    found = plan_sizes(change(tiny, **budget), store)
    assert (found["tokens_per_epoch"], found["tokens_per_step"]) == (store.split("train").tokens, 4 * 16)
    assert found.get("steps") == steps
