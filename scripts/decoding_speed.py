"""Tokens per second of decoding, side by side with Hugging Face `generate` on models of the same size.

Random weights: what is generated does not matter to the time, and nothing ends before its full length.
"""

import importlib
import itertools
import os
import statistics
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch
from record import seconds

from lmtrain.config.schema import ModelConfig
from lmtrain.generation.beam import beam_search
from lmtrain.generation.sampling import sample
from lmtrain.generation.search import Rules, Step
from lmtrain.model.language_model import LanguageModel
from lmtrain.model.packing import pack
from lmtrain.model.state import State
from lmtrain.model.steps import steps
from lmtrain.system.device import choose_device, choose_precision

VOCABULARY, PROMPT, SEED = 33_278, 8, 0
SIZES = ((256, 4, 4), (768, 12, 12))
"""Width, layers, heads."""
NEW, BATCHES, BEAMS = (128, 1024), (1, 16), (1, 4)
"""Of each, all cases are measured: new tokens (fewer where the user says so), prompts at once, beams."""
TRIED = 12
"""New tokens by which each form of the weights is tried for a case; the fastest one is measured."""
REPEATS = 3
READ = 2**29
"""Bytes that are read to measure the memory's bandwidth: more than any cache holds."""

Generate = Callable[[torch.Tensor, int, int], None]
"""`generate(prompts (B, T), beams, new_tokens)`."""


def decoding(most_tokens: int, device: torch.device) -> dict[str, Any]:
    """Our tokens per second and Hugging Face's for every size and case, none longer than so many new tokens.

    Both take each case with the form of their weights that is fastest in it. Repeats alternate; the best ones count.
    """
    torch.manual_seed(SEED)
    found = []
    cases = list(itertools.product(dict.fromkeys(min(new, most_tokens) for new in NEW), BATCHES, BEAMS))
    for dim, layers, heads in SIZES:
        ours, theirs = our_models(dim, layers, heads, device), their_models(dim, layers, heads, device)
        for new, batch, beams in cases:
            if new < 1000 or dim < 512 or batch == 1:  # the rest would take half an hour
                case = {"dim": dim, "layers": layers, "heads": heads, "batch": batch, "beams": beams, "new_tokens": new}
                found.append(case | compare(ours, theirs, batch, beams, new, device))
                print(found[-1], flush=True)
    floors = {str(dim): floor(dim, layers, heads) for dim, layers, heads in SIZES} if device.type == "cpu" else {}
    for size, bound in floors.items():
        greedy = next(c for c in found if str(c["dim"]) == size and c["batch"] == c["beams"] == 1)
        bound["share"] = greedy["tokens_per_second"] * bound["seconds"][greedy["weights"].split()[0]]
    ratios = {
        size: [[round(c[kind], 2) for c in found if c["dim"] == size[0]] for kind in ("ratio", "fp32_ratio")]
        for size in SIZES
    }
    return {
        "title": f"decoding, V = {VOCABULARY:,}, beside transformers {version('transformers')} (GPT-2, as large), "
        f"greedy and 4 beams, 1 and 16 prompts, up to {most_tokens:,} new tokens",
        "result": "; ".join(
            f"{dim} x {layers}: {min(ratio):.1f} to {max(ratio):.1f} times as fast "
            f"({min(exact):.1f} to {max(exact):.1f} in float32)"
            + (f", greedy at {floors[str(dim)]['share']:.0%} of the memory's bandwidth" if floors else "")
            for (dim, layers, _), (ratio, exact) in ratios.items()
        ),
        "seed": SEED,
        "threads": torch.get_num_threads(),
        "load_average_after": os.getloadavg()[0],
        "cases": found,
        "floors": floors,
    }


def compare(
    ours: dict[str, Generate], theirs: dict[str, Generate], batch: int, beams: int, new: int, device: torch.device
) -> dict[str, Any]:
    """Both in turn, each with its fastest weights, and ours with its fastest in plain float32."""
    prompts = torch.randint(1, VOCABULARY, (batch, PROMPT), device=device)
    first: dict[str, float] = {}
    tried: list[dict[str, float]] = []
    for side in (ours, theirs):
        for name, run in side.items():
            first[name] = seconds(run, prompts, beams, 4)
        tried.append({name: min(seconds(run, prompts, beams, TRIED) for _ in range(2)) for name, run in side.items()})
    mine, other = (min(times, key=times.__getitem__) for times in tried)
    exact = min((name for name in ours if name.startswith("fp32")), key=tried[0].__getitem__)
    runs = (ours[mine], theirs[other], ours[exact])
    rounds = [[seconds(run, prompts, beams, new) for run in runs] for _ in range(REPEATS if new < 1000 else 1)]
    best, reference, plain = (batch * new / min(times) for times in zip(*rounds, strict=True))
    return {
        "weights": mine,
        "their_weights": other,
        "tokens_per_second": best,
        "their_tokens_per_second": reference,
        "ratio": best / reference,
        "ratios": [theirs_took / ours_took for ours_took, theirs_took, _ in rounds],
        "fp32_form": exact,
        "fp32_tokens_per_second": plain,
        "fp32_ratio": plain / reference,
        "tried_seconds": dict(zip(("ours", "theirs"), tried, strict=True)),
        "compiling_seconds": {name: took for name, took in first.items() if "compiled" in name},
    }


