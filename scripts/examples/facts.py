"""Read the facts out of a paragraph with an encoder-decoder, also those with names that never occurred in training.

    python scripts/examples/facts.py [--copy on|off] [--sampling 0|0.25]

A pair is the first paragraph of an article of the built-in sample corpus, and its facts in the order of the text:
"The Sarn is a compact river in Corland . ..." becomes "river: Sarn region: Corland ...". Every fourth name (of people,
towns, rivers, ...) is new: it occurs in no training pair. It has an id like any other word, but a softmax over the
vocabulary never learns to generate it. With a pointer to the source (See et al., 2017) the model can copy it:

- In training, names are exchanged at random, towns for rivers too, so that a name's role follows from the words around
  it and not from the name itself.
- After training, every new name gets the mean embedding of the known names, as all unknown words have one embedding in
  See et al.; only its position tells one new name from another.

`--sampling` is the rate of parallel scheduled sampling (Mihaylova & Martins, 2019). Training without copying needs
more steps, each of which takes less time: `--copy off --steps 1500`.

`exact_match` is the share of pairs whose facts are all right, in the right order: for unseen pairs whose names all
occurred in training, and for those with at least one new name; by greedy search, and by beam search of width 4.

Writes facts-copy-COPY.png (with sampling: facts-copy-COPY-sampling-RATE.png): for each word that greedy search
generated for a paragraph with new names, the probability of copying it from each source word, or without copying the
attention of the last layer. Prints the results.

Shapes: B pairs, Ts positions of the source, T of the target.
"""

import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from example import SEED, parse, report, train
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lmtrain.data.sample import LINE_END, encyclopedia
from lmtrain.generation.beam import beam_search
from lmtrain.generation.options import Options
from lmtrain.nn.encoder_decoder import EncoderDecoderConfig
from lmtrain.nn.seq2seq import Seq2Seq, shift

PAIRS, UNSEEN, BEAMS = 20_000, 512, 4
GRAMMAR = encyclopedia()
POOLS = ("men", "women", "surnames", "towns", "rivers", "regions", "works", "ships", "villages")
NAMES = [name for pool in POOLS for name in GRAMMAR.pools[pool].values if name != "<unk>"]
NEW = frozenset(NAMES[3::4])
"""The names that occur in no training pair."""
KNOWN = [name for name in NAMES if name not in NEW]

Ids = dict[str, int]
"""Each word's id."""


class Pair(NamedTuple):
    """A paragraph and its facts, as words."""

    source: tuple[str, ...]
    target: tuple[str, ...]


def pairs(seed: int) -> Iterator[Pair]:
    """Yield the first paragraph of one article after the other, without end."""
    uniform = random.Random(seed).random
    while True:
        source, facts, lines = [], dict[str, str](), 0
        for token, _ in GRAMMAR.article(uniform, facts):
            lines += token == LINE_END
            if lines == 3:  # after the title and an empty line
                break
            if lines == 2 and token != LINE_END:
                source.append(token)
        yield Pair(tuple(source), tuple(word for name, value in facts.items() for word in (f"{name}:", value)))


def rename(pair: Pair, names: random.Random) -> Pair:
    """Return the pair with its names replaced by random known names of any kind."""
    old = sorted({*NAMES}.intersection(pair.source))
    others = dict(zip(old, names.sample(KNOWN, len(old)), strict=True))
    return Pair(*(tuple(others.get(word, word) for word in text) for text in pair))


def split(seed: int) -> tuple[list[Pair], list[Pair], list[Pair]]:
    """Return UNSEEN pairs with known names, UNSEEN with at least one new name, and PAIRS renamed for training."""
    known, new, training = list[Pair](), list[Pair](), list[Pair]()
    drawn, names = pairs(seed), random.Random(f"names {seed}")
    while min(len(known), len(new)) < UNSEEN:
        pair = next(drawn)
        (known if NEW.isdisjoint(pair.source) else new).append(pair)
    while len(training) < PAIRS:
        pair = rename(next(drawn), names)
        if pair not in known:
            training.append(pair)
    return known[:UNSEEN], new[:UNSEEN], training


def encode(texts: Sequence[tuple[str, ...]], ids: Ids) -> tuple[Tensor, Tensor]:
    """Return ids (B, T), padded with zeros, and lengths (B,)."""
    rows = [torch.tensor([ids[word] for word in text], dtype=torch.long) for text in texts]
    return pad_sequence(rows, batch_first=True), torch.tensor([len(row) for row in rows])


