"""Quicker ways to take a model's steps in decoding: recorded as a CUDA graph, or compiled for a CPU.

Both want the same shapes again and again, so they look at all the room that a state has, under a mask.

Shapes: B rows, V vocabulary.
"""

import copy
from collections.abc import Callable

import torch
from torch import Tensor

from lmtrain.nn.language_model import LanguageModel
from lmtrain.nn.state import CausalState, State


def steps(model: LanguageModel, *, compiled: bool = False) -> Callable[[State, Tensor], tuple[Tensor, State]]:
    """`model.step`, for causal models in its quickest form: on CUDA recorded; on a CPU `compiled`, where asked for."""
    device = next(model.parameters()).device
    if not model.causal:
        return model.step
    if device.type == "cuda":
        return CapturedSteps(model).step
    return CompiledSteps(model).step if compiled else model.step


class CompiledSteps:
    """`LanguageModel.step` of a causal model, compiled: about twice as quick on a CPU where the model is small.

    Compiling takes half a minute (a few seconds where the compiler remembers it), once for each room that texts
    grow into. It is done for the number of rows that comes first; fewer or more rows are stepped plainly. The
    model's weights must not change afterwards.
    """

    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        self.rows: int | None = None
        self.advance = torch.compile(model.advance, dynamic=False, fullgraph=True)

    @torch.no_grad()
    def step(self, state: State, tokens: Tensor) -> tuple[Tensor, State]:
        """As `LanguageModel.step`."""
        assert isinstance(state, CausalState)
        self.rows = self.rows or len(tokens)
        if len(tokens) != self.rows:
            return self.model.step(state, tokens)
        self.model.make_room(state)
        # Freezing lets oneDNN's layout of the weights be made ahead; every room is a compilation of its own.
        with torch._inductor.config.patch(freezing=True), torch._dynamo.config.patch(recompile_limit=64):
            log_probs = self.advance(state, tokens, state.room, level=False)
        state.columns += 1
        return log_probs, state


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