def our_models(dim: int, layers: int, heads: int, device: torch.device) -> dict[str, Generate]:
    """Ours by the form of their weights; the pooling block comes on top of the layers."""
    forms: tuple[str, ...] = ("fp32", "bf16", "int8") if device.type == "cpu" else ("fp32", "bf16")
    found: dict[str, Generate] = {}
    for weights in forms:
        model = our_model(dim, layers, heads, weights)
        found[weights] = our_search(model, steps(model))
    for weights in sorted({"fp32", "int8", choose_precision("auto", device)}) if device.type == "cpu" else ():
        model = our_model(dim, layers, heads, weights, compiled=True)
        found[f"{weights} compiled"] = our_search(model, steps(model, compiled=True))
    return found


def our_model(dim: int, layers: int, heads: int, weights: str, *, compiled: bool = False) -> LanguageModel:
    """A model with random weights in this form."""
    model = LanguageModel(ModelConfig(dim=dim, layers=layers, heads=heads, context=1024), VOCABULARY).eval()
    pack(model.to(choose_device("auto")), weights, prepack=not compiled)
    return model


def our_search(model: LanguageModel, step: Step[State]) -> Generate:
    """Greedy or beam search of this model."""

    def run(prompts: torch.Tensor, beams: int, new: int) -> None:
        log_probs, state = model.start(prompts)
        rules = Rules(max_tokens=new)
        if beams == 1:
            texts = [text.ids for text in sample(log_probs, state, step, rules)]
        else:
            texts = [best.ids for best, *_ in beam_search(log_probs, state, step, rules, beams=beams)]
        if {len(ids) for ids in texts} != {new}:
            raise AssertionError("a text has not its full length")

    return run


def their_models(dim: int, layers: int, heads: int, device: torch.device) -> dict[str, Generate]:
    """transformers' GPT-2 by the type of its weights."""
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise SystemExit("this needs transformers: pip install -c constraints.txt -e '.[benchmark]'") from error
    transformers.logging.set_verbosity_error()
    found: dict[str, Generate] = {}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        config = transformers.GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=1024 + PROMPT,
            n_embd=dim,
            n_layer=layers,
            n_head=heads,
            bos_token_id=0,
            eos_token_id=None,
            pad_token_id=0,
        )
        found[name] = their_search(transformers.GPT2LMHeadModel(config).to(device, dtype).eval())
    return found


def their_search(model: Any) -> Generate:
    """`generate` of this model, which ends with the last token on the host, as ours does."""

    @torch.inference_mode()
    def run(prompts: torch.Tensor, beams: int, new: int) -> None:
        found = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            num_beams=beams,
        )
        if found.cpu().shape != (len(prompts), PROMPT + new):
            raise AssertionError("a text has not its full length")

    return run


def floor(dim: int, layers: int, heads: int) -> dict[str, Any]:
    """The least time of a token: the bytes of the matrices that it reads, over the bandwidth of reading `READ` bytes.

    The caches come on top: at most 8 * dim * layers bytes for each token of the text.
    """
    model = LanguageModel(ModelConfig(dim=dim, layers=layers, heads=heads), VOCABULARY)
    read = sum(x.numel() for name, x in model.named_parameters() if x.dim() == 2)  # the output layer is the embedding
    buffer = torch.ones(READ // 4)
    buffer.sum()
    bandwidth = 4 * len(buffer) / statistics.median(seconds(buffer.sum) for _ in range(9))
    sizes = {"fp32": 4, "bf16": 2, "int8": 1}
    return {
        "bytes_per_second": bandwidth,
        "bytes": {weights: size * read for weights, size in sizes.items()},
        "seconds": {weights: size * read / bandwidth for weights, size in sizes.items()},
    }