def batch(chosen: Sequence[Pair], ids: Ids) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return source (B, Ts) and target (B, T), padded with zeros; valid (B, Ts) bool; lengths (B,) of the targets."""
    source, read = encode([pair.source for pair in chosen], ids)
    target, lengths = encode([pair.target for pair in chosen], ids)
    return source, target, torch.arange(source.shape[1]) < read.unsqueeze(-1), lengths


def decode(model: Seq2Seq, chosen: Sequence[Pair], ids: Ids, beams: int) -> list[tuple[str, ...]]:
    """Return the words that the model generates for each source, by beam search or, with one beam, greedily."""
    source, _, valid, _ = batch(chosen, ids)
    words, end = list(ids), model.config.end_id
    found = beam_search(
        *model.start(source, valid),
        model.step,
        Options(max_tokens=model.config.max_length, beams=beams),
        is_end=lambda text: text[-1] == end,
        blocked=[model.config.begin_id],
    )
    return [tuple(words[token] for token in best.ids if token != end) for (best,) in found]


def exact_match(model: Seq2Seq, chosen: Sequence[Pair], ids: Ids, beams: int) -> float:
    """Return the fraction of pairs whose targets are generated without a mistake."""
    generated = decode(model, chosen, ids, beams)
    right: int = sum(words == pair.target for words, pair in zip(generated, chosen, strict=True))
    return right / len(chosen)


@torch.no_grad()
def embed_new_names(model: Seq2Seq, ids: Ids) -> None:
    """Set the embeddings of new names to the mean of those of known names, in the encoder and the decoder."""
    known, new = ([ids[name] for name in names if name in ids] for names in (KNOWN, sorted(NEW)))
    for embedding in (model.encoder.embedding, model.embedding):
        embedding.words.weight[new] = embedding.words.weight[known].mean(0)


@torch.no_grad()
def origins(model: Seq2Seq, pair: Pair, ids: Ids) -> Tensor:
    """Return for each word of the target a weight per source word: the probability of copying it, or the attention."""
    read, written = encode([pair.source], ids)[0], encode([pair.target], ids)[0]
    inputs = shift(written, None, model.config)[0][:, :-1]  # the last position predicts END
    prediction = model.prediction
    if prediction.pointer is None or prediction.gate is None:
        return model.cross_weights(read, inputs)[-1, 0].mean(0)
    memory, valid = model.encoder(read)
    decoded, _ = model.decoder(model.embedding(inputs), memory, valid)
    copied: Tensor = prediction.pointer(decoded, memory).exp() * prediction.gate(decoded).sigmoid()
    return copied[0]


def draw_picture(model: Seq2Seq, pair: Pair, ids: Ids) -> Figure:
    """Draw where each generated word comes from: new names are bold, and wrong words are red."""
    (generated,) = decode(model, [pair], ids, beams=1)
    weights = origins(model, pair._replace(target=generated), ids)
    figure = Figure(figsize=(0.26 * len(pair.source) + 2, 0.26 * len(generated) + 1.5), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(weights.numpy(), vmin=0, vmax=1, cmap="Blues", aspect="auto")
    axes.set_xticks(range(len(pair.source)), pair.source, rotation=60, ha="left", rotation_mode="anchor")
    axes.set_yticks(range(len(generated)), generated)
    axes.tick_params(top=True, labeltop=True, bottom=False, labelbottom=False)
    for label in (*axes.get_xticklabels(), *axes.get_yticklabels()):
        label.set_fontweight("bold" if label.get_text() in NEW else "normal")
    for label, word, expected in zip(axes.get_yticklabels(), generated, pair.target, strict=False):
        label.set_color("black" if word == expected else "tab:red")
    axes.set_ylabel("generated")
    meaning = "attention, mean of the heads" if model.prediction.pointer is None else "probability of being copied"
    figure.colorbar(image, ax=axes, label=meaning)
    return figure


def main() -> None:
    """Train, evaluate on unseen pairs, draw."""
    options = parse(__doc__, steps=700, copy=["on", "off"], sampling=["0", "0.25"])
    known, new, training = split(SEED)
    words = {word for pair in (*known, *new, *training) for text in pair for word in text}
    ids = {word: index for index, word in enumerate(sorted(words))}
    config = EncoderDecoderConfig(
        source_vocab=len(ids),
        target_vocab=len(ids) + 2,
        dim=64,
        ff_dim=128,
        decoder_layers=1,
        max_length=64,
        copy=options.copy == "on",
    )
    model = Seq2Seq(config)

    def loss() -> Tensor:
        chosen = [training[index] for index in torch.randint(PAIRS, (32,))]
        return model.loss(*batch(chosen, ids), sampling=float(options.sampling))

    trained = train(loss, model.parameters(), options.steps, 2e-3)
    embed_new_names(model, ids)
    rows = [
        {"names": names, "search": search, "exact_match": exact_match(model, chosen, ids, beams)}
        for names, chosen in (("known", known), ("new", new))
        for search, beams in (("greedy", 1), (f"beam of {BEAMS}", BEAMS))
    ]
    name = f"facts-copy-{options.copy}" + (f"-sampling-{options.sampling}" if options.sampling != "0" else "")
    results = {"unseen": UNSEEN, "pairs": PAIRS, **trained, "rows": rows}
    report(name, results, draw_picture(model, new[0], ids), options)


if __name__ == "__main__":
    main()
