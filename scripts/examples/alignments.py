"""Copy sequences of digits with four ways to attend to the source: how fast each is learned, and how it aligns.

    python scripts/examples/alignments.py

A sequence has 4 to 16 random digits; the target is the source itself, decoded greedily. The ways are softmax attention,
with and without the guided attention loss (Tachibana et al., 2018), monotonic attention (Raffel et al., 2017), which
never goes back in the source, and location-aware attention (Chorowski et al., 2015), which sees where it has attended
to before. Each starts from the same seed.

`exact_match` is the share of 512 unseen sequences that are right from end to end. It is evaluated every 25 steps;
`steps_to_99` is the first of these steps with 99% or more, if any.

Writes alignments.png: the attention of each token of one sequence to the source, as the mean over heads.

Shapes: Ts positions of the source, T positions of the decoder.
"""

from dataclasses import replace
from itertools import count

import torch
from example import SEED, Results, parse, report, train
from sequences import CONFIG, Sequences, cross_weights, draw, draw_weights, exact_match
from torch import Tensor

from lmtrain.nn.alignment import LocationAwareAttention, MonotonicAttention
from lmtrain.nn.encoder_decoder import EncoderDecoderConfig
from lmtrain.nn.seq2seq import Seq2Seq

UNSEEN, EVERY, ENOUGH = 512, 25, 0.99
WAYS: dict[str, tuple[EncoderDecoderConfig, float]] = {
    "softmax": (CONFIG, 0.0),
    "softmax, guided": (CONFIG, 1.0),
    "monotonic": (replace(CONFIG, cross_attention=MonotonicAttention), 0.0),
    "location-aware": (replace(CONFIG, cross_attention=LocationAwareAttention), 0.0),
}
"""The configuration of each model, and the weight of its guided attention loss."""


def copies(rows: int) -> Sequences:
    """Random sequences, each the target of itself."""
    sequences = draw(rows)
    return sequences._replace(target=sequences.source)


def learn(model: Seq2Seq, guided: float, steps: int, unseen: Sequences) -> Results:
    """Train on random sequences; return the first step with 99% exact match, and the final exact match."""
    keys, numbers = unseen.keys(), count()
    shares: dict[int, float] = {}  # by the number of steps

    def evaluate(step: int) -> None:
        model.eval()
        shares[step] = exact_match(model, unseen)
        model.train()

    def loss() -> Tensor:
        step = next(numbers)
        if step and step % EVERY == 0:
            evaluate(step)
        batch = copies(128)
        return model.loss(*batch.rows(~torch.isin(batch.keys(), keys)), guided=guided)

    trained = train(loss, model.parameters(), steps, 2e-3)
    evaluate(steps)
    first = next((step for step, share in shares.items() if share >= ENOUGH), None)
    return {"steps_to_99": first, "exact_match": shares[steps], **trained}


def main() -> None:
    """Train each way, evaluate on unseen sequences, draw."""
    options = parse(__doc__, steps=800)
    unseen = copies(UNSEEN)
    example = unseen.rows(unseen.lengths.argmax().unsqueeze(0))
    rows, alignments = [], {}
    for way, (config, guided) in WAYS.items():
        torch.manual_seed(SEED)
        model = Seq2Seq(config)
        rows.append({"way": way, **learn(model, guided, options.steps, unseen)})
        alignments[way] = cross_weights(model.eval(), example).mean(0)
    report("alignments", {"unseen": UNSEEN, "rows": rows}, draw_weights(alignments, example), options)


if __name__ == "__main__":
    main()
