"""CUDA graphs: a function's kernels are captured once and then replayed, since a host takes longer to launch those of a
small model one by one than a GPU takes to compute them.

A captured decoding step has the same shapes every time, so it attends to the whole capacity of a state, under a mask.
"""

from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor

from lmtrain.model.decoding_state import DecodingState, State
from lmtrain.model.ensemble import DecodeStep, Ensemble, Predictor
from lmtrain.model.language_model import LanguageModel

WARM_UP = 2
"""Libraries initialize themselves in the first calls, which can't be captured."""


@cache
def _side_stream() -> torch.cuda.Stream:
    """Return the stream of the calls before a capture: one for all, since cuBLAS keeps a workspace for each."""
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


class GraphedCallable:
    """A function of tensors on CUDA, replayed as a graph after WARM_UP consecutive calls with the same shapes; another
    shape starts over.

    Each call computes it once, so that it may also change tensors in place, such as weights. What it uses besides its
    inputs must stay in the same memory, and modes, such as autocast, are those of the captured call. It must not
    synchronize with the host.
    """

    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, ...]
    results: tuple[Tensor, ...]

    def __init__(self, function: Callable[..., tuple[Tensor, ...]]) -> None:
        self.function = function
        self.shapes: list[torch.Size] = []
        self.calls = 0
        self.side = _side_stream()

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return what the function returns for these inputs."""
        shapes = [x.shape for x in inputs]
        self.calls = self.calls + 1 if shapes == self.shapes else 1
        self.shapes = shapes
        if self.calls <= WARM_UP:
            # What comes before a capture must be on another stream.
            self.side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.side):
                results = self.function(*inputs)
            torch.cuda.current_stream().wait_stream(self.side)
            return results
        if self.calls == WARM_UP + 1:
            self.inputs = tuple(x.clone() for x in inputs)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.results = self.function(*self.inputs)
        for captured, x in zip(self.inputs, inputs, strict=True):
            captured.copy_(x)
        self.graph.replay()
        return tuple(result.clone() for result in self.results)  # the next replay overwrites them


def step_function(model: Predictor) -> DecodeStep:
    """Return `model.step`, as a captured step if the model (or a member of an ensemble) is causal and on CUDA."""
    if isinstance(model, Ensemble):
        return partial(model.step_with, [step_function(member) for member in model.members])
    if model.causal and model.embedding.weight.device.type == "cuda":
        return GraphedSteps(model).step
    return model.step


class GraphedSteps:
    """A causal model's `step`, replayed on one state.

    It is captured again for another state, and for another number of rows. Between two steps the rows of the state may
    be reordered (`select` with as many rows), which leaves its memory in place.
    """

    replayed: GraphedCallable

    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        self.captured: Tensor | None = None

    @torch.no_grad()
    def step(self, state: State, tokens: Tensor) -> tuple[Tensor, State]:
        """Do the same as `LanguageModel.step`."""
        assert isinstance(state, DecodingState)
        model = self.model
        model.ensure_capacity(state)
        if state.tokens is not self.captured:  # kept referenced: no other state is allocated at its address
            self.captured = state.tokens
            # Without `self`, which would then be freed, with the memory of the graph, only by garbage collection.
            self.replayed = GraphedCallable(lambda tokens: (model.decode_step(state, tokens, state.capacity),))
        (log_probs,) = self.replayed(tokens)
        state.kv_len += 1
        return log_probs, state
