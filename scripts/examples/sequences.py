"""Copy sequences of digits in six ways: with four kinds of attention to the source, and with all digits in one pass.

    python scripts/examples/sequences.py

A sequence has 8 to 16 random digits, so that hardly any occurs twice; the target is the source itself.

The first four decode token by token, greedily: with softmax attention (Vaswani et al., 2017), also with the guided
attention loss (Tachibana et al., 2018), with monotonic attention (Raffel et al., 2017), which never goes back in the
source, and with location-aware attention (Chorowski et al., 2015), which depends on where it attended before. The
parallel models (Gu et al., 2018) predict all tokens in one pass: `parallel` first their number, `parallel-fixed` the
same number for every source, cut at the first END. Each starts from the same seed.

`exact_match` is the share of 512 new sequences that are right from end to end.

Writes sequences.png: the attention of each token of one sequence to the source, as the mean over the heads.

Shapes: B rows, T positions.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from example import SEED, Results, parse, report, train
from matplotlib.figure import Figure
from torch import Tensor

from lmtrain.generation.options import Options
from lmtrain.generation.sampling import sample
from lmtrain.nn.alignment import LocationAwareAttention, MonotonicAttention
from lmtrain.nn.encoder_decoder import EncoderDecoderConfig
from lmtrain.nn.non_autoregressive import NonAutoregressive
from lmtrain.nn.seq2seq import Seq2Seq, shift

SYMBOLS, SHORTEST, LONGEST = 10, 8, 16
UNSEEN = 512
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
GUIDED = "softmax, guided"
MODELS: dict[str, Callable[[], Seq2Seq | NonAutoregressive]] = {
    "softmax": lambda: Seq2Seq(CONFIG),
    GUIDED: lambda: Seq2Seq(CONFIG),
    "monotonic": lambda: Seq2Seq(replace(CONFIG, cross_attention=MonotonicAttention)),
    "location-aware": lambda: Seq2Seq(replace(CONFIG, cross_attention=LocationAwareAttention)),
    "parallel": lambda: NonAutoregressive(CONFIG),
    "parallel-fixed": lambda: NonAutoregressive(CONFIG, "fixed"),
}


def draw(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random sequences (B, T), zeros where padded; valid (B, T) bool; lengths (B,)."""
    lengths = torch.randint(SHORTEST, LONGEST + 1, (count,))
    valid = torch.arange(LONGEST) < lengths.unsqueeze(-1)
    return torch.randint(SYMBOLS, (count, LONGEST)) * valid, valid, lengths


def learn(model: Seq2Seq | NonAutoregressive, steps: int, **options: float) -> Results:
    """Train on random sequences, with these options of the loss."""

    def loss() -> Tensor:
        sequences, valid, lengths = draw(128)
        return model.loss(sequences, sequences, valid, lengths, **options)

    return train(loss, model.parameters(), steps, 2e-3)


def decode(model: Seq2Seq | NonAutoregressive, sequences: Tensor, valid: Tensor) -> list[list[int]]:
    """Return the tokens that the model generates from each sequence (B, T), without END."""
    if isinstance(model, NonAutoregressive):
        words, lengths = model.decode(sequences, valid)
        return [row[:length] for row, length in zip(words.tolist(), lengths.tolist(), strict=True)]
    texts = sample(
        *model.start(sequences, valid),
        model.step,
        Options(max_tokens=CONFIG.max_length),
        is_end=lambda ids: ids[-1] == CONFIG.end_id,
        blocked=[CONFIG.begin_id],
    )
    return [[token for token in text.ids if token != CONFIG.end_id] for text in texts]


def exact_match(model: Seq2Seq | NonAutoregressive, sequences: Tensor, valid: Tensor) -> float:
    """Return the fraction of sequences (B, T) that are right from end to end."""
    expected = [row[real].tolist() for row, real in zip(sequences, valid, strict=True)]
    right: int = sum(a == b for a, b in zip(decode(model, sequences, valid), expected, strict=True))
    return right / len(expected)


@torch.no_grad()
def cross_weights(model: Seq2Seq | NonAutoregressive, digits: Tensor) -> Tensor:
    """Return the attention of each token of one sequence (1, T) to itself, in the last layer: (T, T)."""
    inputs = shift(digits, None, CONFIG)[0]
    if isinstance(model, NonAutoregressive):
        count = digits.shape[1] if model.length_classifier is not None else CONFIG.max_length  # as many as in training
        inputs = torch.ones(1, count, dtype=torch.bool)
    attended: Tensor = model(digits, inputs)[1][-1, 0].mean(0)
    return attended[: digits.shape[1]]  # further positions predict END


def draw_weights(tables: dict[str, Tensor], digits: list[int]) -> Figure:
    """Draw the attention of one sequence (T, T) for each model."""
    figure = Figure(figsize=(10, 6.6), layout="constrained")
    for axes, (title, weights) in zip(figure.subplots(2, 3).flat, tables.items(), strict=True):
        image = axes.imshow(weights.numpy(), vmin=0, vmax=1, cmap="magma")
        axes.set(title=title, xlabel="source", ylabel="target")
        axes.set_xticks(range(len(digits)), digits)
        axes.set_yticks(range(len(digits)), digits)
    figure.colorbar(image, ax=figure.axes, label="weight")
    return figure


def main() -> None:
    """Train each model, evaluate it on new sequences, draw."""
    options = parse(__doc__, steps=500)
    unseen, valid, lengths = draw(UNSEEN)
    digits = unseen[lengths.argmax(), : lengths.max()]
    rows, tables = [], {}
    for name, make in MODELS.items():
        torch.manual_seed(SEED)
        model = make()
        trained = learn(model, options.steps, **({"guided": 1.0} if name == GUIDED else {}))
        rows.append({"model": name, "exact_match": exact_match(model.eval(), unseen, valid), **trained})
        tables[name] = cross_weights(model, digits.unsqueeze(0))
    report("sequences", {"unseen": UNSEEN, "rows": rows}, draw_weights(tables, digits.tolist()), options)


if __name__ == "__main__":
    main()
