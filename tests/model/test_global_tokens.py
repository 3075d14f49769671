"""Global attention: learned tokens before the sequence, against loops written out.

Shapes: T tokens, G global tokens, D the model's width, H heads.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.model.models import build

H, G, T = 2, 2, 5


def permitted(mode: str, query: int, key: int) -> bool:
    """Tokens attend to global tokens; these to all tokens, or if causal to global tokens up to themselves."""
    if query < G and mode == "causal":
        return key <= query
    return query < G or key < G


def block_written_out(block: Any, rows: list[Tensor], mode: str) -> list[Tensor]:
    """The outputs (D,) of one pre-norm block for the global tokens and the tokens."""
    layer, normalized = block.attention, [block.attention_residual.norm(row) for row in rows]
    q, k, v = ([part(row).chunk(H) for row in normalized] for part in (layer.query, layer.key, layer.value))
    after = []
    for query, row in enumerate(rows):
        keys = [key for key in range(G + T) if permitted(mode, query, key)]
        heads = []
        for h in range(H):
            scores = torch.stack([q[query][h] @ k[key][h] / math.sqrt(len(q[query][h])) for key in keys])
            heads.append(sum(w * v[key][h] for w, key in zip(scores.softmax(0), keys, strict=True)))
        attended = row + layer.output(torch.cat(heads))
        after.append(attended + block.feed_forward(block.feed_forward_residual.norm(attended)))
    return after


@pytest.mark.parametrize("mode", ["causal", "windowed"])
def test_the_encoder_equals_loops_over_learned_tokens_and_the_sequence(mode: str) -> None:
    model = build(mode=mode, attention="global", attention_globals=G, position="none")
    x, learned = torch.randn(1, T, 8), model.encoder.global_tokens
    assert learned is not None
    rows = [*learned, *x[0]]
    for block in model.encoder.blocks:
        rows = block_written_out(block, rows, mode)
    torch.testing.assert_close(model.encoder(x, torch.arange(T))[0], torch.stack(rows[G:]))


def test_a_model_without_global_attention_has_no_global_tokens() -> None:
    assert build(attention="local", attention_globals=G).encoder.global_tokens is None
