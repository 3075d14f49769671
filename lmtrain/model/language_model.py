"""The language model: embedding -> encoder blocks -> attention pooling -> logits.

`causal`: blocks attend to no later position and the pool runs over every prefix, so that each position predicts its
next token. `windowed`: blocks attend to the whole window and the pool predicts the one token after it. Both have the
same weights.

Positions count from a row's first token in causal mode, and are aligned to the right end of the window in windowed
mode, so that the token before the prediction always has the last position.

Shapes: B rows, T tokens (at most the context), S targets, D the model's width, E the embedding's, H heads, V word
types.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmtrain.config.schema import ModelConfig
from lmtrain.model.context_copy import ContextCopy
from lmtrain.model.decoding_state import DecodingState, State, WindowState, align_left, capacity_for
from lmtrain.model.encoder import Encoder
from lmtrain.nn.adaptive import AdaptiveSoftmax
from lmtrain.nn.dropout import locked_dropout
from lmtrain.nn.kv_cache import CachePosition, KeyValueCache, write
from lmtrain.nn.norms import norm
from lmtrain.nn.output_loss import Chunk, target_nats
from lmtrain.nn.pooling import AttentionPooling
from lmtrain.nn.positions import sinusoidal
from lmtrain.nn.precision import at_least_float32
from lmtrain.nn.token_shift import TokenShift


class TiedOutput(nn.Module):
    """An output layer without bias whose weight is that of the embedding: (..., E) -> (..., V)."""

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
    """The model of a configuration, before `initialize`: see `build_model`.

    It takes 1 to `context` tokens in a row; ValueError otherwise. With `activation_checkpointing` the backward pass
    computes the activations inside the blocks again.
    """

    def __init__(self, config: ModelConfig, vocab_size: int, *, activation_checkpointing: bool = False) -> None:
        super().__init__()
        self.config = config
        self.vocab_size = vocab_size
        self.causal = config.mode == "causal"
        dim, width = config.dim, config.embed_dim or config.dim
        self.embedding = nn.Embedding(vocab_size, width)
        self.in_projection = nn.Linear(width, dim, bias=False) if width != dim else None
        self.shift = TokenShift(dim) if config.token_shift else None
        self.position = nn.Embedding(config.context, dim) if config.position == "learned" else None
        sinusoids = sinusoidal(torch.arange(config.context), dim) if config.position == "sinusoidal" else None
        self.sinusoids: Tensor | None
        self.register_buffer("sinusoids", sinusoids, persistent=False)  # computed, so never saved
        self.encoder = Encoder(config, activation_checkpointing=activation_checkpointing)
        self.pool = AttentionPooling(
            dim,
            config.heads,
            config.ff_dim or 4 * dim,
            query=config.pool_query,
            residual=config.pool_residual,
            activation=config.activation,
            norm_kind=config.norm,
            dropout=config.dropout,
            attention_dropout=config.attention_dropout,
        )
        self.norm = norm(config.norm, dim)
        self.out_projection = nn.Linear(dim, width, bias=False) if width != dim else None
        tied = config.tie_embeddings
        self.output: nn.Module = TiedOutput(self.embedding) if tied else nn.Linear(width, vocab_size, bias=False)
        self.output_bias = nn.Parameter(torch.zeros(vocab_size))
        adaptive = config.output == "adaptive"
        self.adaptive = AdaptiveSoftmax(width, vocab_size, config.output_cutoffs) if adaptive else None
        self.copying = ContextCopy(dim, config.norm) if config.copy else None

    def forward(self, tokens: Tensor, targets: Tensor, loss_chunk: Chunk = "auto") -> Tensor:
        """-log p of each target, in nats, float32: see `score`."""
        return self.score(tokens, targets, loss_chunk)[0]

    def score(
        self, tokens: Tensor, targets: Tensor, loss_chunk: Chunk = "auto", temperature: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """-log p of each target, in nats, float32, and the states (..., E) that the output layer read for it.

        Tokens (B, T); targets (B, S) if causal, those of the last S positions, or (B,) if windowed. See `target_nats`
        for `loss_chunk`, which does not apply where `temperature`, the divisor of the vocabulary's logits, is not 1.
        """
        states = self._states(tokens)
        pooled = self._pool(states)[:, -targets.shape[1] :] if self.causal else self._pool(states)
        hidden = self._project(pooled)
        nats = self._nats(hidden.flatten(0, -2), targets.flatten(), loss_chunk, temperature).view_as(targets)
        if self.copying is not None:
            nats = -self.copying.target_log_prob(-nats, pooled, self.copying.keys(states), tokens, targets)
        return nats, hidden

    def predict(self, tokens: Tensor) -> Tensor:
        """log p of every next token, in nats, float32: tokens (B, T) -> (B, T, V) if causal, (B, V) if windowed."""
        states = self._states(tokens)
        pooled = self._pool(states)
        log_probs = self._log_probs(self._project(pooled))
        if self.copying is None:
            return log_probs
        return self.copying.log_probs(log_probs, pooled, self.copying.keys(states), tokens)

    def encode(self, tokens: Tensor) -> Tensor:
        """The states that the output layer reads: tokens (B, T) -> (B, T, E) if causal, (B, E) if windowed."""
        return self._project(self._pool(self._states(tokens)))

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., E) -> (..., V), float32 also under autocast; an adaptive output's are normalized."""
        # The bias in float32: log frequencies rounded to bf16 would be off by up to 3 %.
        logits = at_least_float32(self.output(hidden)).add_(self.output_bias)
        return logits if self.adaptive is None else self.adaptive(logits, hidden)

    def hidden_matrices(self) -> list[Tensor]:
        """The weights of all linear layers whose results are not logits."""
        of_logits = {self.output, self.adaptive and self.adaptive.clusters, self.copying and self.copying.gate}
        return [part.weight for part in self.modules() if isinstance(part, nn.Linear) and part not in of_logits]

    @torch.no_grad()
    def pool_weights(self, tokens: Tensor) -> Tensor:
        """The pool's attention weights at the last position: tokens (1, T) -> (H, T) float32, rows sum to one."""
        return self.pool.weights(self._states(tokens)).squeeze(0).float()

    @torch.no_grad()
    def start(self, tokens: Tensor, valid: Tensor | None = None) -> tuple[Tensor, State]:
        """Read prompts (B, T) of any length: log-probabilities of the next token (B, V) float32, and the state.

        They may be padded on the left: `valid` (B, T) bool is then True on tokens, and on every row's last column. Only
        the last `context` columns are read.
        """
        tokens = tokens[:, -self.config.context :]
        valid = torch.ones_like(tokens, dtype=torch.bool) if valid is None else valid[:, -self.config.context :]
        self._check(tokens)
        if not self.causal:
            return self._predict_windows(tokens, valid.sum(1)), WindowState(tokens, valid)
        # The last token is read by a step, so that all predictions are computed in the same way.
        aligned, lengths = align_left(tokens, valid)
        last = aligned.gather(1, lengths.unsqueeze(-1) - 1).squeeze(-1)
        capacity = capacity_for(tokens.shape[1], self.config.context)
        return self._step(self._prefill(aligned[:, :-1], lengths - 1, capacity), last)

    @torch.no_grad()
    def step(self, state: State, tokens: Tensor) -> tuple[Tensor, State]:
        """Read one more token per row, (B,): log-probabilities of the next one (B, V) float32, and the new state.

        A causal row that holds `context` tokens is truncated to the last context // 2 (at least one), the new one
        included, and re-encoded. A windowed model re-encodes its window at every step.
        """
        if isinstance(state, WindowState):
            valid = torch.cat((state.valid, torch.ones_like(state.valid[:, :1])), dim=1)
            return self.start(torch.cat((state.tokens, tokens.unsqueeze(-1)), dim=1), valid)
        assert isinstance(state, DecodingState)
        self.ensure_capacity(state)
        return self._step(state, tokens)

    def advance(self, state: DecodingState, tokens: Tensor, kv_len: int) -> Tensor:
        """The computation of `step`: read a token per row (B,), attending to `kv_len` cache positions -> (B, V).

        It runs on the device and writes the state in place, without Python decisions on its content, so that it can be
        recorded and replayed; `state.kv_len` is not changed.
        """
        position = state.lengths
        write(state.tokens, tokens, position)
        before = None
        if self.shift is not None:
            before = self._embed(_before(state.tokens, position)).masked_fill(position.unsqueeze(-1) == 0, 0.0)
        x = self._input(self._embed(tokens.unsqueeze(-1)), position.unsqueeze(-1), before)
        x = self.encoder.step(x, state.caches, CachePosition(position, kv_len))
        pooled = self.pool.step(x, state.pool)
        log_probs = self._log_probs(self._project(pooled)).float()
        if self.copying is not None and state.pointer is not None:
            before = _before(state.pointer.value.squeeze(1), position).masked_fill(position.unsqueeze(-1) == 0, 0.0)
            state.pointer.write(self.copying.keys(x, before).unsqueeze(1), x.unsqueeze(1), position, kv_len)
            keys, read = state.pointer.key[:, 0, :kv_len], state.tokens[:, :kv_len]
            log_probs = self.copying.log_probs(log_probs, pooled, keys, read, position.unsqueeze(-1))
        state.lengths += 1
        return log_probs

    def ensure_capacity(self, state: DecodingState) -> None:
        """Make space for one more token in every row: rows as long as the context are truncated and re-encoded."""
        context = self.config.context
        if state.kv_len == state.capacity < context:
            state.grow(capacity_for(state.kv_len + 1, context))
        if state.kv_len < context:
            return
        remaining = max(1, context // 2) - 1  # and the new token
        rows = (state.lengths == context).nonzero().squeeze(-1)
        tokens = state.tokens[rows, context - remaining :]
        if len(rows):
            lengths = torch.full_like(rows, remaining)
            state.replace(rows, self._prefill(tokens, lengths, context))
        state.kv_len = int(state.lengths.max())

    def _check(self, tokens: Tensor) -> None:
        if not 1 <= tokens.shape[1] <= self.config.context:
            raise ValueError(f"{tokens.shape[1]} tokens in a row: the model takes 1 to {self.config.context}")

    def _embed(self, tokens: Tensor) -> Tensor:
        """Tokens (B, T) -> (B, T, D)."""
        x: Tensor = self.embedding(tokens) * (self.embedding.embedding_dim / 2)  # see `build.initialize`
        x = locked_dropout(x, self.config.input_dropout, self.training)
        return x if self.in_projection is None else self.in_projection(x)

    def _input(self, x: Tensor, positions: Tensor, before: Tensor | None = None) -> Tensor:
        """Embedded tokens (B, T, D) at positions (T,) or (B, T) -> the input of the encoder (B, T, D).

        `before` (B, D) is the embedded token before the first, if any.
        """
        if self.shift is not None:
            x = self.shift(x, before)
        if self.position is not None:
            x = x + self.position(positions)
        if self.sinusoids is not None:
            x = x + self.sinusoids[positions]
        return x

    def _states(self, tokens: Tensor) -> Tensor:
        """Tokens (B, T) -> the encoder's states (B, T, D)."""
        self._check(tokens)
        first = 0 if self.causal else self.config.context - tokens.shape[1]
        positions = torch.arange(first, first + tokens.shape[1], device=tokens.device)
        states: Tensor = self.encoder(self._input(self._embed(tokens), positions), positions)
        return states

    def _pool(self, states: Tensor) -> Tensor:
        """States (B, T, D) -> (B, T, D) if causal, (B, D) if windowed."""
        pooled: Tensor = self.pool(states) if self.causal else self.pool.window(states)
        return pooled

    def _project(self, pooled: Tensor) -> Tensor:
        """Pooled states (..., D) -> the input of the output layer (..., E)."""
        x: Tensor = self.norm(pooled)
        if self.out_projection is not None:
            x = self.out_projection(x)
        return locked_dropout(x, self.config.output_dropout, self.training)

    def _log_probs(self, hidden: Tensor) -> Tensor:
        """log p of every word by the output layer only: (..., E) -> (..., V)."""
        logits = self.logits(hidden)
        return logits.log_softmax(-1) if self.adaptive is None else logits

    def _nats(self, hidden: Tensor, targets: Tensor, loss_chunk: Chunk, temperature: float) -> Tensor:
        """-log p of each target by the output layer only: (N, E) and (N,) -> (N,)."""
        if temperature != 1.0:
            return F.cross_entropy(self.logits(hidden) / temperature, targets, reduction="none")
        loss = target_nats if self.adaptive is None else self.adaptive.nats
        weight: Tensor = self.output.weight  # type: ignore[assignment]
        return loss(hidden, weight, self.output_bias, targets, loss_chunk)

    def _predict_windows(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """log p of the token after the last `lengths` (B,) tokens of each row (B, T): (B, V).

        Rows of one length are computed together, so that no layer needs to handle padding.
        """
        log_probs = torch.empty(len(tokens), self.vocab_size, device=tokens.device)
        for length in lengths.unique().tolist():  # type: ignore[no-untyped-call]
            rows = lengths == length
            log_probs[rows] = self.predict(tokens[rows, -length:]).float()
        return log_probs

    def _prefill(self, tokens: Tensor, lengths: Tensor, capacity: int) -> DecodingState:
        """The state after the first `lengths` (B,) >= 0 tokens of each row of (B, T), with `capacity` > T."""
        count = tokens.shape[1]
        positions = torch.arange(count, device=tokens.device)
        x = self._input(self._embed(tokens), positions)
        x, caches = self.encoder.prefill(x, positions, lengths, capacity)
        pool, pointer = self.pool.prefill(x, lengths), None
        if self.copying is not None:
            pointer = KeyValueCache.allocate(self.copying.keys(x).unsqueeze(1), x.unsqueeze(1), capacity)
        tokens = F.pad(tokens, (0, capacity - count))
        return DecodingState(tokens, lengths, count, caches, pool, pointer)

    def _step(self, state: DecodingState, tokens: Tensor) -> tuple[Tensor, State]:
        log_probs = self.advance(state, tokens, state.kv_len + 1)
        state.kv_len += 1
        return log_probs, state


def _before(x: Tensor, position: Tensor) -> Tensor:
    """The entry of x (B, N, ...) before each row's position (B,), or before 0 any one: (B, ...)."""
    return x[torch.arange(len(x), device=x.device), position - 1]
