"""The seeds of micro-batches; noise on the input tokens: its share, and that targets stay unchanged."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lmtrain.config.schema import Config
from lmtrain.evaluation.perplexity import Forward
from lmtrain.training.loop import train_step
from lmtrain.training.randomness import noisy, step_seed
from tests.training.helpers import change, start, with_forward

NUMBER = st.integers(0, 2**31 - 1)


@given(NUMBER, NUMBER, st.integers(0, 1000))
def test_step_seeds_differ_if_one_of_their_arguments_does(seed: int, step: int, micro: int) -> None:
    own = step_seed(seed, step, micro)
    others = {step_seed(seed + 1, step, micro), step_seed(seed, step + 1, micro), step_seed(seed, step, micro + 1)}
    assert 0 <= own < 2**63
    assert len(others | {own}) == 4


def test_step_seeds_do_not_change_between_versions() -> None:
    assert [step_seed(1, step, micro) for step, micro in ((0, 0), (0, 1), (1, 0))] == [
        6396520470166291297,
        3903436636966207257,
        3150992677718134148,
    ]


def drawn(config: Config) -> list[float]:
    """A random number drawn in the forward pass of each micro-batch of two steps, as dropout draws its masks."""
    numbers: list[float] = []

    def recorded(forward: Forward) -> Forward:
        def call(inputs: Tensor, targets: Tensor) -> Tensor:
            numbers.append(torch.rand(()).item())
            return forward(inputs, targets)

        return call

    state = with_forward(start(config), recorded)
    for _ in range(2):
        train_step(state, 0.0)
    return numbers


def test_no_two_micro_batches_share_their_randomness(tiny: Config) -> None:
    numbers = drawn(tiny)
    assert len({*numbers, *drawn(change(tiny, run__seed=2))}) == 8
    assert drawn(tiny) == numbers


def test_the_seed_of_a_run_decides_its_initial_weights_and_its_samples(tiny: Config) -> None:
    first, again, other = (start(change(tiny, run__seed=seed)) for seed in (1, 1, 2))
    for state, same in (again, True), (other, False):
        assert torch.equal(state.model.pool.key.weight, first.model.pool.key.weight) == same
        assert np.array_equal(state.order.starts(0, 20), first.order.starts(0, 20)) == same


def test_noise_replaces_its_share_of_the_tokens_by_the_distribution_of_the_text() -> None:
    torch.manual_seed(1)
    ids = np.array([7] * 6 + [8] * 3 + [9], np.uint16)
    inputs = torch.zeros(200, 500, dtype=torch.int64)
    result = noisy(inputs, ids, 0.2)
    counts = torch.bincount(result.flatten(), minlength=10)[[0, 7, 8, 9]] / result.numel()
    torch.testing.assert_close(counts, torch.tensor([0.8, 0.12, 0.06, 0.02]), atol=0.005, rtol=0)
    assert (inputs == 0).all()
    assert (result != 0).any(0).all()  # every column
    assert torch.equal(noisy(inputs, ids, 0.0), inputs)


def test_only_inputs_are_noisy(tiny: Config) -> None:
    """A step reads noise and is scored on the text; without noise it reads the text."""
    pairs: dict[float, list[tuple[Tensor, Tensor]]] = {0.0: [], 0.5: []}
    for share, seen in pairs.items():

        def recorded(forward: Forward, seen: list[tuple[Tensor, Tensor]] = seen) -> Forward:
            def call(inputs: Tensor, targets: Tensor) -> Tensor:
                seen.append((inputs, targets))
                return forward(inputs, targets)

            return call

        train_step(with_forward(start(change(tiny, train__token_noise=share)), recorded), 0.0)
    for (clean, targets), (noised, same) in zip(pairs[0.0], pairs[0.5], strict=True):
        assert torch.equal(targets, same)
        assert torch.equal(clean[:, 1:], targets[:, :-1])
        assert 0.3 < (clean != noised).float().mean() < 0.6
