"""A causal language model of lmtrain as a model of transformers; the code in an exported folder imports it from here.

`logits` are log-probabilities, so log_softmax does not change them.

Shapes: B rows, T columns, V word types.
"""

from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from lmtrain.config.schema import ModelConfig
from lmtrain.model.build import build_model, build_uninitialized
from lmtrain.model.decoding_state import State


class LmtrainConfig(PreTrainedConfig):
    """config.json: `model` has the fields of `lmtrain.config.schema.ModelConfig`."""

    model_type = "lmtrain"

    def __init__(self, model: dict[str, Any] | None = None, vocab_size: int = 16, **kwargs: Any) -> None:
        self.model = model or {}
        self.vocab_size = vocab_size
        super().__init__(**kwargs)


class LmtrainCache:
    """The model's decoding state after the columns that it has read; `generate` passes it from step to step."""

    is_compileable = False
    is_croppable = False

    def __init__(self, state: State, columns: int) -> None:
        self.state = state
        self.columns = columns

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return how many columns have been read, padding included."""
        return self.columns

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep the rows `beam_idx` (B,), in that order; rows may repeat."""
        self.state = self.state.select(beam_idx)


class LmtrainForCausalLM(PreTrainedModel, GenerationMixin):
    """`LanguageModel` with the interface of transformers. `generate` goes beyond the context as `lmtrain generate`."""

    config_class = LmtrainConfig
    base_model_prefix = "model"
    _tied_weights_keys = {"model.output.embedding.weight": "model.embedding.weight"}  # noqa: RUF012 -- transformers'
    _is_stateful = True  # a cache can't return to an earlier column

    def __init__(self, config: LmtrainConfig) -> None:
        super().__init__(config)
        fields = ModelConfig.model_validate(config.model)
        if fields.mode != "causal":
            raise ValueError(f"model.mode={fields.mode}: only a causal model predicts the token after every position")
        self.model = build_model(fields, config.vocab_size)
        self.post_init()

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def _init_weights(self, module: nn.Module) -> None:
        """Recompute the buffers, which `from_pretrained` loses because it builds the model on the meta device.

        `build_model` has initialized all weights.
        """
        if next(module.buffers(recurse=False), None) is not None:
            for name, value in build_uninitialized(self.model.config, self.model.vocab_size).named_buffers():
                self.model.get_buffer(name).copy_(value)

    def get_input_embeddings(self) -> nn.Module:
        """Return the embedding."""
        return self.model.embedding

    def resize_token_embeddings(self, *_arguments: Any, **_options: Any) -> NoReturn:
        """Raise NotImplementedError before anything changes: transformers would fail with the embedding resized."""
        raise NotImplementedError(
            "a model of lmtrain has a vocabulary of a fixed size: train one with another tokenizer"
        )

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        cache: LmtrainCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        past_key_values: LmtrainCache | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Return the log-probabilities of every next token: input_ids (B, T) -> logits (B, T, V).

        `logits_to_keep` selects positions, as in transformers. `attention_mask` (B, T) is 0 for padding, on the left or
        the right; the logits there mean nothing. `labels` (B, T), with -100 = ignored, are shifted here, and give the
        loss. With `use_cache` or `cache` (`past_key_values` before transformers 5.24), the cache is returned too;
        padding must then be on the left, and the cache has no gradient. Raises ValueError if T is larger than the
        context, except for the last position's logits with `use_cache`.
        """
        valid = None if attention_mask is None else attention_mask[:, -input_ids.shape[1] :].bool()
        cache = past_key_values if cache is None else cache
        if cache is not None:
            log_probs = self._read(cache, input_ids)
        elif use_cache:
            if valid is not None and not bool(valid[:, -1].all()):
                raise ValueError("padding on the right: to generate, pad on the left (padding_side='left')")
            last, state = self.model.start(input_ids, valid)
            cache = LmtrainCache(state, input_ids.shape[1])
            only_last = labels is None and isinstance(logits_to_keep, int) and logits_to_keep == 1
            log_probs = last.unsqueeze(1) if only_last else self._predict(input_ids, valid)
        else:
            log_probs = self._predict(input_ids, valid)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=log_probs, labels=labels, vocab_size=self.model.vocab_size, **kwargs)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        return CausalLMOutputWithPast(loss, log_probs[:, kept], cache)

    def _read(self, cache: LmtrainCache, tokens: Tensor) -> Tensor:
        """Read tokens (B, T) after those of the cache -> (B, T, V)."""
        log_probs = []
        for column in tokens.unbind(1):
            following, cache.state = self.model.step(cache.state, column)
            log_probs.append(following)
        cache.columns += tokens.shape[1]
        return torch.stack(log_probs, dim=1)

    def _predict(self, tokens: Tensor, valid: Tensor | None) -> Tensor:
        """Predict every next token without a cache: tokens and valid (B, T) -> log p (B, T, V)."""
        if valid is None or bool(valid[:, 0].all()):
            return self.model.predict(tokens)
        # Padding on the left is rotated to the right end, where a causal model ignores it, and back.
        columns, pads = torch.arange(tokens.shape[1], device=tokens.device), valid.int().argmax(1, keepdim=True)
        log_probs = self.model.predict(tokens.gather(1, (columns + pads) % len(columns)))
        back = ((columns - pads) % len(columns)).unsqueeze(-1)
        return log_probs.gather(1, back.expand_as(log_probs))
