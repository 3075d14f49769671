"""The embedding's gradient, compiled for a CPU: the bits of the plain one, although threads share a token's row."""

import pytest
import torch

from lmtrain.nn.embedding import Embedding
from tests.helpers import compiles

TOKENS, WIDTH = 4096, 64


@compiles
@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("different", [1, 3, 1000])
def test_the_compiled_gradient_has_the_bits_of_the_plain_one(different: int) -> None:
    embedding = Embedding(1000, WIDTH)
    ids, upstream = torch.randint(different, (TOKENS,)), torch.randn(TOKENS, WIDTH)

    def loss() -> torch.Tensor:
        return (embedding(ids) * upstream).sum()

    expected = torch.zeros_like(embedding.weight)
    for number, row in zip(ids.tolist(), upstream, strict=True):
        expected[number] += row
    for function in (loss, torch.compile(loss, fullgraph=True)):
        embedding.weight.grad = None
        function().backward()  # type: ignore[no-untyped-call]
        assert torch.equal(embedding.weight.grad, expected)  # type: ignore[arg-type]


@compiles
def test_it_has_the_values_of_torch_without_gradients() -> None:
    embedding, ids = Embedding(7, WIDTH), torch.arange(7).view(1, 7)
    with torch.no_grad():
        assert torch.equal(torch.compile(embedding, fullgraph=True)(ids), embedding.weight.unsqueeze(0))
