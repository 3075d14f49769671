"""Reverse sequences with an encoder-decoder, token by token or in parallel.

    python scripts/examples/sequences.py [--decoding autoregressive|parallel|parallel-fixed]

A sequence has 4 to 16 random symbols out of 10. The autoregressive model (Vaswani et al., 2017) decodes greedily with
cached keys and values; the parallel one (Gu et al., 2018) predicts the number of tokens from the source, and then all
tokens in one pass; the parallel-fixed one predicts the same number of tokens for every source, cut at the first END.
`exact_match` is the share of unseen sequences that are right from end to end: training batches leave them out.
`exact_match_given_lengths` is the parallel model's share when the true lengths replace those that it predicts.

Writes sequences-reverse-DECODING.png, the attention of each token to the source, and prints the results.

Shapes: B rows, Ts positions of the source, T positions of the decoder, H heads.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from example import Results, parse, report, train
from matplotlib.figure import Figure
from torch import Tensor

from lmtrain.generation.options import Options
from lmtrain.generation.sampling import sample
from lmtrain.nn.encoder_decoder import Sizes
from lmtrain.nn.non_autoregressive import NonAutoregressive
from lmtrain.nn.seq2seq import Seq2Seq, shift

SYMBOLS, SHORTEST, LONGEST = 10, 4, 16
UNSEEN = 2048
SIZES = Sizes(
    source_vocab=SYMBOLS,
    target_vocab=SYMBOLS + 2,
    dim=64,
    heads=4,
    ff_dim=128,
    encoder_layers=2,
    decoder_layers=1,
    max_length=LONGEST + 1,
)
MODELS: dict[str, Callable[[], Seq2Seq | NonAutoregressive]] = {
    "autoregressive": lambda: Seq2Seq(SIZES),
    "parallel": lambda: NonAutoregressive(SIZES),
    "parallel-fixed": lambda: NonAutoregressive(SIZES, "fixed"),
}


class Sequences(NamedTuple):
    """source and target (B, Ts), zeros where padded; valid (B, Ts) bool; lengths (B,)."""

    source: Tensor
    target: Tensor
    valid: Tensor
    lengths: Tensor

    def rows(self, index: Tensor) -> "Sequences":
        """These rows only."""
        return Sequences(*(tensor[index] for tensor in self))

    def keys(self) -> Tensor:
        """Return a number that identifies each source, (B,)."""
        digits = (self.source + 1) * self.valid
        return (digits * (SYMBOLS + 1) ** torch.arange(LONGEST)).sum(-1)


def draw(count: int) -> Sequences:
    """Random sequences, each with its reverse as the target."""
    lengths = torch.randint(SHORTEST, LONGEST + 1, (count,))
    places = torch.arange(LONGEST)
    valid = places < lengths.unsqueeze(-1)
    source = torch.randint(SYMBOLS, (count, LONGEST)) * valid
    back = (lengths.unsqueeze(-1) - 1 - places).clamp_min(0)
    return Sequences(source, source.gather(1, back) * valid, valid, lengths)


def decode(model: Seq2Seq | NonAutoregressive, sequences: Sequences, lengths: Tensor | None = None) -> list[list[int]]:
    """Return the tokens that the model generates from each source, without END.

    `lengths` (B,) replace those that a parallel model predicts.
    """
    if isinstance(model, NonAutoregressive):
        words, lengths = model.decode(sequences.source, sequences.valid, lengths=lengths)
        return [row[:length] for row, length in zip(words.tolist(), lengths.tolist(), strict=True)]
    texts = sample(
        *model.start(sequences.source, sequences.valid),
        model.step,
        Options(max_tokens=SIZES.max_length),
        is_end=lambda ids: ids[-1] == SIZES.end_id,
        blocked=[SIZES.begin_id],
    )
    return [list(text.ids[:-1] if text.ids[-1] == SIZES.end_id else text.ids) for text in texts]


def exact_match(model: Seq2Seq | NonAutoregressive, sequences: Sequences, lengths: Tensor | None = None) -> float:
    """Return the fraction of sequences that are right from end to end. `lengths` are as for `decode`."""
    rows = zip(sequences.target.tolist(), sequences.lengths.tolist(), strict=True)
    targets = [row[:length] for row, length in rows]
    generated = decode(model, sequences, lengths)
    right: int = sum(a == b for a, b in zip(generated, targets, strict=True))
    return right / len(targets)


@torch.no_grad()
def cross_weights(model: Seq2Seq | NonAutoregressive, sequence: Sequences) -> Tensor:
    """Return the attention of each token of one sequence (B = 1) to the source, in the last layer: (H, T, Ts)."""
    source, target = sequence.source[:, sequence.valid[0]], sequence.target[:, sequence.valid[0]]
    if isinstance(model, NonAutoregressive):
        count = target.shape[1] if model.length_classifier is not None else SIZES.max_length  # as many as in training
        positions = torch.ones(1, count, dtype=torch.bool)
        return model.cross_weights(source, positions)[-1, 0, :, : target.shape[1]]
    return model.cross_weights(source, shift(target, None, SIZES)[0])[-1, 0, :, :-1]  # the last position predicts END


def draw_picture(weights: Tensor, sequence: Sequences) -> Figure:
    """Draw the weights of every head and their mean, a row for each token."""
    length = int(sequence.lengths[0])
    source, target = sequence.source[0, :length].tolist(), sequence.target[0, :length].tolist()
    titles = [*(f"head {head}" for head in range(len(weights))), "mean"]
    figure = Figure(figsize=(2.4 * len(titles), 3), layout="constrained")
    panels = figure.subplots(1, len(titles), sharey=True)
    for axes, table, title in zip(panels, [*weights, weights.mean(0)], titles, strict=True):
        axes.imshow(table.numpy(), vmin=0, vmax=1, cmap="magma")
        axes.set(title=title, xlabel="source")
        axes.set_xticks(range(length), source, fontsize=9)
        axes.set_yticks(range(length), target, fontsize=9)
        axes.tick_params(length=0)
    panels[0].set_ylabel("target")
    return figure


def main(argv: list[str] | None = None) -> Results:
    """Train, evaluate on unseen sequences, draw."""
    options = parse(__doc__, argv, steps=1000, decoding=list(MODELS))
    unseen = draw(UNSEEN)
    keys = unseen.keys()
    model = MODELS[options.decoding]()

    def loss() -> Tensor:
        batch = draw(128)
        return model.loss(*batch.rows(~torch.isin(batch.keys(), keys)))

    trained = train(loss, list(model.parameters()), options.steps, 2e-3)
    model.eval()
    example = unseen.rows(unseen.lengths.argmax().unsqueeze(0))
    figure = draw_picture(cross_weights(model, example), example)
    results = {"exact_match": exact_match(model, unseen)}
    if options.decoding == "parallel":
        results["exact_match_given_lengths"] = exact_match(model, unseen, unseen.lengths)
    results |= {"unseen": UNSEEN, **trained}
    return report(f"sequences-reverse-{options.decoding}", results, figure, options)


if __name__ == "__main__":
    main()
