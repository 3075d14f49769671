"""`scripts/benchmark decode`: tokens per second of generating, beside transformers' GPT-2 of that width and depth.

Random weights: the time does not depend on what is generated, and no text ends before its full length. Rows compare
the same precision and heap, and nothing is compiled; on a GPU lmtrain replays its steps as a CUDA graph, as the row
says. The other side is a process of its own:

python scripts/bench_decoding.py SIDE        # as JSON; prints tokens per second of every case
"""

import argparse
import importlib.util
import itertools
import json
import sys
from pathlib import Path

import torch
from bench_training import ONLY_STEPS, SEED, gpt2, random_corpus, recipe_options
from record import Row, lmtrain, measure_beside, run_python, seconds

from lmtrain.system.device import DTYPES, choose_device, choose_precision

PROMPT, REPEATS = 8, 3
CASES = tuple(itertools.product((1, 16), (1, 4)))
"""Prompts at once, and beams (1: greedy)."""


def decoding(arguments: argparse.Namespace, folder: Path) -> tuple[Row, Row]:
    """Metrics and settings of every precision and case."""
    if importlib.util.find_spec("transformers") is None:
        raise SystemExit("this needs transformers: pip install -c constraints.txt -e '.[hf]'")
    device, new = choose_device("auto"), arguments.new_tokens
    options = [*recipe_options(arguments.recipe, folder), f"model.context={PROMPT + new + 1}", "eval.stride=null"]
    options += arguments.overrides
    options += [*random_corpus(folder, arguments.vocab_size), f"run.dir={folder}", "run.name=run"]
    costs = lmtrain("train", *options, "--dry-run")
    one_step = ["train.steps=1", *ONLY_STEPS, "train.compile=false", "train.eval_tokens=100"]
    lmtrain("train", *options, *one_step, "-q")
    model = costs["config"]["model"]
    shape = {name: model[name] for name in ("dim", "layers", "heads")} | {"vocab_size": costs["vocabulary"]}
    rows: list[Row] = []
    for precision in dict.fromkeys(("fp32", choose_precision("auto", device))):
        side = {"precision": precision, "device": device.type, "new_tokens": new, **shape}
        theirs = measure_beside(__file__, side)
        for (prompts, beams), rate in zip(CASES, theirs, strict=True):
            ours = measure_lmtrain(folder, precision, prompts, beams, new)
            form = {"precision": precision, "compiled": False, "cuda_graph": device.type == "cuda", "heap": "retained"}
            rates = {"lmtrain_tokens_per_second": ours, "transformers_tokens_per_second": rate}
            case = {"prompts": prompts, "beams": beams, "new_tokens": new}
            rows.append({**form, **case, **rates, "ratio": ours / rate})
            print(rows[-1], file=sys.stderr)
    metrics = {"parameters": costs["parameters"], "rows": rows}
    return metrics, {"recipe": arguments.recipe, "overrides": arguments.overrides, **shape}


def measure_lmtrain(folder: Path, precision: str, prompts: int, beams: int, new: int) -> float:
    """The best of some batches in one process, by the timings that `lmtrain generate` prints."""
    file = folder / "prompts.txt"
    words = [f"w{index}" for index in range(prompts * REPEATS + PROMPT)]
    file.write_text("".join(" ".join(words[row : row + PROMPT]) + "\n" for row in range(prompts * REPEATS)))
    sizes = ["--batch-size", prompts, "--max-tokens", new, *(["--beams", beams] if beams > 1 else ["--greedy"])]
    command = ["generate", "--run", folder / "run", "--prompts", file, "--precision", precision, *sizes, "--json"]
    printed = run_python(["-m", "lmtrain", *map(str, command)])
    texts = [json.loads(line) for line in printed.splitlines()]
    if {len(text["completions"][0]["ids"]) for text in texts} != {new}:
        raise AssertionError("a text does not have its full length")
    return float(max(text["timings"]["tokens_per_second"] for text in texts))


def measure_transformers(side: Row) -> list[float]:
    """The best of some repeats of `generate` for each case, after one that warms up."""
    importlib.import_module("transformers").logging.set_verbosity_error()
    torch.manual_seed(SEED)
    dtype = DTYPES[side["precision"]]
    new = side["new_tokens"]
    sizes = side | {"context": PROMPT + new}
    model = gpt2(sizes, bos_token_id=0, eos_token_id=None, pad_token_id=0).to(side["device"], dtype).eval()

    @torch.inference_mode()
    def run(prompts: torch.Tensor, beams: int) -> None:
        lengths = {"max_new_tokens": new, "min_new_tokens": new}
        mask = torch.ones_like(prompts)
        texts = model.generate(prompts, attention_mask=mask, do_sample=False, num_beams=beams, **lengths)
        if texts.cpu().shape != (len(prompts), PROMPT + new):  # on the CPU in the end, as lmtrain's texts are
            raise AssertionError("a text does not have its full length")

    rates = []
    for count, beams in CASES:
        prompts = torch.randint(1, side["vocab_size"], (count, PROMPT), device=side["device"])
        times = [seconds(run, prompts, beams) for _ in range(1 + REPEATS)]
        rates.append(count * new / min(times[1:]))
    return rates


if __name__ == "__main__":
    print(json.dumps(measure_transformers(json.loads(sys.argv[1]))))
