"""Which field is meant by an unknown name: the same name in another section, a name that other programs use, a typo."""

import difflib

from lmtrain.config.schema import SECTIONS

ALIASES = {
    "train.lr": "learning_rate max_lr peak_lr base_lr",
    "train.final_lr": "min_lr lr_end min_learning_rate final_lr_frac",
    "train.steps": "max_steps max_iters num_iterations iterations iters train_steps num_steps total_steps",
    "train.epochs": "num_train_epochs num_epochs max_epochs n_epochs",
    "train.tokens": "max_tokens total_tokens train_tokens max_train_tokens token_budget",
    "train.max_minutes": "minutes max_time time_limit time_budget",
    "train.batch_size": "global_batch_size total_batch_size train_batch_size bs",
    "train.micro_batch": "micro_batch_size per_device_train_batch_size device_batch_size gradient_accumulation_steps "
    "grad_accum accumulate_grad_batches",
    "train.clip": "grad_clip max_grad_norm gradient_clip_val max_norm",
    "train.warmup": "warmup_steps warmup_iters warmup_ratio num_warmup_steps warmup_fraction",
    "train.schedule": "lr_scheduler_type lr_scheduler scheduler lr_schedule",
    "train.optimizer": "optim optimizer_name",
    "train.beta1": "adam_beta1",
    "train.beta2": "adam_beta2",
    "train.eps": "adam_epsilon epsilon",
    "train.weight_decay": "wd wdecay",
    "train.ema": "ema_decay",
    "train.precision": "dtype mixed_precision amp fp16 bf16",
    "train.compile": "torch_compile compile_model",
    "train.activation_checkpointing": "gradient_checkpointing",
    "train.log_steps": "log_interval logging_steps log_every log_every_n_steps",
    "train.eval_steps": "eval_interval eval_every validation_steps val_check_interval",
    "train.save_minutes": "save_steps save_interval save_every checkpoint_interval",
    "train.keep": "save_total_limit save_top_k",
    "train.patience": "early_stopping_patience early_stopping",
    "train.init_from": "init_checkpoint pretrained model_name_or_path finetune_from",
    "train.teacher": "teacher_model distill_from",
    "model.context": "block_size seq_len seq_length sequence_len sequence_length max_seq_len max_seq_length "
    "max_sequence_length context_length context_size ctx_len n_ctx n_positions max_position_embeddings bptt window",
    "model.layers": "n_layer n_layers num_layers num_hidden_layers nlayers depth",
    "model.heads": "n_head n_heads num_heads num_attention_heads nheads nhead",
    "model.dim": "n_embd d_model hidden_size emsize n_embed embedding_dim model_dim width nhid",
    "model.embed_dim": "embedding_size emb_dim",
    "model.ff_dim": "d_ff ffn_dim intermediate_size ff_size feedforward_dim dim_feedforward mlp_dim",
    "model.dropout": "hidden_dropout resid_dropout resid_pdrop dropout_rate dropout_prob",
    "model.attention_dropout": "attn_dropout attn_pdrop attention_probs_dropout_prob",
    "model.input_dropout": "embd_pdrop embed_dropout",
    "model.activation": "activation_function hidden_act act_fn",
    "model.position": "pos_emb pos_encoding position_encoding positional_encoding position_embedding_type",
    "model.norm": "norm_type normalization",
    "model.tie_embeddings": "tied tie_word_embeddings tie_weights weight_tying",
    "tokenizer.kind": "type tokenizer_type model_type",
    "tokenizer.vocab_size": "vocabulary_size n_vocab num_tokens",
    "tokenizer.file": "tokenizer_path tokenizer_file tokenizer_name",
    "tokenizer.eos_token": "eos eot_token end_of_text_token",
    "data.source": "data dataset data_path train_file train_data corpus dataset_name",
    "data.subset": "dataset_config dataset_config_name",
    "data.text_column": "text_field text_key column",
    "run.name": "run_name experiment exp_name",
    "run.dir": "out out_dir output_dir save_dir log_dir checkpoint_dir",
    "run.seed": "random_seed rng_seed manual_seed",
    "eval.batch_size": "eval_batch_size per_device_eval_batch_size",
    "eval.stride": "sliding_window eval_stride",
}
"""Fields, and what nanoGPT, Hugging Face, litgpt, fairseq and PyTorch's examples call them."""

_BY_ALIAS = {alias: field for field, aliases in ALIASES.items() for alias in aliases.split()}


def suggestion(key: str) -> str:
    """What to append to a message about the unknown field `key`: the field that is meant, or how to list all."""
    if (names := meant(key)) not in ([], [key]):
        return f"; did you mean {described(names)}?"
    section = key if key in SECTIONS else key.rpartition(".")[0]
    if section in SECTIONS:
        return f"; `lmtrain train --fields {section}` lists the fields of {section}"
    return f"; the sections are {', '.join(SECTIONS)}"


def described(names: list[str]) -> str:
    """The names joined by "or": a field with the first sentence about it, a section by its name."""

    def one(name: str) -> str:
        section, _, field = name.partition(".")
        if not field:
            return name
        description = " ".join(str(SECTIONS[section][field].description).split())
        return f"{name} ({description.partition('. ')[0].removesuffix('.')})"

    return " or ".join(map(one, names))


def meant(key: str) -> list[str]:
    """Return the fields, or the section, that an unknown name, with or without a section, may stand for, by the first
    rule that has any."""
    section, _, name = key.rpartition(".")
    name = name.lower().replace("-", "_")
    same = [f"{other}.{name}" for other, fields in SECTIONS.items() if name in fields]
    if same:
        return same
    if name in _BY_ALIAS:
        return [_BY_ALIAS[name]]
    names = {field: f"{part}.{field}" for part in (*SECTIONS, section) for field in SECTIONS.get(part, {})}
    names |= {} if section else {part: part for part in SECTIONS}
    return [names[near] for near in difflib.get_close_matches(name, names, n=1, cutoff=0.7)]
