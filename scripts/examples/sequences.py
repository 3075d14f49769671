"""Reverse or copy sequences with an encoder-decoder, word by word or all at once.

    python scripts/examples/sequences.py [--task reverse|copy] [--decoding autoregressive|parallel]

A sequence is 4 to 16 symbols out of 10, drawn at random. The autoregressive model (Vaswani et al., 2017) is decoded
greedily over cached keys and values; the parallel one (Gu et al., 2018) says from the source how many words there are,
and then all of them in one pass. `exact_match` is the share of sequences that are right from end to end, of sequences
that are in no training batch: what is drawn for training and is one of them is left out.

Writes sequences-TASK-DECODING.png, where each word looked in the source, and prints the results.

Shapes: B rows, Ts positions of the source, T places of the decoder, H heads.
"""

from pathlib import Path
from typing import NamedTuple

import torch
from example import Results, arguments, report, save, start, train
from torch import Tensor

from lmtrain.generation.sampling import sample
from lmtrain.generation.search import Rules
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


class Sequences(NamedTuple):
    """source and target (B, Ts), zeros where padded; valid (B, Ts) bool; lengths (B,)."""

    source: Tensor
    target: Tensor
    valid: Tensor
    lengths: Tensor

    def rows(self, index: Tensor) -> "Sequences":
        """These rows alone."""
        return Sequences(*(tensor[index] for tensor in self))

    def keys(self) -> Tensor:
        """A number for each source that no other has, (B,)."""
        digits = (self.source + 1) * self.valid
        return (digits * (SYMBOLS + 1) ** torch.arange(LONGEST)).sum(-1)


def draw(task: str, count: int) -> Sequences:
    """Random sequences and what is to be made of them."""
    lengths = torch.randint(SHORTEST, LONGEST + 1, (count,))
    places = torch.arange(LONGEST)
    valid = places < lengths.unsqueeze(-1)
    source = torch.randint(SYMBOLS, (count, LONGEST)) * valid
    back = (lengths.unsqueeze(-1) - 1 - places).clamp_min(0)
    target = source.gather(1, back) * valid if task == "reverse" else source
    return Sequences(source, target, valid, lengths)


def decode(model: Seq2Seq | NonAutoregressive, sequences: Sequences) -> list[list[int]]:
    """The words that the model makes of each source, without END."""
    if isinstance(model, NonAutoregressive):
        words, lengths = model.decode(sequences.source, sequences.valid)
        return [row[:length] for row, length in zip(words.tolist(), lengths.tolist(), strict=True)]
    rules = Rules(SIZES.max_length, lambda ids: ids[-1] == SIZES.end_id, blocked=frozenset({SIZES.begin_id}))
    found = sample(*model.start(sequences.source, sequences.valid), model.step, rules)
    return [list(text.ids[:-1] if text.finished else text.ids) for text in found]


def exact_match(model: Seq2Seq | NonAutoregressive, sequences: Sequences) -> float:
    """The share of sequences that are right from end to end."""
    targets = zip(sequences.target.tolist(), sequences.lengths.tolist(), strict=True)
    wanted = [row[:length] for row, length in targets]
    found = decode(model, sequences)
    right: int = sum(a == b for a, b in zip(found, wanted, strict=True))
    return right / len(wanted)


@torch.no_grad()
def cross_weights(model: Seq2Seq | NonAutoregressive, sequence: Sequences) -> Tensor:
    """Where each word of one sequence (B = 1) looks in the last layer: (H, T, Ts)."""
    source, target = sequence.source[:, sequence.valid[0]], sequence.target[:, sequence.valid[0]]
    if isinstance(model, NonAutoregressive):
        return model.cross_weights(source, torch.ones_like(target, dtype=torch.bool))[-1, 0]
    return model.cross_weights(source, shift(target, None, SIZES)[0])[-1, 0, :, :-1]  # the last place makes END


def draw_picture(weights: Tensor, sequence: Sequences, path: Path) -> None:
    """The weights of every head and their mean as images, words downwards."""
    from matplotlib.figure import Figure

    length = int(sequence.lengths[0])
    source, target = sequence.source[0, :length].tolist(), sequence.target[0, :length].tolist()
    figure = Figure(figsize=(4 * (len(weights) + 1), 4), layout="constrained")
    titles = [*(f"head {head}" for head in range(len(weights))), "mean"]
    for axes, table, title in zip(figure.subplots(1, len(titles)), [*weights, weights.mean(0)], titles, strict=True):
        axes.imshow(table.numpy(), vmin=0, vmax=1, cmap="magma")
        axes.set(title=title, xlabel="source", ylabel="target")
        axes.set_xticks(range(length), source)
        axes.set_yticks(range(length), target)
    save(figure, path)


def main(argv: list[str] | None = None) -> Results:
    """Train, judge on unseen sequences, draw."""
    parser = arguments(__doc__, steps=1000)
    parser.add_argument("--task", choices=["reverse", "copy"], default="reverse", help="(default: %(default)s)")
    parser.add_argument(
        "--decoding", choices=["autoregressive", "parallel"], default="autoregressive", help="(default: %(default)s)"
    )
    options = parser.parse_args(argv)
    start(options)
    unseen = draw(options.task, UNSEEN)
    keys = unseen.keys()
    model = Seq2Seq(SIZES) if options.decoding == "autoregressive" else NonAutoregressive(SIZES)
    losses = []

    def loss() -> Tensor:
        batch = draw(options.task, 128)
        batch = batch.rows(~torch.isin(batch.keys(), keys))
        nats = model.loss(batch.source, batch.target, batch.valid, batch.lengths)
        losses.append(nats.item())
        return nats

    seconds = train(loss, list(model.parameters()), options.steps, 2e-3)
    model.eval()
    picture = options.out / f"sequences-{options.task}-{options.decoding}.png"
    example = unseen.rows(unseen.lengths.argmax().unsqueeze(0))
    draw_picture(cross_weights(model, example), example, picture)
    results = {
        "task": options.task,
        "decoding": options.decoding,
        "exact_match": exact_match(model, unseen),
        "unseen": UNSEEN,
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "steps": options.steps,
        "seconds": round(seconds, 1),
        "picture": str(picture),
    }
    report(results)
    return results


if __name__ == "__main__":
    main()
