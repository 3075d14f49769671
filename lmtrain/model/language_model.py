"""The language model: embedding -> encoder blocks -> attention pool -> output layer.

The forward pass of training, `model(tokens, targets)`, in which (B, T, E) becomes (N, E) for the loss:

    tokens               (B, T)
    _embed, _input       (B, T, D)  embedding, in_projection, token shift, positions
    encoder              (B, T, D)  "encoded": blocks of attention and feed-forward, which attend to no later position
    _pool                (B, T, D)  "pooled": the attention pool over every prefix, so every position predicts a token
    _project             (B, T, E)  "hidden": final norm, out_projection
    target_nats          (B, T)     -log p of the targets. It calls linear_cross_entropy (nn/chunked_loss.py) if the
                                    logits of all rows would be too large; AdaptiveSoftmax.nats calls both
    copying              (B, T)     mixes a pointer over the context's tokens into p(target)

`WindowedLanguageModel` (windowed.py) is this model with `mode: windowed`.

Shapes: B rows, T tokens (at most the context), S targets, N = B S, D the model's width, E the embedding's, H heads, V
vocabulary entries.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmtrain.config.schema import ModelConfig
from lmtrain.model.context_copy import ContextCopy
from lmtrain.model.decoding_state import DecodingState, State, align_left
from lmtrain.model.encoder import Encoder
from lmtrain.nn.adaptive_softmax import AdaptiveSoftmax
from lmtrain.nn.blocks import FeedForward
from lmtrain.nn.dropout import locked_dropout
from lmtrain.nn.embedding import Embedding
from lmtrain.nn.kv_cache import KeyValueCache, write
from lmtrain.nn.norms import NORMS
from lmtrain.nn.output_loss import Chunk, target_nats
from lmtrain.nn.pooling import AttentionPooling
from lmtrain.nn.positions import sinusoidal
from lmtrain.nn.precision import at_least_float32
from lmtrain.nn.token_shift import TokenShift


class TiedOutput(nn.Module):
    """An output layer without bias that shares the embedding's weight: (..., E) -> (..., V)."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.embedding = embedding

    @property
    def weight(self) -> Tensor:
        """(V, E)."""
        return self.embedding.weight

    def forward(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.weight)


