"""Tokens per second of decoding, side by side with Hugging Face `generate` on models of the same size.

Random weights: what is generated does not matter to the time, and nothing ends before its full length.
"""

import importlib
import os
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch

from lmtrain.decoding.beam import beam_search
from lmtrain.decoding.sampling import sample
from lmtrain.decoding.search import Rules, Step
from lmtrain.nn.language_model import LanguageModel
from lmtrain.nn.packing import pack
from lmtrain.nn.state import State
from lmtrain.nn.steps import steps
from lmtrain.runtime import choose_device
from lmtrain.schema import ModelConfig

VOCABULARY, PROMPT, SEED = 33_278, 8, 0
SIZES = ((256, 4, 4), (768, 12, 12))
"""Width, layers, heads."""
CASES = tuple((batch, beams, new) for new in (128, 1024) for batch in (1, 16) for beams in (1, 4))
TRIED = 12
"""New tokens by which each form of the weights is tried for a case; the fastest one is measured."""
REPEATS = 3
COMPILED = {1: "int8 compiled", 16: "fp32 compiled"}
"""What is compiled, by the number of prompts: half a minute for each number of rows and each room."""

Generate = Callable[[torch.Tensor, int, int], None]
"""`generate(prompts (B, T), beams, new_tokens)`."""


def decoding(most_tokens: int, device: torch.device) -> dict[str, Any]:
    """Our tokens per second and Hugging Face's for every size and case of at most so many new tokens.

    Both take each case with the form of their weights that is fastest in it. Repeats alternate; the best ones count.
    """
    torch.manual_seed(SEED)
    found = []
    for dim, layers, heads in SIZES:
        ours, theirs = our_models(dim, layers, heads, device), their_models(dim, layers, heads, device)
        for batch, beams, new in CASES:
            if new <= most_tokens and (new < 1000 or dim < 512):  # the rest would take the better part of an hour
                case = {"dim": dim, "layers": layers, "heads": heads, "batch": batch, "beams": beams, "new_tokens": new}
                found.append(case | compare(ours, theirs, batch, beams, new, device))
                print(found[-1], flush=True)
    floors = {str(dim): floor(dim, layers, heads) for dim, layers, heads in SIZES} if device.type == "cpu" else {}
    for size, bound in floors.items():
        greedy = next(c for c in found if str(c["dim"]) == size and c["batch"] == c["beams"] == 1)
        bound["share"] = greedy["tokens_per_second"] * bound["seconds"][greedy["weights"].split()[0]]
    ratios = {size: [round(c["ratio"], 2) for c in found if c["dim"] == size[0]] for size in SIZES}
    return {
        "title": f"decoding, V = {VOCABULARY:,}, beside transformers {version('transformers')} (GPT-2, as large), "
        f"greedy and 4 beams, 1 and 16 prompts, up to {most_tokens:,} new tokens",
        "result": "; ".join(
            f"{dim} x {layers}: {min(ratio):.1f} to {max(ratio):.1f} times as fast"
            + (f", greedy at {floors[str(dim)]['share']:.0%} of the memory's bandwidth" if floors else "")
            for (dim, layers, _), ratio in ratios.items()
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
    """Both in turn, each with its fastest weights."""
    prompts = torch.randint(1, VOCABULARY, (batch, PROMPT), device=device)
    ours = {name: run for name, run in ours.items() if name not in COMPILED.values() or name == COMPILED[batch]}
    first: dict[str, float] = {}
    tried: list[dict[str, float]] = []
    for side in (ours, theirs):
        for name, run in side.items():
            first[name] = seconds(run, prompts, beams, new if name in COMPILED.values() else 2)
        tried.append({name: min(seconds(run, prompts, beams, TRIED) for _ in range(2)) for name, run in side.items()})
    mine, other = (min(times, key=times.__getitem__) for times in tried)
    repeats = REPEATS if new < 1000 else 1
    pairs = [
        (seconds(ours[mine], prompts, beams, new), seconds(theirs[other], prompts, beams, new)) for _ in range(repeats)
    ]
    best, reference = (batch * new / min(times) for times in zip(*pairs, strict=True))
    return {
        "weights": mine,
        "their_weights": other,
        "tokens_per_second": best,
        "their_tokens_per_second": reference,
        "ratio": best / reference,
        "ratios": [theirs_took / ours_took for ours_took, theirs_took in pairs],
        "tried_seconds": dict(zip(("ours", "theirs"), tried, strict=True)),
        "compiling_seconds": first.get(COMPILED[batch]),
    }


def seconds(run: Generate, prompts: torch.Tensor, beams: int, new: int) -> float:
    """How long it takes from the prompts to the last token."""
    begun = time.perf_counter()
    run(prompts, beams, new)
    return time.perf_counter() - begun


def our_models(dim: int, layers: int, heads: int, device: torch.device) -> dict[str, Generate]:
    """Ours by the form of their weights; the pooling block comes on top of the layers."""
    forms: tuple[str, ...] = ("fp32", "bf16", "int8") if device.type == "cpu" else ("fp32", "bf16")
    found: dict[str, Generate] = {}
    for weights in forms:
        model = our_model(dim, layers, heads, weights)
        found[weights] = our_search(model, steps(model))
    if device.type == "cpu":
        found |= {name: compiled_search(dim, layers, heads, name.split()[0]) for name in COMPILED.values()}
    return found


def our_model(dim: int, layers: int, heads: int, weights: str, *, compiled: bool = False) -> LanguageModel:
    """A model with random weights in this form."""
    model = LanguageModel(ModelConfig(dim=dim, layers=layers, heads=heads, context=1024), VOCABULARY).eval()
    pack(model.to(choose_device("auto")), weights, prepack=not compiled)
    return model


def compiled_search(dim: int, layers: int, heads: int, weights: str) -> Generate:
    """Compiled steps are for one number of rows, so each search has its own."""
    model = our_model(dim, layers, heads, weights, compiled=True)
    searches: dict[tuple[int, int], Generate] = {}

    def run(prompts: torch.Tensor, beams: int, new: int) -> None:
        case = (len(prompts), beams)
        if case not in searches:
            searches[case] = our_search(model, steps(model, compiled=True))
        searches[case](prompts, beams, new)

    return run


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
    """The least time of a token: the bytes of the matrices that it reads, over the bandwidth of reading 512 MB.

    The caches come on top: at most 8 * dim * layers bytes for each token of the text.
    """
    model = LanguageModel(ModelConfig(dim=dim, layers=layers, heads=heads), VOCABULARY)
    read = sum(x.numel() for name, x in model.named_parameters() if x.dim() == 2)  # the output layer is the embedding
    buffer = torch.ones(2**27)
    buffer.sum()
    bandwidth = 4 * len(buffer) / statistics.median(_time(buffer.sum) for _ in range(9))
    sizes = {"fp32": 4, "bf16": 2, "int8": 1}
    return {
        "bytes_per_second": bandwidth,
        "bytes": {weights: size * read for weights, size in sizes.items()},
        "seconds": {weights: size * read / bandwidth for weights, size in sizes.items()},
    }


def _time(run: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun
