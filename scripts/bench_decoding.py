"""`scripts/benchmark decode`: tokens per second of generating, beside transformers' GPT-2 of that width and depth.

Random weights: the time does not depend on what is generated, and no text ends before its full length. Rows compare
the same precision and heap, and nothing is compiled; on a GPU lmtrain replays its steps as a CUDA graph, as the row
says. The two take turns, each time as a new process, and the best of its turns counts, since the speed of a machine may
change from minute to minute. The other side is:

python scripts/bench_decoding.py SIDE        # as JSON; prints tokens per second
"""

import argparse
import importlib
import itertools
import json
import sys
from pathlib import Path

import torch
from bench_training import ONLY_STEPS, SEED, gpt2, on_random_words
from record import Row, lmtrain, measure_beside, run_python, seconds, write_record

from lmtrain.system.device import DTYPES, choose_device, choose_precision

PROMPT, NEW, REPEATS, TURNS = 8, 128, 3, 3
CASES = tuple(itertools.product((1, 16), (1, 4)))
"""Prompts at once, and beams (1: greedy)."""


def decoding(arguments: argparse.Namespace, folder: Path) -> None:
    """Record every precision and case."""
    device = choose_device("auto")
    options = [f"model.context={PROMPT + NEW + 1}", "eval.stride=null", *on_random_words(arguments, folder)]
    options += [f"run.dir={folder}", "run.name=run"]
    costs = lmtrain("train", *options, "--dry-run")
    one_step = ["train.steps=1", *ONLY_STEPS, "train.compile=false", "train.eval_tokens=100"]
    lmtrain("train", *options, *one_step, "-q")
    model = costs["config"]["model"]
    shape = {name: model[name] for name in ("dim", "layers", "heads")} | {"vocab_size": costs["vocabulary"]}
    rows: list[Row] = []
    for precision in dict.fromkeys(("fp32", choose_precision("auto", device))):
        for prompts, beams in CASES:
            case = {"prompts": prompts, "beams": beams}
            side = {"precision": precision, "device": device.type, **shape, **case}
            turns = [
                (measure_lmtrain(folder, precision, prompts, beams), measure_beside(__file__, side))
                for _ in range(TURNS)
            ]
            ours, theirs = (max(rates) for rates in zip(*turns, strict=True))
            form = {"precision": precision, "compiled": False, "cuda_graph": device.type == "cuda", "heap": "retained"}
            rates = {"lmtrain_tokens_per_second": ours, "transformers_tokens_per_second": theirs}
            rows.append({**form, **case, "new_tokens": NEW, **rates, "ratio": ours / theirs})
            print(rows[-1], file=sys.stderr)
    metrics = {"parameters": costs["parameters"], "rows": rows}
    settings = {"recipe": arguments.recipe, "overrides": arguments.overrides, **shape}
    write_record("benchmarks", "decode", metrics, seeds=[SEED], settings=settings, device=device.type)


def measure_lmtrain(folder: Path, precision: str, prompts: int, beams: int) -> float:
    """The best of some batches in one process, by the timings that `lmtrain generate` prints."""
    file = folder / "prompts.txt"
    words = [f"w{index}" for index in range(prompts * REPEATS + PROMPT)]
    file.write_text("".join(" ".join(words[row : row + PROMPT]) + "\n" for row in range(prompts * REPEATS)))
    sizes = ["--batch-size", prompts, "--max-tokens", NEW, *(["--beams", beams] if beams > 1 else ["--greedy"])]
    command = ["generate", "--run", folder / "run", "--prompts", file, "--precision", precision, *sizes, "--json"]
    printed = run_python(["-m", "lmtrain", *map(str, command)])
    texts = [json.loads(line) for line in printed.splitlines()]
    if {len(text["completions"][0]["ids"]) for text in texts} != {NEW}:
        raise AssertionError("a text does not have its full length")
    return float(max(text["timings"]["tokens_per_second"] for text in texts))


def measure_transformers(side: Row) -> float:
    """The best of some repeats of `generate`, after one that warms up."""
    importlib.import_module("transformers").logging.set_verbosity_error()
    torch.manual_seed(SEED)
    dtype = DTYPES[side["precision"]]
    sizes = side | {"context": PROMPT + NEW}
    model = gpt2(sizes, bos_token_id=0, eos_token_id=None, pad_token_id=0).to(side["device"], dtype).eval()

    prompts = torch.randint(1, side["vocab_size"], (side["prompts"], PROMPT), device=side["device"])

    @torch.inference_mode()
    def run() -> None:
        lengths = {"max_new_tokens": NEW, "min_new_tokens": NEW}
        mask = torch.ones_like(prompts)
        texts = model.generate(prompts, attention_mask=mask, do_sample=False, num_beams=side["beams"], **lengths)
        if texts.cpu().shape != (len(prompts), PROMPT + NEW):  # on the CPU in the end, as lmtrain's texts are
            raise AssertionError("a text does not have its full length")

    times = [seconds(run) for _ in range(1 + REPEATS)]
    return len(prompts) * NEW / min(times[1:])


if __name__ == "__main__":
    print(json.dumps(measure_transformers(json.loads(sys.argv[1]))))