class LanguageModel(nn.Module):
    """The causal model of a configuration; `build_model` makes it with its initial weights.

    | method          | called by                                          | returns                |
    | --------------- | -------------------------------------------------- | ---------------------- |
    | `forward`       | training; validation during training               | -log p of targets      |
    | `score`         | `lmtrain eval`, `Run.evaluate`, `Run.score`        | the same, and "hidden" |
    | `predict`       | distillation; windowed decoding; exported models   | log p of every token   |
    | `start`, `step` | generation: prefill, and decode with a cache       | log p of every token   |

    The first three raise ValueError unless rows have 1 to `context` tokens; `start` reads the last `context` tokens.
    """

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        self.config = config
        self.causal = config.mode == "causal"
        self.vocab_size = vocab_size
        self.loss_chunk: Chunk = "auto"  # in training; see `rows_at_once`
        dim, width = config.dim, config.embed_dim or config.dim
        self.embedding = Embedding(vocab_size, width)
        self.in_projection = nn.Linear(width, dim, bias=False) if width != dim else nn.Identity()
        self.shift = TokenShift(dim) if config.token_shift else None
        self.position = nn.Embedding(config.context, dim) if config.position == "learned" else None
        sinusoids = sinusoidal(torch.arange(config.context), dim) if config.position == "sinusoidal" else None
        self.sinusoids: Tensor | None
        self.register_buffer("sinusoids", sinusoids, persistent=False)  # computed, so never saved
        self.encoder = Encoder(config)
        self.pool = AttentionPooling(
            dim,
            config.heads,
            FeedForward(dim, config.ff_dim, config.activation),
            query=config.pool_query,
            residual=config.pool_residual,
            norm_kind=config.norm,
            dropout=config.dropout,
            attention_dropout=config.attention_dropout,
        )
        self.norm = NORMS[config.norm](dim)
        self.out_projection = nn.Linear(dim, width, bias=False) if width != dim else nn.Identity()
        tied = config.tie_embeddings
        self.output: nn.Module = TiedOutput(self.embedding) if tied else nn.Linear(width, vocab_size, bias=False)
        self.output_bias = nn.Parameter(torch.zeros(vocab_size))
        adaptive = config.output == "adaptive"
        self.adaptive = AdaptiveSoftmax(width, vocab_size, config.output_cutoffs) if adaptive else None
        self.copying = ContextCopy(dim, config.norm) if config.copy else None

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return -log p of each target, in nats, float32: see `score`."""
        return self.score(tokens, targets)[0]

    def score(self, tokens: Tensor, targets: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """Return -log p of each target, in nats, float32, and its hidden vector (B, S, E), the output layer's input.

        Tokens (B, T); targets (B, S), for the last S positions: if windowed, for the last one. `temperature` divides
        the vocabulary's log-probabilities.
        """
        encoded = self._encode(tokens)
        pooled = self._pool(encoded, tokens.shape[1] - targets.shape[1])
        hidden = self._project(pooled)
        vectors, labels = hidden.flatten(0, -2), targets.flatten()  # (N, E), (N,)
        if temperature != 1.0:
            nats = F.cross_entropy(self._log_probs(vectors) / temperature, labels, reduction="none")
        else:
            nats_of = target_nats if self.adaptive is None else self.adaptive.nats
            weight: Tensor = self.output.weight  # type: ignore[assignment]
            chunk = self.loss_chunk if self.training else "auto"
            nats = nats_of(vectors, weight, self.output_bias, labels, chunk)
        nats = nats.view_as(targets)
        if self.copying is not None:
            nats = -self.copying.target_log_prob(-nats, pooled, self.copying.keys(encoded), tokens, targets)
        return nats, hidden

    def predict(self, tokens: Tensor) -> Tensor:
        """Return log p of every next token, in nats, float32: (B, T) -> (B, T, V); if windowed, (B, 1, V)."""
        encoded = self._encode(tokens)
        pooled = self._pool(encoded)
        log_probs = self._log_probs(self._project(pooled))
        if self.copying is None:
            return log_probs
        return self.copying.log_probs(log_probs, pooled, self.copying.keys(encoded), tokens)

    def hidden_matrices(self) -> list[Tensor]:
        """Return the weights of all linear layers except those that produce logits, for Muon."""
        excluded = self.output, getattr(self.adaptive, "clusters", None), getattr(self.copying, "gate", None)
        return [part.weight for part in self.modules() if isinstance(part, nn.Linear) and part not in excluded]

    @torch.no_grad()
    def pool_weights(self, tokens: Tensor) -> Tensor:
        """Return the pool's attention weights at the last position: (1, T) -> (H, T) float32, rows sum to one."""
        return self.pool.weights(self._encode(tokens)).squeeze(0).float()

    @torch.no_grad()
    def start(self, tokens: Tensor, valid: Tensor | None = None, max_tokens: int | None = None) -> tuple[Tensor, State]:
        """Prefill: read prompts (B, T) and return log p of the next token (B, V), float32, and the state.

        Prompts may be padded on the left: `valid` (B, T) bool is then True on tokens, and on every row's last column.
        Of longer prompts only the last `context` columns are read. If `max_tokens` is given, `step` must not read more,
        and memory is allocated for these only.
        """
        tokens, valid = self._last_columns(tokens, valid)
        aligned, lengths = align_left(tokens, valid)
        state = self._prefill(aligned[:, :-1], lengths - 1)
        context = self.config.context
        state.grow(context if max_tokens is None else min(context, tokens.shape[1] + max_tokens))
        return self.step(state, tokens[:, -1])  # by `step`, so that all predictions are computed in the same way

    @torch.no_grad()
    def step(self, state: State, tokens: Tensor) -> tuple[Tensor, State]:
        """Decode: read one more token per row (B,), and return log p of the next one (B, V), float32, and the state.

        A row that holds `context` tokens is truncated to the last context // 2 (at least one), the new one included,
        and re-encoded.
        """
        assert isinstance(state, DecodingState)
        self.ensure_capacity(state)
        log_probs = self.decode_step(state, tokens, state.kv_len + 1)
        state.kv_len += 1
        return log_probs, state

    def decode_step(self, state: DecodingState, tokens: Tensor, kv_len: int) -> Tensor:
        """Do the computation of `step`: read a token per row (B,), attending to `kv_len` cache positions -> (B, V).

        It runs on the device and writes the state in place, without Python decisions on its content, so that a CUDA
        graph can capture and replay it. It leaves `state.kv_len` unchanged.
        """
        position = state.lengths
        write(state.tokens, tokens, position)
        x_before = None
        if self.shift is not None:
            x_before = _zero_at_first(self._embed(_previous(state.tokens, position)), position)
        x = self._input(tokens.unsqueeze(-1), position.unsqueeze(-1), x_before)
        encoded = self.encoder.step(x, state.caches, position, kv_len)
        pooled = self.pool.step(encoded, state.pool)
        log_probs = self._log_probs(self._project(pooled))
        if self.copying is not None and state.pointer_cache is not None:
            cache = state.pointer_cache
            encoded_before = _zero_at_first(_previous(cache.value.squeeze(1), position), position)
            keys = self.copying.keys(encoded, encoded_before)
            cache.write(keys.unsqueeze(1), encoded.unsqueeze(1), position)
            keys, read = cache.key[:, 0, :kv_len], state.tokens[:, :kv_len]
            log_probs = self.copying.log_probs(log_probs, pooled, keys, read, position.unsqueeze(-1))
        state.lengths += 1
        return log_probs.squeeze(1)

    def ensure_capacity(self, state: DecodingState) -> None:
        """Make space for one more token in every row: rows as long as the context are truncated and re-encoded."""
        context = self.config.context
        if state.kv_len < context:
            return
        rows = (state.lengths == context).nonzero().squeeze(-1)
        if len(rows):
            remaining = max(1, context // 2) - 1  # tokens to keep, besides the new one
            tokens = state.tokens[rows, context - remaining :]
            state.replace(rows, self._prefill(tokens, torch.full_like(rows, remaining)))
        state.kv_len = int(state.lengths.max())

    def _check(self, tokens: Tensor) -> None:
        if not 1 <= tokens.shape[1] <= self.config.context:
            raise ValueError(f"{tokens.shape[1]} tokens in a row: the model takes 1 to {self.config.context}")

    def _last_columns(self, tokens: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the last `context` columns of prompts (B, T), and which of their entries are tokens."""
        tokens = tokens[:, -self.config.context :]
        self._check(tokens)
        return tokens, torch.ones_like(tokens, dtype=torch.bool) if valid is None else valid[:, -tokens.shape[1] :]

    def _embed(self, tokens: Tensor) -> Tensor:
        """Tokens (B, T) -> (B, T, D)."""
        # With an RMS of 1/2 at first: see `build.initialize`.
        x: Tensor = self.embedding(tokens) * (self.embedding.embedding_dim / 2)
        return self.in_projection(locked_dropout(x, self.config.input_dropout, self.training))

    def _input(self, tokens: Tensor, positions: Tensor, before: Tensor | None = None) -> Tensor:
        """Tokens (B, T) at positions (T,) or (B, T) -> the input of the encoder (B, T, D).

        `before` (B, 1, D) is the embedded token before the first, if any.
        """
        x = self._embed(tokens)
        if self.shift is not None:
            x = self.shift(x, before)
        if self.position is not None:
            x = x + self.position(positions)
        if self.sinusoids is not None:
            x = x + self.sinusoids[positions]
        return x

    def _positions(self, tokens: Tensor) -> Tensor:
        """Return the positions (T,) of a row's tokens (B, T), counted from its first."""
        return torch.arange(tokens.shape[1], device=tokens.device)

    def _encode(self, tokens: Tensor) -> Tensor:
        """Tokens (B, T) -> the encoder's output (B, T, D)."""
        self._check(tokens)
        positions = self._positions(tokens)
        return self.encoder(self._input(tokens, positions), positions)

    def _pool(self, encoded: Tensor, first: int = 0) -> Tensor:
        """The pool at every position from `first` on: (B, T, D) -> (B, T - first, D)."""
        return self.pool(encoded, first)

    def _project(self, pooled: Tensor) -> Tensor:
        """Pooled vectors (..., D) -> the input of the output layer (..., E)."""
        return locked_dropout(self.out_projection(self.norm(pooled)), self.config.output_dropout, self.training)

    def _log_probs(self, hidden: Tensor) -> Tensor:
        """log p of every word by the output layer, without the pointer: (..., E) -> (..., V), at least float32."""
        # The bias in float32: log frequencies rounded to bf16 would be off by up to 3%.
        logits: Tensor = at_least_float32(self.output(hidden)).add_(self.output_bias)
        return logits.log_softmax(-1) if self.adaptive is None else self.adaptive(logits, hidden)

    def _prefill(self, tokens: Tensor, lengths: Tensor) -> DecodingState:
        """The state after the first `lengths` (B,) >= 0 tokens of each row of (B, T), with a capacity of T."""
        positions = self._positions(tokens)
        encoded, caches = self.encoder.prefill(self._input(tokens, positions), positions, lengths)
        pointer_cache = None
        if self.copying is not None:
            keys = self.copying.keys(encoded).unsqueeze(1)
            pointer_cache = KeyValueCache(keys, encoded.unsqueeze(1))
        return DecodingState(
            tokens=tokens,
            lengths=lengths,
            kv_len=tokens.shape[1],
            caches=caches,
            pool=self.pool.prefill(encoded, lengths),
            pointer_cache=pointer_cache,
        )


def _previous(x: Tensor, position: Tensor) -> Tensor:
    """x (B, N, ...) at each row's position - 1 (B,): (B, 1, ...); for position 0 an arbitrary entry."""
    return x[torch.arange(len(x), device=x.device), position - 1].unsqueeze(1)


def _zero_at_first(x: Tensor, position: Tensor) -> Tensor:
    """x (B, 1, D) with zeros for rows at position 0 (B,), which have nothing before them."""
    return x.masked_fill((position == 0).view(-1, 1, 1), 0.0)
