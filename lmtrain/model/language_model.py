"""The language model: embedding -> encoder blocks -> attention pooling -> logits.

`causal`: blocks see no later position and the pool is taken over every prefix, so each position predicts its next
token. `windowed`: blocks see the whole window and the pool predicts the one token after it. The weights are the same.

Positions count from a row's first token where causal, and are aligned to the right end of the window where windowed, so
that the token before the prediction always has the last position.

Shapes: B rows, T tokens (at most the context), D the model's width, E the embedding's, H heads, V word types.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmtrain.config.schema import ModelConfig
from lmtrain.model.copying import ContextCopy
from lmtrain.model.encoder import Encoder
from lmtrain.model.state import CausalState, State, WindowedState, align_left, room_for
from lmtrain.nn import output_loss
from lmtrain.nn.adaptive import AdaptiveSoftmax
from lmtrain.nn.dropout import drop, locked_dropout
from lmtrain.nn.norms import cut_gradients_at_zero, norm
from lmtrain.nn.output_loss import Chunk
from lmtrain.nn.pooling import AttentionPooling, slope_parameters
from lmtrain.nn.positions import sinusoidal
from lmtrain.nn.scheduled_sampling import sample

SAMPLED_AT_ONCE = 256


class LanguageModel(nn.Module):
    """The model of a configuration. It takes 1 to `context` tokens in a row; ValueError otherwise."""

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        self.config = config
        self.vocab_size = vocab_size
        self.causal = config.mode == "causal"
        dim, width = config.dim, config.embed_dim or config.dim
        self.embedding = _embedding(vocab_size, width)
        self.in_projection = nn.Linear(width, dim, bias=False) if width != dim else None
        self.position = _embedding(config.context, dim) if config.position == "learned" else None
        sinusoids = sinusoidal(torch.arange(config.context), dim) if config.position == "sinusoidal" else None
        self.sinusoids: Tensor | None
        self.register_buffer("sinusoids", sinusoids, persistent=False)  # computed, so never saved
        self.encoder = Encoder(config)
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
        self.output = nn.Linear(width, vocab_size, bias=False) if not config.tie_embeddings else None
        self.output_bias = nn.Parameter(torch.zeros(vocab_size)) if config.output_bias else None
        adaptive = config.output == "adaptive"
        self.adaptive = AdaptiveSoftmax(width, vocab_size, config.output_cutoffs) if adaptive else None
        self.copying = ContextCopy(dim, config.norm) if config.copy else None
        self.packed_output: nn.Module | None = None  # see `pack`
        self.loss_chunk: Chunk = "auto"  # of the targets of a forward pass: train.loss_chunk
        self.temperature = 1.0  # of the softmax over the vocabulary, which evaluation may change: eval.temperature
        self.adversarial = 0.0  # of the loss in training: train.adversarial_softmax
        if config.embedding_dropout:
            cut_gradients_at_zero(self)
        if not self.embedding.weight.is_meta:
            initialise(self)

    def encode(self, tokens: Tensor) -> Tensor:
        """The states that the output layer reads: tokens (B, T) -> (B, T, E) where causal, (B, E) where windowed."""
        return self._project(self._pool(self._states(tokens)))

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., E) -> (..., V) logits at the model's temperature, float32 also under autocast."""
        logits = F.linear(hidden, self.output_weight) if self.packed_output is None else self.packed_output(hidden)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        # The bias in float32: log frequencies rounded to bf16 would be off by up to 3 %.
        logits = logits + self.output_bias if self.output_bias is not None else logits
        logits = logits if self.adaptive is None else self.adaptive(logits, hidden)
        return logits / self.temperature if self.temperature != 1.0 else logits

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """-log p of each target, in nats, float32: see `score`."""
        return self.score(tokens, targets)[0]

    def score(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """-log p of each target, in nats, float32, and the states (..., E) that the output layer read for it.

        Tokens (B, T); targets (B, S) if causal, what follows the last S of them, or (B,) if windowed.
        """
        states = self._states(tokens)
        pooled = self._pool(states)[:, -targets.shape[1] :] if self.causal else self._pool(states)
        hidden = self._project(pooled)
        nats = self._nats(hidden.flatten(0, -2), targets.flatten()).view_as(targets)
        if self.copying is not None:
            nats = -self.copying.target_log_prob(-nats, pooled, self.copying.keys(states), tokens, targets)
        return nats, hidden

    def predict(self, tokens: Tensor) -> Tensor:
        """log p of every next token, in nats, float32: tokens (B, T) -> (B, T, V) if causal, (B, V) if windowed."""
        states = self._states(tokens)
        pooled = self._pool(states)
        log_probs = self.logits(self._project(pooled)).log_softmax(-1)
        if self.copying is None:
            return log_probs
        return self.copying.log_probs(log_probs, pooled, self.copying.keys(states), tokens)

    @torch.no_grad()
    def sample_inputs(self, tokens: Tensor, chosen: Tensor) -> Tensor:
        """Tokens (B, T) of a causal model, the `chosen` (B, T) drawn anew from the prediction made for their place.

        All are replaced in parallel: each prediction reads the tokens as they are. Nothing predicts column 0.
        """
        states = self._states(tokens)
        pooled = self._pool(states)
        keys = self.copying.keys(states) if self.copying is not None else None
        result = tokens.clone()
        for part in torch.split(chosen.nonzero(), SAMPLED_AT_ONCE):  # a row of V probabilities for each
            rows, before = part[:, 0], part[:, 1] - 1
            drawn = sample(self.logits(self._project(pooled[rows, before])))
            if self.copying is not None and keys is not None:
                drawn = self.copying.sample(drawn, pooled[rows, before], keys[rows], tokens[rows], before)
            result[rows, before + 1] = drawn
        return result

    @property
    def output_weight(self) -> Tensor:
        """(V, E): the embedding's own tensor where tied."""
        return self.embedding.weight if self.output is None else self.output.weight

    @torch.no_grad()
    def set_output_bias(self, counts: Tensor) -> None:
        """Set the output bias to log((counts + 1) / their sum): counts (V,), how often each type occurs in training.

        Raises ValueError for a model without an output bias.
        """
        if self.output_bias is None:
            raise ValueError("the model has no output bias: model.output_bias is off")
        smoothed = counts.to(self.output_bias.device, torch.float64) + 1
        self.output_bias.copy_((smoothed / smoothed.sum()).log())
        if self.adaptive is not None:
            self.adaptive.set_bias(self.output_bias)

    @torch.no_grad()
    def start(self, tokens: Tensor, valid: Tensor | None = None) -> tuple[Tensor, State]:
        """Read prompts (B, T) of any length: log-probabilities of the next token (B, V) float32, and the state.

        They may be padded on the left: `valid` (B, T) bool is then True on tokens, and on every row's last column. Only
        the last `context` columns are read.
        """
        level = valid is None or bool(valid.all())
        tokens = tokens[:, -self.config.context :]
        valid = torch.ones_like(tokens, dtype=torch.bool) if valid is None else valid[:, -self.config.context :]
        self._check(tokens)
        if not self.causal:
            return self._predict_windows(tokens, valid.sum(1)), WindowedState(tokens, valid)
        # All but the last token are read as a prefix, and the last one as a step: one way to the prediction.
        aligned, lengths = align_left(tokens, valid)
        last = aligned.gather(1, lengths.unsqueeze(-1) - 1).squeeze(-1)
        room = room_for(tokens.shape[1], self.config.context)
        return self._step(self._read(aligned[:, :-1], lengths - 1, room, level=level), last)

    @torch.no_grad()
    def step(self, state: State, tokens: Tensor) -> tuple[Tensor, State]:
        """Read one more token per row, (B,): log-probabilities of the next one (B, V) float32, and the new state.

        A causal row that holds `context` tokens keeps the last context // 2 (at least one) with the new one among
        them, reads them anew, and goes on. A windowed model reads its window anew at every step.
        """
        if isinstance(state, WindowedState):
            valid = torch.cat((state.valid, torch.ones_like(state.valid[:, :1])), dim=1)
            return self.start(torch.cat((state.tokens, tokens.unsqueeze(-1)), dim=1), valid)
        self.make_room(state)
        return self._step(state, tokens)

    @torch.no_grad()
    def pool_weights(self, tokens: Tensor) -> Tensor:
        """How the pool weighs the positions for the last of them: tokens (1, T) -> (H, T) float32, rows sum to one."""
        return self.pool.weights(self._states(tokens)).squeeze(0).float()

    def _check(self, tokens: Tensor) -> None:
        if not 1 <= tokens.shape[1] <= self.config.context:
            raise ValueError(f"{tokens.shape[1]} tokens in a row: the model takes 1 to {self.config.context}")

    def _embed(self, tokens: Tensor, places: Tensor) -> Tensor:
        """Tokens (B, T) at positions (T,) or (B, T) -> (B, T, D)."""
        x: Tensor = self.embedding(tokens) * (self.embedding.embedding_dim / 2)  # see `initialise`
        if self.training and self.config.embedding_dropout:
            kept = drop(x.new_ones(self.vocab_size), self.config.embedding_dropout)
            x = x * kept[tokens].unsqueeze(-1)
        x = locked_dropout(x, self.config.input_dropout, self.training)
        if self.in_projection is not None:
            x = self.in_projection(x)
        if self.position is not None:
            x = x + self.position(places)
        if self.sinusoids is not None:
            x = x + self.sinusoids[places]
        return x

    def _states(self, tokens: Tensor) -> Tensor:
        """Tokens (B, T) -> the encoder's states (B, T, D)."""
        self._check(tokens)
        first = 0 if self.causal else self.config.context - tokens.shape[1]
        places = torch.arange(first, first + tokens.shape[1], device=tokens.device)
        states: Tensor = self.encoder(self._embed(tokens, places), places)
        return states

    def _pool(self, states: Tensor) -> Tensor:
        """States (B, T, D) -> (B, T, D) where causal, (B, D) where windowed."""
        pooled: Tensor = self.pool(states) if self.causal else self.pool.window(states)
        return pooled

    def _project(self, pooled: Tensor) -> Tensor:
        """Pooled states (..., D) -> what the output layer reads (..., E)."""
        x: Tensor = self.norm(pooled)
        if self.out_projection is not None:
            x = self.out_projection(x)
        return locked_dropout(x, self.config.output_dropout, self.training)

    def _nats(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """-log p of each target by the output layer alone: (N, E) and (N,) -> (N,)."""
        if self.packed_output is not None or self.temperature != 1.0:
            return F.cross_entropy(self.logits(hidden), targets, reduction="none")
        loss = output_loss.target_nats if self.adaptive is None else self.adaptive.nats
        nats = loss(hidden, self.output_weight, self.output_bias, targets, self.loss_chunk)
        if not self.training or not self.adversarial:
            return nats
        rows = F.embedding(targets, self.output_weight)
        return output_loss.adversarial_nats(nats, hidden, rows, self.adversarial)

    def _predict_windows(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """log p of the token after the last `lengths` (B,) tokens of each row (B, T): (B, V).

        Rows of one length go together: no layer then has to know of padding.
        """
        log_probs = torch.empty(len(tokens), self.vocab_size, device=tokens.device)
        for length in lengths.unique().tolist():  # type: ignore[no-untyped-call]
            rows = lengths == length
            log_probs[rows] = self.predict(tokens[rows, -length:]).float()
        return log_probs

    def _read(self, tokens: Tensor, lengths: Tensor, columns: int, *, level: bool) -> CausalState:
        """The state after the first `lengths` (B,) >= 0 tokens of each row of (B, T), with room for `columns` > T.

        `level`: all lengths are T.
        """
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x, caches = self.encoder.prefill(self._embed(tokens, places), places, lengths, columns)
        room = F.pad(tokens, (0, columns - tokens.shape[1]))
        keys = F.pad(self.copying.keys(x), (0, 0, 0, columns - tokens.shape[1])) if self.copying is not None else None
        pool = self.pool.start(x, lengths, columns)
        return CausalState(room, lengths, tokens.shape[1], level, caches, pool, keys)

    def _step(self, state: CausalState, tokens: Tensor) -> tuple[Tensor, State]:
        log_probs = self.advance(state, tokens, state.columns + 1, level=state.level)
        state.columns += 1
        return log_probs, state

    def advance(self, state: CausalState, tokens: Tensor, seen: int, *, level: bool) -> Tensor:
        """`step` without its decisions: read a token per row (B,), looking at the first `seen` columns -> (B, V).

        All is done on the device and in the state's own memory, so that it can be recorded and replayed; `columns`
        stays as it is. See `Place` for `level`.
        """
        column = state.lengths
        place = self.encoder.place(column, seen, level=level)
        place.write(state.tokens, tokens)
        x = self.encoder.step(self._embed(tokens.unsqueeze(-1), column.unsqueeze(-1)), state.caches, place)
        pooled = self.pool.step(x, state.pool, place)
        log_probs = self.logits(self._project(pooled)).float().log_softmax(-1)
        if self.copying is not None and state.copy_keys is not None:
            place.write(state.copy_keys, self.copying.keys(x).squeeze(1))
            keys = state.copy_keys[:, :seen]
            log_probs = self.copying.log_probs(log_probs, pooled, keys, state.tokens[:, :seen], column)
        state.lengths += 1
        return log_probs

    def make_room(self, state: CausalState) -> None:
        """See that every row has room for one more token: each that is as long as the context is read anew from its
        last tokens, while the others stay as they are."""
        context = self.config.context
        if state.columns == state.room < context:
            state.grow(room_for(state.columns + 1, context))
        if state.columns < context:
            return
        kept = max(1, context // 2) - 1  # the new token comes on top
        rows = (state.lengths == context).nonzero().squeeze(-1)
        tokens = state.tokens[rows, context - kept :]
        if len(rows):
            state.replace(rows, self._read(tokens, torch.full_like(rows, kept), context, level=True))
        state.columns = int(state.lengths.max())


def _embedding(count: int, width: int) -> nn.Embedding:
    """(count, width), on the meta device without a start: torch's would import its compiler, which takes a second."""
    if torch.empty(0).is_meta:
        bare: nn.Embedding = nn.Embedding.from_pretrained(torch.empty(count, width), freeze=False)  # type: ignore[no-untyped-call]
        return bare
    return nn.Embedding(count, width)


@torch.no_grad()
def initialise(model: LanguageModel) -> None:
    """All initial weights, from torch's default generator. Width n = a matrix's inputs, N = blocks and pool.

    | parameter                            | start                     | reason                                        |
    | ------------------------------------ | ------------------------- | --------------------------------------------- |
    | inner projections, in/out projection | normal, 1 / sqrt(n)       | keeps unit mean square                        |
    | last projection of a sub-layer       | that / sqrt(2 N)          | 2 N sub-layers add up to unit mean square     |
    | embedding, untied output layer       | normal, 1 / E             | a state of unit mean square then gives logits |
    |                                      |                           | of one at most, even for its own token's row: |
    |                                      |                           | the first prediction is the output bias. The  |
    |                                      |                           | input is scaled to 1/2, which learns fastest  |
    | learned positions                    | normal, 1/2               | as large as the scaled embedding              |
    | pooling seed                         | normal, 1 / sqrt(d_head)  | the pool starts close to a plain mean, or one |
    |                                      |                           | weighted by recency alone                     |
    | pooling slopes                       | 4 .. 0.02, log-spaced     | several time scales from the start            |
    | output bias                          | 0                         | `set_output_bias` knows better                |
    | clusters of an adaptive output       | 0, its bias log(words)    | a cluster is as probable as its words         |
    | copying gate                         | 0, its bias -2            | an eighth of the prediction is the pointer's  |
    | norms                                | identity up to scale      |                                               |
    """
    config = model.config
    depth = 2 * (config.layers + 1)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "output":
            last = name.endswith(".output")
            module.weight.normal_(std=(module.in_features * (depth if last else 1)) ** -0.5)
    model.embedding.weight.normal_(std=1 / model.embedding.embedding_dim)
    if model.output is not None:
        model.output.weight.normal_(std=1 / model.output.in_features)
    if model.position is not None:
        model.position.weight.normal_(std=0.5)
    if model.adaptive is not None:
        model.adaptive.clusters.weight.zero_()
    if model.copying is not None:
        model.copying.gate.weight.zero_()
    model.pool.seed.normal_(std=(config.dim // config.heads) ** -0.5)
    if model.pool.slope is not None:
        model.pool.slope.copy_(slope_parameters(config.heads))
