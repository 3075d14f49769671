"""Steps of decoding on a GPU, recorded once as a CUDA graph and replayed: one launch in place of some hundred.

Shapes: B rows, V vocabulary.
"""

import copy
from collections.abc import Callable

import torch
from torch import Tensor

from lmtrain.nn.language_model import LanguageModel
from lmtrain.nn.state import CausalState, State

FEWEST_COLUMNS = 64


def steps(model: LanguageModel) -> Callable[[State, Tensor], tuple[Tensor, State]]:
    """`model.step`, on CUDA and for causal models by way of recorded graphs."""
    device = next(model.parameters()).device
    return CapturedSteps(model).step if device.type == "cuda" and model.causal else model.step


class CapturedSteps:
    """`LanguageModel.step` of a causal model by replaying a recorded step, for one state at a time.

    A step is recorded anew when another state comes, its rows become fewer or more, or its texts outgrow the columns
    that the recorded one looks at; these double, so that this happens rarely. Between two steps the state may be
    reordered (`select` with as many rows), which leaves its memory where it is. The log-probabilities are overwritten
    by the next step.
    """

    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        self.recorded: tuple[int, int, int] | None = None
        self.graph = torch.cuda.CUDAGraph()
        self.tokens = torch.empty(0, dtype=torch.long)
        self.log_probs = torch.empty(0)

    @torch.no_grad()
    def step(self, state: State, tokens: Tensor) -> tuple[Tensor, State]:
        """As `LanguageModel.step`."""
        assert isinstance(state, CausalState)
        self.model.make_room(state)
        seen = columns_to_see(state.columns + 1, self.model.config.context)
        wanted = (state.tokens.data_ptr(), len(tokens), seen)
        if wanted != self.recorded:
            self._record(state, tokens, seen)
            self.recorded = wanted
        self.tokens.copy_(tokens)
        self.graph.replay()
        state.columns += 1
        return self.log_probs, state

    def _record(self, state: CausalState, tokens: Tensor, seen: int) -> None:
        """Record a step on this state; nothing is computed on it yet."""
        self.tokens = tokens.clone()
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # libraries set themselves up in the first calls, which can't be recorded
            trial = copy.deepcopy(state)
            trial.lengths.zero_()  # two steps of a nearly full row would run out of columns
            for _ in range(2):
                self.model.advance(trial, self.tokens, seen, level=False)
        torch.cuda.current_stream().wait_stream(side)
        del trial
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.log_probs = self.model.advance(state, self.tokens, seen, level=False)


def columns_to_see(needed: int, context: int) -> int:
    """The next power of two, so that few different numbers occur; never more than there are."""
    return min(context, max(FEWEST_COLUMNS, 1 << (needed - 1).bit_length()))
