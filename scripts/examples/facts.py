"""Read the facts out of a paragraph with an encoder-decoder, also those with names that never occurred in training.

    python scripts/examples/facts.py

A pair is the first paragraph of an article of the built-in sample corpus, and its facts in the order of the text:
"The Sarn is a compact river in Corland . ..." becomes "river: Sarn region: Corland ...". Every fourth name (of people,
towns, rivers, ...) is new: it occurs in no training pair. It has an id like any other word, but a softmax over the
vocabulary never learns to generate it. With a pointer to the source (See et al., 2017) the model can copy it:

- In training, names are exchanged at random, towns for rivers too, so that a name's role follows from the words around
  it and not from the name itself.
- After training, every new name gets the mean embedding of the known names, as all unknown words have one embedding in
  See et al.; only its position tells one new name from another.

A quarter of the decoder's inputs come from the model's own predictions: parallel scheduled sampling (Mihaylova &
Martins, 2019).

`exact_match_known` and `exact_match_new` are the shares of pairs whose facts are all right, in the right order, by beam
search of width 4: for unseen pairs whose names all occurred in training, and for those with at least one new name.

Writes facts.png: for each word that was generated for a paragraph with new names, the probability of copying it from
each source word. Prints the results.

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

PAIRS, UNSEEN = 20_000, 512
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


def decode(model: Seq2Seq, chosen: Sequence[Pair], ids: Ids) -> list[tuple[str, ...]]:
    """Return the words that the model generates for each source, by beam search."""
    source, _, valid, _ = batch(chosen, ids)
    words, end = list(ids), model.config.end_id
    found = beam_search(
        *model.start(source, valid),
        model.step,
        Options(max_tokens=model.config.max_length, beams=4),
        is_end=lambda text: text[-1] == end,
        blocked=[model.config.begin_id],
    )
    return [tuple(words[token] for token in best.ids if token != end) for (best,) in found]


def exact_match(model: Seq2Seq, chosen: Sequence[Pair], ids: Ids) -> float:
    """Return the fraction of pairs whose targets are generated without a mistake."""
    generated = decode(model, chosen, ids)
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
    """Return for each word of the target the probability of copying it from each source word."""
    read, written = encode([pair.source], ids)[0], encode([pair.target], ids)[0]
    inputs = shift(written, None, model.config)[0][:, :-1]  # the last position predicts END
    prediction = model.prediction
    assert prediction.pointer is not None
    assert prediction.gate is not None
    memory, valid = model.encoder(read)
    decoded, _ = model.decoder(model.embedding(inputs), memory, valid)
    copied: Tensor = prediction.pointer(decoded, memory).exp() * prediction.gate(decoded).sigmoid()
    return copied[0]


def draw_picture(model: Seq2Seq, pair: Pair, ids: Ids) -> Figure:
    """Draw where each generated word comes from: new names are bold, and wrong words are red."""
    (generated,) = decode(model, [pair], ids)
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
    figure.colorbar(image, ax=axes, label="probability of being copied")
    return figure


def main() -> None:
    """Train, evaluate on unseen pairs, draw."""
    options = parse(__doc__, steps=700)
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
        copy=True,
    )
    model = Seq2Seq(config)

    def loss() -> Tensor:
        chosen = [training[index] for index in torch.randint(PAIRS, (32,))]
        return model.loss(*batch(chosen, ids), sampling=0.25)

    trained = train(loss, model.parameters(), options.steps, 2e-3)
    embed_new_names(model, ids)
    matches = {f"exact_match_{name}": exact_match(model, some, ids) for name, some in (("known", known), ("new", new))}
    results = {**matches, "unseen": UNSEEN, "pairs": PAIRS, **trained}
    report("facts", results, draw_picture(model, new[0], ids), options)


if __name__ == "__main__":
    main()
