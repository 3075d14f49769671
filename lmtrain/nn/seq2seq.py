"""The autoregressive encoder-decoder (Vaswani et al., 2017): predictions from the source and previous words.

Shapes: B rows, T positions of the decoder, Ts of the source, Tq of queries, Tk of keys, H heads, L layers of the
decoder, V target words.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmtrain.nn.encoder_decoder import (
    Decoder,
    EncoderDecoderConfig,
    PositionedEmbedding,
    Prediction,
    SourceEncoder,
)
from lmtrain.nn.patterns import CAUSAL


@dataclass(frozen=True)
class Seq2SeqState:
    """What has been read of B rows: source and valid (B, Ts), memory (B, Ts, D), inputs (B, T) from BEGIN on."""

    source: Tensor
    valid: Tensor
    memory: Tensor
    inputs: Tensor

    def select(self, index: Tensor) -> "Seq2SeqState":
        """Return the rows `index` (B',), in that order; rows may repeat."""
        return Seq2SeqState(*(part[index] for part in (self.source, self.valid, self.memory, self.inputs)))


class Seq2Seq(nn.Module):
    """A source of ids to a target of ids, word by word from BEGIN to END.

    Rows are padded on the right: `source_valid` (B, Ts) bool, if given, is True on words. With
    `EncoderDecoderConfig.copy` a pointer to the source is mixed in. The searches in `lmtrain.generation` call `start`
    and `step`; their rules must stop at END or `max_length` words, and block BEGIN, which is an ordinary target word
    here.
    """

    def __init__(self, config: EncoderDecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = SourceEncoder(config)
        self.embedding = PositionedEmbedding(config.target_vocab, config)
        self.decoder = Decoder(config, CAUSAL)
        self.prediction = Prediction(config)

    def forward(self, source: Tensor, inputs: Tensor, source_valid: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Teacher forcing: source (B, Ts), inputs (B, T) from BEGIN on -> log p of each next word (B, T, V) float32,
        and the cross-attention weights (L, B, H, T, Ts)."""
        memory, valid = self.encoder(source, source_valid)
        return self._predict(inputs, memory, source, valid)

    def loss(
        self,
        source: Tensor,
        target: Tensor,
        source_valid: Tensor | None = None,
        lengths: Tensor | None = None,
        *,
        sampling: float = 0.0,
        guided: float = 0.0,
    ) -> Tensor:
        """Return the mean of -log p of the target's words and its END, in nats: source (B, Ts), target (B, T) -> ().

        `lengths` (B,) are those of the targets, without END; by default all are T. `sampling` is the probability of an
        input from the model's own predictions: see `mix`. `guided` is the weight of `guided_attention_loss` on every
        layer's cross-attention, with END the last query. Raises ValueError for a source or a target with END of more
        than `max_length` words.
        """
        memory, valid = self.encoder(source, source_valid)
        inputs, labels, real = shift(target, lengths, self.config)
        if sampling:
            with torch.no_grad():
                probabilities = self._predict(inputs, memory, source, valid)[0].exp()
                predicted = torch.multinomial(probabilities.flatten(0, 1), 1).view_as(inputs)
            inputs = mix(inputs, predicted, sampling)
        log_probs, weights = self._predict(inputs, memory, source, valid)
        nats = mean_nats(log_probs, labels, real)
        return nats + guided * guided_attention_loss(weights, real.sum(1), valid.sum(1)) if guided else nats

    @torch.no_grad()
    def start(self, source: Tensor, source_valid: Tensor | None = None) -> tuple[Tensor, Seq2SeqState]:
        """Read the sources (B, Ts) and BEGIN; return log p of the first word (B, V) float32, and the state."""
        memory, valid = self.encoder(source, source_valid)
        begin = source.new_full((len(source),), self.config.begin_id)
        return self.step(Seq2SeqState(source, valid, memory, begin.new_empty(len(begin), 0)), begin)

    @torch.no_grad()
    def step(self, state: Seq2SeqState, tokens: Tensor) -> tuple[Tensor, Seq2SeqState]:
        """Read one more word per row, (B,); return log p of the next one (B, V) float32, and the new state.

        The decoder reads all words again. Raises ValueError when the state holds `max_length` of them, with BEGIN.
        """
        state = replace(state, inputs=torch.cat((state.inputs, tokens.unsqueeze(-1)), dim=1))
        decoded, _ = self.decoder(self.embedding(state.inputs), state.memory, state.valid)
        return self.prediction(decoded[:, -1:], state.memory, state.source, state.valid).squeeze(1), state

    def _predict(self, inputs: Tensor, memory: Tensor, source: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        decoded, weights = self.decoder(self.embedding(inputs), memory, valid)
        return self.prediction(decoded, memory, source, valid), weights


def shift(target: Tensor, lengths: Tensor | None, config: EncoderDecoderConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Return inputs, labels and which labels are real, each (B, T + 1), for targets (B, T) of `lengths` (B,), or all T.

    The inputs are BEGIN and the target, the labels the target and END; padding is END in both. A target of n words has
    n + 1 real labels.
    """
    width = target.shape[1]
    lengths = target.new_full((len(target),), width) if lengths is None else lengths
    order = torch.arange(width + 1, device=target.device)
    real = order <= lengths.unsqueeze(-1)
    labels = F.pad(target, (0, 1)).masked_fill(order >= lengths.unsqueeze(-1), config.end_id)
    return F.pad(labels[:, :-1], (1, 0), value=config.begin_id), labels, real


def mix(inputs: Tensor, predicted: Tensor, probability: float) -> Tensor:
    """Return the inputs of the second pass of parallel scheduled sampling, which is trained on some of its own words.

    A first pass reads the true inputs (B, T), and a word is sampled from each of its predictions: `predicted` (B, T).
    The one at t - 1, which has read the inputs up to t - 1, replaces input t with this probability; BEGIN stays. The
    labels stay the same (Bengio et al., 2015; in parallel: Mihaylova & Martins, 2019; Duckworth et al., 2019).
    """
    chosen = torch.rand(inputs.shape, device=inputs.device) < probability  # rand < 1: at 1 all, at 0 none
    return torch.where(chosen, torch.cat((inputs[:, :1], predicted[:, :-1]), dim=1), inputs)


def mean_nats(log_probs: Tensor, labels: Tensor, real: Tensor) -> Tensor:
    """Return the mean of -log p of the labels (B, T) that are `real` (B, T): log_probs (B, T, V) -> ()."""
    nats = F.nll_loss(log_probs.transpose(1, 2), labels, reduction="none")
    return (nats * real).sum() / real.sum().clamp_min(1)


def guided_attention_loss(weights: Tensor, query_lengths: Tensor, key_lengths: Tensor, width: float = 0.2) -> Tensor:
    """Return the mean of w (1 - exp(-(i/I - j/J)^2 / (2 width^2))) over real positions (Tachibana et al., 2018).

    The weights (..., B, H, Tq, Tk) have w for query i of I and key j of J; query_lengths (B,) are the I, key_lengths
    (B,) the J. Added to a loss, the result penalizes attention far from the diagonal.
    """
    queries = torch.arange(weights.shape[-2], device=weights.device)
    keys = torch.arange(weights.shape[-1], device=weights.device)
    rows = (queries / query_lengths.unsqueeze(-1)).unsqueeze(-1)  # (B, Tq, 1)
    columns = (keys / key_lengths.unsqueeze(-1)).unsqueeze(-2)  # (B, 1, Tk)
    cost = 1 - (-((rows - columns) ** 2) / (2 * width**2)).exp()
    real = (queries < query_lengths.unsqueeze(-1)).unsqueeze(-1) & (keys < key_lengths.unsqueeze(-1)).unsqueeze(-2)
    cost = cost.masked_fill(~real, 0.0)  # an empty row's are NaN
    return (weights * cost.unsqueeze(1)).sum() / real.unsqueeze(1).expand_as(weights).sum().clamp_min(1)
