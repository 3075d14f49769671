"""Quicker ways to take a model's steps in decoding: recorded as a CUDA graph, or compiled for a CPU.

A recorded step has the same shapes every time, so it looks at all the room that a state has, under a mask.

Shapes: B rows, V vocabulary.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from lmtrain.model.language_model import LanguageModel
from lmtrain.model.state import CausalState, State


def steps(model: LanguageModel, *, compiled: bool = False) -> Callable[[State, Tensor], tuple[Tensor, State]]:
    """`model.step`, for causal models in its quickest form: on CUDA recorded; on a CPU `compiled`, where asked for."""
    device = next(model.parameters()).device
    if not model.causal:
        return model.step
    if device.type == "cuda":
        return CapturedSteps(model).step
    return CompiledSteps(model).step if compiled else model.step


class CompiledSteps:
    """`LanguageModel.step` of a causal model, compiled for any number of rows and tokens: two to four times as quick on
    a CPU where the model is small.

    Compiling takes a quarter of a minute or more (seconds if the compiler remembers it), once for one row and once for
    more, and again for rows of several lengths. The model must not change afterwards.
    """

    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        # Before each call torch looks whether the modules are those that it compiled for, a tenth of a small step. What
        # it compiles it keeps by code object: one that no other model runs needs no such look.
        code = LanguageModel.advance.__code__.replace()
        own = FunctionType(code, LanguageModel.advance.__globals__).__get__(model)
        unchecked: dict[str, str | int | bool | Callable[..., Any]] = {
            "guard_filter_fn": torch.compiler.skip_guard_on_all_nn_modules_unsafe
        }
        self.advance = torch.compile(own, dynamic=True, fullgraph=True, options=unchecked)
        self.compiled: set[tuple[bool, bool]] = set()

    @torch.no_grad()
    def step(self, state: State, tokens: Tensor) -> tuple[Tensor, State]:
        """As `LanguageModel.step`."""
        assert isinstance(state, CausalState)
        self.model.make_room(state)
        seen, kind = state.columns + 1, (len(tokens) == 1, state.level)
        if seen == state.room:  # the one step whose look at the caches is at the whole of them would be compiled apart
            return self.model.step(state, tokens)
        with nullcontext() if kind in self.compiled else _compiling():
            log_probs = self.advance(state, tokens, seen, level=state.level)
        self.compiled.add(kind)
        state.columns += 1
        return log_probs, state


@contextmanager
def _compiling() -> Iterator[None]:
    """Settings to compile with: the weights brought into oneDNN's layout ahead, and no two sizes taken for one because
    they happen to be the same."""
    alike = torch.fx.experimental._config.patch(use_duck_shape=False)  # type: ignore[attr-defined]
    with torch._inductor.config.patch(freezing=True), alike:
        yield


class CapturedSteps:
    """`LanguageModel.step` of a causal model by replaying a recorded step, for one state at a time.

    A step is recorded anew when another state comes, its rows become fewer or more, or its texts outgrow their room,
    which becomes four times as large, so that this happens rarely. Between two steps the state may be
    reordered (`select` with as many rows), which leaves its memory where it is. The log-probabilities are overwritten
    by the next step.
    """

    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        self.recorded: Tensor | None = None
        self.graph = torch.cuda.CUDAGraph()
        self.tokens = torch.empty(0, dtype=torch.long)
        self.log_probs = torch.empty(0)

    @torch.no_grad()
    def step(self, state: State, tokens: Tensor) -> tuple[Tensor, State]:
        """As `LanguageModel.step`."""
        assert isinstance(state, CausalState)
        self.model.make_room(state)
        if state.tokens is not self.recorded:  # held, so that no other state can come to lie at its address
            self._record(state, tokens)
            self.recorded = state.tokens
        self.tokens.copy_(tokens)
        self.graph.replay()
        state.columns += 1
        return self.log_probs, state

    def _record(self, state: CausalState, tokens: Tensor) -> None:
        """Record a step on this state; nothing is computed on it yet."""
        self.tokens = tokens.clone()
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # libraries set themselves up in the first calls, which can't be recorded
            trial = copy.deepcopy(state)
            trial.lengths.zero_()  # two steps of a nearly full row would run out of columns
            for _ in range(2):
                self.model.advance(trial, self.tokens, state.room, level=False)
        torch.cuda.current_stream().wait_stream(side)
        del trial
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.log_probs = self.model.advance(state, self.tokens, state.room, level=False)
