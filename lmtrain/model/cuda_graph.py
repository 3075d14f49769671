"""Decoding steps on a GPU, recorded as a CUDA graph.

A recorded step has the same shapes every time, so it attends to the whole capacity of a state, under a mask.
"""

import copy
from functools import partial

import torch
from torch import Tensor

from lmtrain.model.decoding_state import DecodingState, State
from lmtrain.model.ensemble import DecodeStep, Ensemble, Predictor
from lmtrain.model.language_model import LanguageModel


def step_function(model: Predictor) -> DecodeStep:
    """Return `model.step`, as a recorded step if the model (or a member of an ensemble) is causal and on CUDA."""
    if isinstance(model, Ensemble):
        return partial(model.step_with, [step_function(member) for member in model.members])
    if model.causal and model.embedding.weight.device.type == "cuda":
        return GraphedSteps(model).step
    return model.step


class GraphedSteps:
    """A causal model's `step`, by replaying a recorded step on one state.

    It records a step again for another state, for another number of rows, and when the texts outgrow the capacity,
    which then becomes four times as large, so that this happens rarely. Between two steps the rows of the state may be
    reordered (`select` with as many rows), which leaves its memory in place. The log-probabilities that `step` returns
    are overwritten by the next one.
    """

    graph: torch.cuda.CUDAGraph
    tokens: Tensor
    log_probs: Tensor

    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        self.recorded: Tensor | None = None

    @torch.no_grad()
    def step(self, state: State, tokens: Tensor) -> tuple[Tensor, State]:
        """Do the same as `LanguageModel.step`."""
        assert isinstance(state, DecodingState)
        self.model.ensure_capacity(state)
        if state.tokens is not self.recorded:  # kept referenced: no other state is allocated at its address
            self._record(state, tokens)
            self.recorded = state.tokens
        self.tokens.copy_(tokens)
        self.graph.replay()
        state.kv_len += 1
        return self.log_probs, state

    def _record(self, state: DecodingState, tokens: Tensor) -> None:
        """Record a step on this state; the state does not change."""
        self.tokens = tokens.clone()
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # libraries initialize themselves in the first calls, which can't be recorded
            trial = copy.deepcopy(state)
            trial.lengths.zero_()  # two steps of a nearly full row would exceed the capacity
            for _ in range(2):
                self.model.decode_step(trial, self.tokens, state.capacity)
        torch.cuda.current_stream().wait_stream(side)
        del trial
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.log_probs = self.model.decode_step(state, self.tokens, state.capacity)
