"""The non-autoregressive encoder-decoder: all target words at once, in one pass (Gu et al., 2018).

Shapes: B rows, T places of the decoder, Ts positions of the source, D the model's width, H heads, L layers of the
decoder, N = max_length, V target words.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmtrain.nn.attention import padding_mask
from lmtrain.nn.encoder_decoder import Decoder, PositionedEmbedding, Prediction, Sizes, SourceEncoder
from lmtrain.nn.patterns import FULL
from lmtrain.nn.seq2seq import mean_nats

Length = Literal["predicted", "fixed"]


class NonAutoregressive(nn.Module):
    """A source of ids to a target of ids, every place from BEGIN and its position alone.

    No place sees what another chose, but all see each other's states. How long a target is comes with `length`:

    | length      | places of the decoder                                  | what is learned                       |
    | ----------- | ------------------------------------------------------ | ------------------------------------- |
    | `predicted` | as many as a classifier of the mean of the memory says | the words, and the length             |
    | `fixed`     | N                                                      | the words, then END to the last place |

    Either way, what is decoded is cut at the first END. Rows are padded on the right, as in `Seq2Seq`.
    """

    def __init__(self, sizes: Sizes, length: Length = "predicted") -> None:
        super().__init__()
        self.sizes = sizes
        self.encoder = SourceEncoder(sizes)
        self.begin = PositionedEmbedding(1, sizes)
        self.decoder = Decoder(sizes, FULL)
        self.prediction = Prediction(sizes)
        self.length = nn.Linear(sizes.dim, sizes.max_length + 1) if length == "predicted" else None

    def loss(
        self, source: Tensor, target: Tensor, source_valid: Tensor | None = None, lengths: Tensor | None = None
    ) -> Tensor:
        """The mean of -log p of the words, in nats, and of the lengths where predicted: (B, Ts), (B, T) -> ().

        `lengths` (B,) are the targets' own; by default all are T. Raises ValueError for targets wider than N.
        """
        if target.shape[1] > self.sizes.max_length:
            raise ValueError(f"a target of {target.shape[1]} columns is wider than max_length={self.sizes.max_length}")
        memory, valid = self.encoder(source, source_valid)
        lengths = target.new_full((len(target),), target.shape[1]) if lengths is None else lengths
        labels = target if self.length is not None else F.pad(target, (0, self.sizes.max_length - target.shape[1]))
        own = torch.arange(labels.shape[1], device=target.device) < lengths.unsqueeze(-1)
        labels = labels.masked_fill(~own, self.sizes.end_id)
        places = own if self.length is not None else torch.ones_like(own)
        nats = mean_nats(self._predict(memory, source, valid, places), labels, places)
        return nats if self.length is None else nats + F.cross_entropy(self._length_logits(memory, valid), lengths)

    def length_logits(self, source: Tensor, source_valid: Tensor | None = None) -> Tensor:
        """What the classifier says of the lengths 0 .. N: source (B, Ts) -> (B, N + 1) float32.

        Raises ValueError for a model of fixed length.
        """
        return self._length_logits(*self.encoder(source, source_valid))

    @torch.no_grad()
    def decode(self, source: Tensor, source_valid: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The likeliest word at every place: source (B, Ts) -> (B, T), END after the last word, and lengths (B,)."""
        memory, valid = self.encoder(source, source_valid)
        if self.length is None:
            places = valid.new_ones(len(source), self.sizes.max_length)
        else:
            lengths = self._length_logits(memory, valid).argmax(-1)
            places = torch.arange(int(lengths.max()), device=source.device) < lengths.unsqueeze(-1)
        words = self._predict(memory, source, valid, places).argmax(-1)
        own = (places & (words != self.sizes.end_id)).cumprod(1)
        return words.masked_fill(own == 0, self.sizes.end_id), own.sum(1)

    def cross_weights(self, source: Tensor, places: Tensor, source_valid: Tensor | None = None) -> Tensor:
        """Where each place looks at the source: (B, Ts), which `places` (B, T) bool are there -> (L, B, H, T, Ts)."""
        memory, valid = self.encoder(source, source_valid)
        return self.decoder.cross_weights(self._inputs(places), memory, valid, padding_mask(places))

    def _length_logits(self, memory: Tensor, valid: Tensor) -> Tensor:
        if self.length is None:
            raise ValueError("this model has a fixed length: there is no classifier to ask")
        weights = (valid / valid.sum(1, keepdim=True).clamp_min(1)).unsqueeze(1)  # (B, 1, Ts)
        logits: Tensor = self.length((weights @ memory.float()).squeeze(1))
        return logits.float()

    def _predict(self, memory: Tensor, source: Tensor, valid: Tensor, places: Tensor) -> Tensor:
        """log p at the real ones of the `places` (B, T) bool: (B, T, V)."""
        states = self.decoder(self._inputs(places), memory, valid, padding_mask(places))
        result: Tensor = self.prediction(states, memory, source, valid)
        return result

    def _inputs(self, places: Tensor) -> Tensor:
        """BEGIN and the position, at every place: (B, T) bool -> (B, T, D)."""
        inputs: Tensor = self.begin(torch.zeros_like(places, dtype=torch.long))
        return inputs
