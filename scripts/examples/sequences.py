"""Reverse sequences with an encoder-decoder, token by token or in parallel.

    python scripts/examples/sequences.py [--decoding autoregressive|parallel|parallel-fixed]

A sequence has 4 to 16 random symbols out of 10. The autoregressive model (Vaswani et al., 2017) decodes greedily; the
parallel one (Gu et al., 2018) predicts the number of tokens from the source, and then all tokens in one pass; the
parallel-fixed one predicts the same number of tokens for every source, cut at the first END.
`exact_match` is the share of unseen sequences that are right from end to end: training batches leave them out.
`exact_match_given_lengths` is the parallel model's share when the true lengths replace those that it predicts.

Writes sequences-reverse-DECODING.png, the attention of each token to the source, and prints the results.

Shapes: B rows, Ts positions of the source, T positions of the decoder, H heads.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from example import parse, report, train
from matplotlib.figure import Figure
from torch import Tensor

from lmtrain.generation.options import Options
from lmtrain.generation.sampling import sample
from lmtrain.nn.encoder_decoder import EncoderDecoderConfig
from lmtrain.nn.non_autoregressive import NonAutoregressive
from lmtrain.nn.seq2seq import Seq2Seq, shift

SYMBOLS, SHORTEST, LONGEST = 10, 4, 16
UNSEEN = 2048
CONFIG = EncoderDecoderConfig(
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
    "autoregressive": lambda: Seq2Seq(CONFIG),
    "parallel": lambda: NonAutoregressive(CONFIG),
    "parallel-fixed": lambda: NonAutoregressive(CONFIG, "fixed"),
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
        Options(max_tokens=CONFIG.max_length),
        is_end=lambda ids: ids[-1] == CONFIG.end_id,
        blocked=[CONFIG.begin_id],
    )
    return [list(text.ids[:-1] if text.ids[-1] == CONFIG.end_id else text.ids) for text in texts]


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
        count = target.shape[1] if model.length_classifier is not None else CONFIG.max_length  # as many as in training
        positions = torch.ones(1, count, dtype=torch.bool)
        return model.cross_weights(source, positions)[-1, 0, :, : target.shape[1]]
    return model.cross_weights(source, shift(target, None, CONFIG)[0])[-1, 0, :, :-1]  # the last position predicts END


def draw_weights(tables: dict[str, Tensor], sequence: Sequences) -> Figure:
    """Draw tables of weights (T, Ts) beside each other, a row for each token of one sequence (B = 1)."""
    source, target = (symbols[sequence.valid].tolist() for symbols in (sequence.source, sequence.target))
    figure = Figure(figsize=(3.2 * len(tables), 3.2), layout="constrained")
    for axes, (title, weights) in zip(figure.subplots(1, len(tables)), tables.items(), strict=True):
        image = axes.imshow(weights.numpy(), vmin=0, vmax=1, cmap="magma")
        axes.set(title=title, xlabel="source", ylabel="target")
        axes.set_xticks(range(len(source)), source)
        axes.set_yticks(range(len(target)), target)
    figure.colorbar(image, ax=figure.axes, label="weight")
    return figure


def main() -> None:
    """Train, evaluate on unseen sequences, draw."""
    options = parse(__doc__, steps=1000, decoding=list(MODELS))
    unseen = draw(UNSEEN)
    keys = unseen.keys()
    model = MODELS[options.decoding]()

    def loss() -> Tensor:
        batch = draw(128)
        return model.loss(*batch.rows(~torch.isin(batch.keys(), keys)))

    trained = train(loss, model.parameters(), options.steps, 2e-3)
    model.eval()
    example = unseen.rows(unseen.lengths.argmax().unsqueeze(0))
    weights = cross_weights(model, example)
    heads = {f"head {number}": head for number, head in enumerate(weights)}
    figure = draw_weights(heads | {"mean": weights.mean(0)}, example)
    results = {"exact_match": exact_match(model, unseen)}
    if options.decoding == "parallel":
        results["exact_match_given_lengths"] = exact_match(model, unseen, unseen.lengths)
    results |= {"unseen": UNSEEN, **trained}
    report(f"sequences-reverse-{options.decoding}", results, figure, options)


if __name__ == "__main__":
    main()
