"""Small language models of every kind, for the tests of everything that runs one."""

import itertools

import torch
from torch import Tensor, nn

from lmtrain.config.schema import ATTENTION, MASKED_ATTENTION, UNMASKABLE_ATTENTION, ModelConfig
from lmtrain.model.build import build_model
from lmtrain.model.ensemble import Ensemble
from lmtrain.model.language_model import LanguageModel
from tests.helpers import choices

VOCABULARY = 23
POSITIONS, QUERIES, NORMS = choices("model.position"), choices("model.pool_query"), choices("model.norm")
SIZES: dict[str, object] = {
    "attention_window": 3,
    "attention_stride": 4,
    "attention_globals": 2,
    "compression": 3,
    "projected_length": 5,
    "inducing_points": 3,
}
OWN_CACHE = tuple(kind for kind in ATTENTION if kind not in (*MASKED_ATTENTION, *UNMASKABLE_ATTENTION))
"""Causal attention whose cache is not that of keys and values by position."""
CAUSAL = (*MASKED_ATTENTION, *OWN_CACHE, "local+strided", "local+strided+global")
WINDOWED = (*CAUSAL, *UNMASKABLE_ATTENTION)
VARIANTS: list[dict[str, object]] = [
    *({**SIZES, "attention": kind} for kind in CAUSAL),
    *({**SIZES, "attention": kind, "position": "learned", "copy": True} for kind in ("full", "linear")),
    {
        **SIZES,
        "layers": 3,
        "attention": ["compressed", "local", "strided"],
        "norm_position": "post",
        "position": "sinusoidal",
    },
    {**SIZES, "attention": "local+global", "position": "alibi", "copy": True, "qk_norm": True},
    {"output": "adaptive"},
    {"output": "adaptive", "output_cutoffs": [4, 9, 15], "embed_dim": 6, "copy": True},
    {"token_shift": True, "embed_dim": 6, "position": "learned"},
    {**SIZES, "token_shift": True, "attention": "compressed", "copy": True},
]
WINDOWED_VARIANTS: list[dict[str, object]] = [
    *({**SIZES, "mode": "windowed", "position": "learned", "attention": kind} for kind in WINDOWED),
    {**SIZES, "mode": "windowed", "attention": ["linformer", "compressed"], "copy": True},
    {**SIZES, "mode": "windowed", "attention": "induced", "position": "sinusoidal", "norm_position": "post"},
    {"mode": "windowed", "output": "adaptive", "copy": True, "token_shift": True},
]
PLAIN: list[dict[str, object]] = [
    {"position": position, "pool_query": query, "qk_norm": position == "rotary"}
    for position, query in zip(POSITIONS, itertools.cycle(QUERIES), strict=False)
]
WINDOWED_PLAIN: list[dict[str, object]] = [{**fields, "mode": "windowed"} for fields in PLAIN]


def build(**fields: object) -> LanguageModel:
    """A model of two blocks of width 8, with these fields of its configuration."""
    torch.manual_seed(0)
    config = ModelConfig.model_validate({"context": 12, "dim": 8, "layers": 2, "heads": 2, "ff_dim": 16} | fields)
    model = build_model(config, VOCABULARY).eval()
    if model.shift is not None:
        nn.init.normal_(model.shift.gain)  # one number for all features at first
    return model


def targets_of(model: LanguageModel | Ensemble, text: Tensor) -> Tensor:
    """As targets, the last tokens of a text (B, T), as many as the model predicts of it: (B, S)."""
    return text[:, -model.config.targets :]


def hidden(model: LanguageModel, text: Tensor) -> Tensor:
    """The output layer's inputs for the predictions of a text (B, T): (B, S, E)."""
    return model.score(text, targets_of(model, text))[1]


def tokens(*shape: int) -> Tensor:
    """The same random tokens for the same shape."""
    return torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(1))


def assert_trains(model: LanguageModel, text: Tensor) -> Tensor:
    """In training, every parameter has a finite gradient, and the nats, which are returned, are float32."""
    targets = targets_of(model, text)
    nats: Tensor = model.train()(text, targets)
    assert nats.shape == targets.shape
    assert nats.dtype == torch.float32
    for gradient in torch.autograd.grad(nats.sum(), list(model.parameters())):  # raises if one is unused
        assert gradient.isfinite().all()
    return nats
