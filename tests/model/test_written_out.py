"""The whole language model against its formulas, written out with plain sums over its raw weights.

Shapes: T tokens, D the model's width, H heads of D / H features, V words.
"""

import math

import pytest
import torch
from torch import Tensor, nn

from lmtrain.model.language_model import LanguageModel
from tests.model.models import build, tokens

SOURCE: dict[str, object] = {
    "mode": "windowed",
    "norm": "scale",
    "position": "sinusoidal",
    "pool_query": "seed",
    "pool_residual": "seed",
    "activation": "relu",
}
"""The published design: a window in both directions, and one attention pool with a seed."""
PATTERNS: dict[str, object] = {
    "attention": ["local+strided", "local"],
    "attention_window": 2,
    "attention_stride": 5,
    "position": "alibi",
}
GLOBAL: dict[str, object] = PATTERNS | {"attention": ["global", "local+global"], "attention_globals": 2}


class WrittenOut:
    """The formulas, with the weights of a model in float64."""

    def __init__(self, model: LanguageModel) -> None:
        self.config = model.config
        self.heads = model.config.heads
        self.width = model.config.dim // self.heads
        self.weights = {name: weight.detach() for name, weight in model.named_parameters()}

    def product(self, name: str, x: Tensor) -> Tensor:
        return self.weights[f"{name}.weight"] @ x

    def norm(self, name: str, x: Tensor) -> Tensor:
        if self.config.norm == "scale":
            return self.weights[f"{name}.length"] * x / x.square().sum().sqrt()
        return self.weights[f"{name}.weight"] * x / (x.square().mean() + 1e-6).sqrt()

    def feed_forward(self, name: str, x: Tensor) -> Tensor:
        hidden = self.product(f"{name}.hidden", x)
        relu = self.config.activation == "relu"
        active = hidden.clamp_min(0) if relu else hidden * (1 + torch.erf(hidden / math.sqrt(2))) / 2
        return self.product(f"{name}.output", active)

    def angles(self, position: int, width: int) -> Tensor:
        return torch.tensor([position / 10_000 ** (2 * i / width) for i in range(width // 2)], dtype=torch.float64)

    def head(self, x: Tensor, head: int) -> Tensor:
        return x[head * self.width : (head + 1) * self.width]

    def rotated(self, x: Tensor, position: int) -> Tensor:
        """Features i and i + D / 2 of a head are the two coordinates of a vector in a plane."""
        if self.config.position != "rotary":
            return x
        turned = x.clone()
        for i, angle in enumerate(self.angles(position, self.width).tolist()):
            one, other = x[i], x[i + self.width // 2]
            turned[i] = one * math.cos(angle) - other * math.sin(angle)
            turned[i + self.width // 2] = one * math.sin(angle) + other * math.cos(angle)
        return turned

    def allowed(self, layer: int, query: int, key: int) -> bool:
        """Whether attention lets a query attend to a key: positions, of which the first are those of global tokens."""
        if self.config.mode == "causal" and key > query:
            return False
        distance, parts = abs(query - key), self.config.layer_attention[layer].split("+")
        is_near = "local" in parts and distance < self.config.attention_window
        is_near |= "global" in parts and min(query, key) < self.config.attention_globals
        return "full" in parts or is_near or ("strided" in parts and distance % self.config.attention_stride == 0)

    def mean(self, scores: list[Tensor], values: list[Tensor]) -> Tensor:
        weights = torch.stack(scores).exp()
        return sum((w * value for w, value in zip(weights / weights.sum(), values, strict=True)), torch.zeros(()))

    def block(self, layer: int, x: list[Tensor]) -> list[Tensor]:
        name = f"encoder.blocks.{layer}"
        normed = [self.norm(f"{name}.attention_residual.norm", state) for state in x]
        query, key, value = (
            [self.product(f"{name}.attention.{part}", state) for state in normed] for part in ("query", "key", "value")
        )
        result = []
        for t, state in enumerate(x):
            seen = [i for i in range(len(x)) if self.allowed(layer, t, i)]
            pooled = []
            for head in range(self.heads):
                asking = self.rotated(self.head(query[t], head), t)
                keys = [self.rotated(self.head(key[i], head), i) for i in seen]
                values = [self.head(value[i], head) for i in seen]
                slope = 2 ** (-8 * (head + 1) / self.heads) if self.config.position == "alibi" else 0.0
                distances = [slope * abs(t - i) for i in seen]
                scores = [asking @ k / math.sqrt(self.width) - d for k, d in zip(keys, distances, strict=True)]
                pooled.append(self.mean(scores, values))
            h = state + self.product(f"{name}.attention.output", torch.cat(pooled))
            normed_h = self.norm(f"{name}.feed_forward_residual.norm", h)
            result.append(h + self.feed_forward(f"{name}.feed_forward", normed_h))
        return result

    def pool(self, x: list[Tensor], t: int) -> Tensor:
        seed, pooled = self.weights["pool.seed"], []
        normed = [self.norm("pool.norm", state) for state in x[: t + 1]]
        for head in range(self.heads):
            keys = [self.head(self.product("pool.key", state), head) for state in normed]
            values = [self.head(self.product("pool.value", state), head) for state in normed]
            scores = [self.head(seed, head) @ key / math.sqrt(self.width) for key in keys]
            if self.config.pool_query == "recency":
                slope = (1 + self.weights["pool.slope"][head].exp()).log()
                scores = [score - slope * (t - i) for i, score in enumerate(scores)]
            pooled.append(self.mean(scores, values))
        residual = seed if self.config.pool_residual == "seed" else x[t]
        h = residual + self.product("pool.output", torch.cat(pooled))
        return h + self.feed_forward("pool.feed_forward", self.norm("pool.feed_forward_norm", h))

    def log_probs(self, text: list[int]) -> Tensor:
        """log p of the word after each position, (T, V), or if windowed of the word after the window, (1, V)."""
        embedding = self.weights["embedding.weight"]
        x = [embedding[word] * self.config.dim / 2 for word in text]
        if self.config.position == "sinusoidal":
            for t, angles in enumerate(self.angles(t, self.config.dim) for t in range(len(text))):
                x[t] = x[t] + torch.stack((angles.sin(), angles.cos()), dim=-1).flatten()
        learned = list(self.weights.get("encoder.global_tokens", ()))
        x = [*learned, *x]
        for layer in range(self.config.layers):
            x = self.block(layer, x)
        x = x[len(learned) :]
        causal = self.config.mode == "causal"
        pooled = [self.pool(x, t) for t in (range(len(text)) if causal else [len(text) - 1])]
        logits = [embedding @ self.norm("norm", state) + self.weights["output_bias"] for state in pooled]
        return torch.stack([scores - scores.exp().sum().log() for scores in logits])


@pytest.mark.parametrize(
    "fields",
    [SOURCE, {}, *(kind | mode for kind in (PATTERNS, GLOBAL) for mode in ({}, {"mode": "windowed"}))],
    ids=str,
)
def test_the_model_is_its_formulas(fields: dict[str, object]) -> None:
    model, text = build(**fields).double(), tokens(1, 12)
    for name, weight in model.named_parameters():
        nn.init.normal_(weight, mean=1.0 if name.endswith(("norm.weight", "length")) else 0.0, std=0.3)
    torch.testing.assert_close(model.predict(text)[0], WrittenOut(model).log_probs(text[0].tolist()), atol=1e-6, rtol=0)


def test_sizes_of_attention_are_those_of_the_configuration() -> None:
    sizes: dict[str, object] = {
        "position": "none",
        "attention_globals": 3,
        "compression": 5,
        "inducing_points": 7,
        "projected_length": 6,
    }
    model = build(mode="windowed", layers=3, attention=["global", "compressed", "induced"], **sizes)
    names = "encoder.global_tokens", "encoder.blocks.2.inducing"
    assert [len(model.get_parameter(name)) for name in names] == [3, 7]
    assert build(attention="local", **sizes).encoder.global_tokens is None
    assert model.encoder.blocks[0].attention.pattern.global_tokens == 3
    assert model.encoder.blocks[1].attention.stride == 5
    projected = build(mode="windowed", attention="linformer", **sizes)
    assert projected.get_parameter("encoder.blocks.0.attention.mix_key").shape == (6, 12)
