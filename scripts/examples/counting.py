"""Counting with attention: how many positions hold a symbol, and how many positions are there?

    python scripts/examples/counting.py

A sequence has 4 to 64 symbols, padded to 64; the question is one of the symbols, or "every position". In one multi-head
attention block (MAB; Lee et al., 2019) the question attends to the sequence, and the feed-forward layer makes a number
of the result.

Attention computes averages, and an average contains a symbol's share of the positions but not their number: doubling a
sequence changes nothing. Therefore one BEGIN token stands before the sequence. If it scores 0, each of n positions that
answer the question scores s, and the others far less, BEGIN has the weight 1 / (1 + n exp(s)) in the softmax, from
which n can be read. That is learned from the counts only; no position is encoded.

The same block is also trained without BEGIN, to show that BEGIN is what counts: `r2_without_begin` is what the shares
tell, and which symbols occur at all (more of them do in a long sequence). The results are for 4,096 unseen sequences;
`exact` is how often the rounded count is right.

Writes counting.png: predicted against true counts, with BEGIN and without.

Shapes: B sequences, T = 65 tokens, D the model's width.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from example import Results, parse, report, train
from matplotlib.figure import Figure
from torch import Tensor, nn

from lmtrain.nn.sets import MAB

SHORTEST, LONGEST = 4, 64
SYMBOLS = 4
BEGIN = SYMBOLS  # a token, after those of the symbols
EVERY = SYMBOLS  # a question, after those about the symbols
UNSEEN = 4096


class Questions(NamedTuple):
    """tokens (B, T) int, BEGIN first; valid (B, T) bool; asked (B,) int, a symbol or EVERY; answer (B,) float."""

    tokens: Tensor
    valid: Tensor
    asked: Tensor
    answer: Tensor


def draw(count: int) -> Questions:
    """Random sequences, each with symbols of its own frequencies."""
    valid = torch.arange(LONGEST) < torch.randint(SHORTEST, LONGEST + 1, (count, 1))
    frequencies = torch.empty(count, SYMBOLS).exponential_()  # divided by their sum, uniform on the simplex
    symbols = torch.multinomial(frequencies, LONGEST, replacement=True)
    asked = torch.randint(SYMBOLS + 1, (count, 1))
    found = ((symbols == asked) | (asked == EVERY)) & valid
    return Questions(
        F.pad(symbols, (1, 0), value=BEGIN), F.pad(valid, (1, 0), value=True), asked.squeeze(-1), found.sum(-1).float()
    )


class Model(nn.Module):
    """One attention block in which the question attends to the sequence, with or without its BEGIN."""

    def __init__(self, begin: bool, dim: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.first = 0 if begin else 1
        self.question = nn.Embedding(SYMBOLS + 1, dim)
        self.token = nn.Embedding(SYMBOLS + 1, dim)
        self.block = MAB(dim, heads, form="residual")
        self.count = nn.Linear(dim, 1)

    def forward(self, questions: Questions) -> Tensor:
        """Counts (B,)."""
        tokens, valid = questions.tokens[:, self.first :], questions.valid[:, self.first :]
        asked = self.block(self.question(questions.asked).unsqueeze(1), self.token(tokens), valid=valid)  # (B, 1, D)
        result: Tensor = self.count(asked).flatten() * LONGEST
        return result


def main(argv: list[str] | None = None) -> Results:
    """Train with and without BEGIN, evaluate on unseen sequences, draw."""
    options = parse(__doc__, argv, steps=1500)
    unseen = draw(UNSEEN)
    model, blind = Model(begin=True), Model(begin=False)
    trained = fit(model, options.steps)
    fit(blind, options.steps)
    with torch.no_grad():
        counted, guessed = model(unseen), blind(unseen)
    results = {
        "r2": r2(counted, unseen.answer),
        "exact": (counted.round() == unseen.answer).float().mean().item(),
        "r2_without_begin": r2(guessed, unseen.answer),
        **trained,
    }
    return report("counting", results, show({"with BEGIN": counted, "without BEGIN": guessed}, unseen), options)


def fit(model: Model, steps: int) -> Results:
    """Train on random sequences."""

    def loss() -> Tensor:
        questions = draw(256)
        return F.mse_loss(model(questions) / LONGEST, questions.answer / LONGEST)

    return train(loss, list(model.parameters()), steps, 3e-3)


def r2(predicted: Tensor, true: Tensor) -> float:
    """The share of the counts' variance that the prediction explains."""
    return 1 - ((predicted - true).square().mean() / true.var(correction=0)).item()


def show(predictions: dict[str, Tensor], questions: Questions) -> Figure:
    """Predicted against true counts, side by side."""
    figure = Figure(figsize=(12, 6), layout="constrained")
    every = questions.asked == EVERY
    for axes, (name, predicted) in zip(figure.subplots(1, 2, sharey=True), predictions.items(), strict=True):
        for asked, chosen in (("a symbol", ~every), ("every position", every)):
            true, guess = questions.answer[chosen].tolist(), predicted[chosen].tolist()
            axes.scatter(true, guess, 6, alpha=0.4, label=asked)
        axes.axline((0, 0), slope=1, color="grey", linewidth=1, zorder=0)
        axes.set(title=f"{name}: R² = {r2(predicted, questions.answer):.4f}", xlabel="true count")
    axes.legend(title="asked for")
    figure.supylabel("predicted count")
    return figure


if __name__ == "__main__":
    main()
