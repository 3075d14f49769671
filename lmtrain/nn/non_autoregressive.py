"""The non-autoregressive encoder-decoder: all target words at once, in one pass (Gu et al., 2018).

Shapes: B rows, T positions of the decoder, Ts positions of the source, D the model's width, H heads, L layers of the
decoder, N = max_length, V target words.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmtrain.nn.attention import padding_mask
from lmtrain.nn.encoder_decoder import Decoder, EncoderDecoderConfig, PositionedEmbedding, Prediction, SourceEncoder
from lmtrain.nn.patterns import FULL
from lmtrain.nn.precision import at_least_float32
from lmtrain.nn.seq2seq import mean_nats

Length = Literal["predicted", "fixed"]


class NonAutoregressive(nn.Module):
    """A source of ids to a target of ids; every input of the decoder is BEGIN and its position (in Gu et al., a copy of
    a source word).

    No position depends on the word chosen at another, but all positions attend to each other. `length` determines how
    many positions the decoder has:

    | length      | positions of the decoder                             | what is learned                          |
    | ----------- | ---------------------------------------------------- | ---------------------------------------- |
    | `predicted` | predicted by a classifier of the mean of the memory  | the words, and the length                |
    | `fixed`     | N                                                    | the words, then END to the last position |

    The result is cut at the first END; with `fixed`, only this gives a text its length. Rows are padded on the right,
    as in `Seq2Seq`.
    """

    def __init__(self, config: EncoderDecoderConfig, length: Length = "predicted") -> None:
        super().__init__()
        self.config = config
        self.encoder = SourceEncoder(config)
        self.begin = PositionedEmbedding(1, config)
        self.decoder = Decoder(config, FULL)
        self.prediction = Prediction(config)
        self.length_classifier = nn.Linear(config.dim, config.max_length + 1) if length == "predicted" else None

    def forward(self, source: Tensor, positions: Tensor, source_valid: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Source (B, Ts), positions (B, T) bool that exist -> log p of the word at each (B, T, V) float32, and the
        cross-attention weights (L, B, H, T, Ts)."""
        memory, valid = self.encoder(source, source_valid)
        return self._predict(memory, source, valid, positions)

    def loss(
        self, source: Tensor, target: Tensor, source_valid: Tensor | None = None, lengths: Tensor | None = None
    ) -> Tensor:
        """Return the mean of -log p of the words, in nats: source (B, Ts), target (B, T) -> ().

        If lengths are predicted, the mean of -log p of the rows' lengths is added. `lengths` (B,) are those of the
        targets; by default all are T. Raises ValueError for targets wider than N.
        """
        if target.shape[1] > self.config.max_length:
            raise ValueError(f"a target of {target.shape[1]} columns is wider than max_length={self.config.max_length}")
        memory, valid = self.encoder(source, source_valid)
        lengths = target.new_full((len(target),), target.shape[1]) if lengths is None else lengths
        if self.length_classifier is None:
            target = F.pad(target, (0, self.config.max_length - target.shape[1]))
        is_word = torch.arange(target.shape[1], device=target.device) < lengths.unsqueeze(-1)
        labels = target.masked_fill(~is_word, self.config.end_id)
        positions = torch.ones_like(is_word) if self.length_classifier is None else is_word
        nats = mean_nats(self._predict(memory, source, valid, positions)[0], labels, positions)
        if self.length_classifier is None:
            return nats
        return nats + F.cross_entropy(self._length_logits(memory, valid), lengths)

    @torch.no_grad()
    def decode(
        self, source: Tensor, source_valid: Tensor | None = None, *, lengths: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the most likely words except BEGIN (B, T), filled with END, and their lengths (B,): source (B, Ts).

        `lengths` (B,) are the numbers of positions, if the caller chooses them instead of the classifier; `fixed` has
        been trained with N only. Raises ValueError for a length greater than N.
        """
        memory, valid = self.encoder(source, source_valid)
        if lengths is None and self.length_classifier is None:
            lengths = source.new_full((len(source),), self.config.max_length)
        elif lengths is None:
            lengths = self._length_logits(memory, valid).argmax(-1)
        positions = torch.arange(int(lengths.max()), device=source.device) < lengths.unsqueeze(-1)
        log_probs, _ = self._predict(memory, source, valid, positions)
        words = log_probs[..., : self.config.begin_id].argmax(-1)
        before_end = (positions & (words != self.config.end_id)).cumprod(1)
        return words.masked_fill(before_end == 0, self.config.end_id), before_end.sum(1)

    def _length_logits(self, memory: Tensor, valid: Tensor) -> Tensor:
        """The classifier's logits of the lengths 0 .. N, from the mean of the memory (B, Ts, D): (B, N + 1)."""
        assert self.length_classifier is not None
        weights = (valid / valid.sum(1, keepdim=True).clamp_min(1)).unsqueeze(1)  # (B, 1, Ts)
        return at_least_float32(self.length_classifier((weights.to(memory.dtype) @ memory).squeeze(1)))

    def _predict(self, memory: Tensor, source: Tensor, valid: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        inputs = self.begin(torch.zeros_like(positions, dtype=torch.long))
        decoded, weights = self.decoder(inputs, memory, valid, padding_mask(positions))
        return self.prediction(decoded, memory, source, valid), weights
