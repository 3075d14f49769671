"""Global attention: learned tokens before the sequence, against loops written out.

Shapes: T tokens, G global tokens, D the model's width, H heads.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from lmtrain.nn.attention import join_heads, split_heads
from tests.model.models import build
from tests.nn.patterns import loop

H, G, T = 2, 2, 5


def permitted(mode: str, query: int, key: int) -> bool:
    """Tokens attend to global tokens; these to all tokens, or if causal to global tokens up to themselves."""
    if query < G and mode == "causal":
        return key <= query
    return query < G or key < G


def block_written_out(block: Any, rows: Tensor, mode: str) -> Tensor:
    """One pre-norm block over the global tokens and the tokens: (1, G + T, D) -> (1, G + T, D)."""
    layer, normalized = block.attention, block.attention_residual.norm(rows)
    query, key, value = (split_heads(part(normalized), H) for part in (layer.query, layer.key, layer.value))
    pairs = torch.tensor([[permitted(mode, t, i) for i in range(G + T)] for t in range(G + T)])
    attended = rows + layer.output(join_heads(loop(query, key, value, pairs)))
    after: Tensor = attended + block.feed_forward(block.feed_forward_residual.norm(attended))
    return after


@pytest.mark.parametrize("mode", ["causal", "windowed"])
def test_the_encoder_equals_loops_over_learned_tokens_and_the_sequence(mode: str) -> None:
    model = build(mode=mode, attention="global", attention_globals=G, position="none")
    x, learned = torch.randn(1, T, 8), model.encoder.global_tokens
    assert learned is not None
    rows = torch.cat((learned.unsqueeze(0), x), dim=1)
    for block in model.encoder.blocks:
        rows = block_written_out(block, rows, mode)
    torch.testing.assert_close(model.encoder(x, torch.arange(T)), rows[:, G:])


def test_a_model_without_global_attention_has_no_global_tokens() -> None:
    assert build(attention="local", attention_globals=G).encoder.global_tokens is None
