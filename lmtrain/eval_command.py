"""`lmtrain eval`: its options, and what is made of them."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lmtrain.errors import LmtrainError
from lmtrain.options import (
    DataDir,
    Device,
    Json,
    Precision,
    Quiet,
    Run,
    Weights,
    Which,
    WhichDevice,
    WhichWeights,
    as_overrides,
)
from lmtrain.printing import floor, note, show

if TYPE_CHECKING:
    from lmtrain.data.tokens import TokenStore
    from lmtrain.evaluation import Score
    from lmtrain.inference import Trained
    from lmtrain.schema import Config


def evaluate(
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="eval.FIELD=VALUE", help="Fields of the eval section to set.")
    ] = None,
    run: Run = None,
    split: Annotated[str, typer.Option(help="train, valid or test.")] = "valid",
    checkpoint: Which = "best",
    weights: WhichWeights = Weights.auto,
    stride: Annotated[int | None, typer.Option(min=1, help="Tokens scored per window; less = more context.")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Windows per pass; changes the speed alone.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Score only the first tokens of the split.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Divides the logits of the vocabulary.")] = None,
    cache: Annotated[bool, typer.Option("--cache", help="Mix in a cache of the text's last words.")] = False,
    dynamic: Annotated[bool, typer.Option("--dynamic", help="Learn from each stride after it is scored.")] = False,
    data_dir: DataDir = None,
    device: WhichDevice = Device.auto,
    precision: Annotated[
        Precision | None,
        typer.Option(help="Arithmetic; int8, for a CPU, as `generate` has it. [default: the run's own]"),
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure the perplexity of a trained model."""
    from lmtrain.allocator import keep_heap

    keep_heap()
    from lmtrain.adaptation import settings_used
    from lmtrain.data.prepare import prepare_store
    from lmtrain.inference import open_trained, ready_to_generate
    from lmtrain.runtime import choose_precision, enough_memory

    trained = open_trained(run, checkpoint, weights.value, device.value)
    if precision is Precision.int8:
        trained = ready_to_generate(trained, "int8", compiled=False)
    given = as_overrides({"eval.temperature": temperature, "eval.stride": stride, "eval.batch_size": batch_size})
    config = _settings(trained, overrides or [], given, data_dir)
    store = prepare_store(config, note=note, progress=not quiet)
    if store.tokenizer.sha256 != trained.tokenizer.sha256:
        raise LmtrainError(f"{store.folder} was tokenized otherwise than {trained.run_dir}: its corpus has changed")
    arithmetic = choose_precision(precision.value if precision else config.train.precision, trained.device)
    with enough_memory("lower --batch-size or, with --cache, eval.cache_window"):
        score = _score(
            trained, config, store, split, arithmetic, limit=limit, cache=cache, dynamic=dynamic, hidden=quiet or None
        )
    used = settings_used(config.eval, dynamic=dynamic, cache=cache)
    about = {
        "run": str(trained.run_dir),
        "step": trained.step,
        "weights": trained.weights,
        "split": split,
        "precision": arithmetic,
        **used,
    }
    named = "".join(
        f", {key.replace('_', ' ')} {value}" for key, value in used.items() if (key, value) != ("temperature", 1.0)
    )
    text = (
        f"{trained.run_dir} step {trained.step:,} ({trained.weights} weights, {arithmetic}) on {split}: "
        f"context {score.context}, stride {score.stride}{named}\n"
        f"  word perplexity   {score.word_perplexity:10.3f}   over {score.words:,.0f} words{floor(store, split)}\n"
        f"  token perplexity  {score.token_perplexity:10.3f}   over {score.tokens:,} tokens\n"
        f"  bits per byte     {score.bits_per_byte:10.4f}   over {score.bytes:,.0f} bytes"
    )
    show({**about, **score.summary()}, text, as_json)


def _settings(trained: "Trained", overrides: list[str], options: list[str], data_dir: Path | None) -> "Config":
    """The run's configuration with the evaluation that was asked for."""
    from lmtrain.config import change

    foreign = [override for override in overrides if not override.startswith("eval.")]
    if foreign:
        raise LmtrainError(
            f"{foreign[0]}: eval takes eval.field=value alone, the rest being what the run was made with"
        )
    place = as_overrides({"data.dir": data_dir})
    return change(trained.config, [*overrides, *options, *place])


def _score(
    trained: "Trained",
    config: "Config",
    store: "TokenStore",
    split: str,
    precision: str,
    *,
    limit: int | None,
    cache: bool,
    dynamic: bool,
    hidden: bool | None,
) -> "Score":
    """Score a split, a bar on the terminal; with `dynamic`, gradients are measured on the training split first."""
    from tqdm import tqdm

    from lmtrain.adaptation import adapted
    from lmtrain.evaluation import default_stride, evaluate

    part, mode, context = store.split(split), config.model.mode, config.model.context
    stride = config.eval.stride or default_stride(mode, context)
    with tqdm(desc="statistics", unit="tok", unit_scale=True, disable=not dynamic or hidden, leave=False) as bar:
        forward = adapted(
            trained.model,
            config.eval,
            store.split("train"),
            dynamic=dynamic,
            cache=cache,
            segment=stride,
            device=trained.device,
            precision=precision,
            advance=bar.update,
        )
    with tqdm(total=min(limit or part.tokens, part.tokens), unit="tok", unit_scale=True, disable=hidden) as bar:
        score = evaluate(
            forward,
            part,
            mode=mode,
            context=context,
            stride=stride,
            batch_size=1 if dynamic else config.eval.batch_size,
            first_token=trained.tokenizer.eos_id,
            device=trained.device,
            precision="fp32" if precision == "int8" else precision,  # of what is no product of matrices
            limit=limit,
            advance=bar.update,
        )
    if dynamic and not math.isfinite(score.nats):
        raise LmtrainError("dynamic evaluation diverged: lower eval.dynamic_lr")
    return score
