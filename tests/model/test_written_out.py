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
DEFAULT: dict[str, object] = {}


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

    def mean(self, scores: list[Tensor], values: list[Tensor]) -> Tensor:
        weights = torch.stack(scores).exp()
        return sum((w * value for w, value in zip(weights / weights.sum(), values, strict=True)), torch.zeros(()))

    def block(self, name: str, x: list[Tensor]) -> list[Tensor]:
        normed = [self.norm(f"{name}.attention_residual.norm", state) for state in x]
        query, key, value = (
            [self.product(f"{name}.attention.{part}", state) for state in normed] for part in ("query", "key", "value")
        )
        result = []
        for t, state in enumerate(x):
            seen = range(t + 1) if self.config.mode == "causal" else range(len(x))
            pooled = []
            for head in range(self.heads):
                asking = self.rotated(self.head(query[t], head), t)
                keys = [self.rotated(self.head(key[i], head), i) for i in seen]
                values = [self.head(value[i], head) for i in seen]
                pooled.append(self.mean([asking @ k / math.sqrt(self.width) for k in keys], values))
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
        """log p of the word after each position, (T, V), or if windowed of the word after the window, (V,)."""
        embedding = self.weights["embedding.weight"]
        x = [embedding[word] * self.config.dim / 2 for word in text]
        if self.config.position == "sinusoidal":
            for t, angles in enumerate(self.angles(t, self.config.dim) for t in range(len(text))):
                x[t] = x[t] + torch.stack((angles.sin(), angles.cos()), dim=-1).flatten()
        for layer in range(self.config.layers):
            x = self.block(f"encoder.blocks.{layer}", x)
        causal = self.config.mode == "causal"
        pooled = [self.pool(x, t) for t in (range(len(text)) if causal else [len(text) - 1])]
        logits = [embedding @ self.norm("norm", state) + self.weights["output_bias"] for state in pooled]
        found = torch.stack([scores - scores.exp().sum().log() for scores in logits])
        return found if causal else found[0]


@pytest.mark.parametrize("fields", [SOURCE, DEFAULT], ids=["source", "default"])
def test_the_model_is_its_formulas(fields: dict[str, object]) -> None:
    model, text = build(**fields).double(), tokens(1, 12)
    for name, weight in model.named_parameters():
        nn.init.normal_(weight, mean=1.0 if name.endswith(("norm.weight", "length")) else 0.0, std=0.3)
    torch.testing.assert_close(model.predict(text)[0], WrittenOut(model).log_probs(text[0].tolist()), atol=1e-6, rtol=0)
