#!/usr/bin/env python3
"""What the scripts share: running commands, records, and the pages that are generated from the records.

    python scripts/record.py            # print the pages
    python scripts/record.py --write    # write them: README.md, SPEED.md and SWEEPS.md in scripts/results/

A file in scripts/results/ is a list of records. A record has the keys of `REQUIRED`, and `settings` where a result
depends on any. `metrics` maps names to numbers; its `rows` is a list of such mappings, and nested values other than
`rows` are details that the pages leave out.
"""

import datetime
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from lmtrain.errors import LmtrainError

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "scripts" / "results"
PACKAGES = ("torch", "tokenizers", "datasets", "safetensors", "pydantic", "typer", "tensorboard", "numpy")
REQUIRED = {
    "benchmark": str,
    "date": str,
    "commit": str,
    "command": str,
    "machine": dict,
    "versions": dict,
    "seeds": list,
    "metrics": dict,
}

Record = dict[str, Any]
Row = dict[str, Any]


# Running commands


def run_script(main: Callable[[], object]) -> None:
    """Run a script's `main`. A user error ends it with a message and status 1; Ctrl-C, SIGTERM and SIGUSR1 with 130."""

    def interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, interrupt)
    try:
        main()
    except LmtrainError as error:
        raise SystemExit(f"{Path(sys.argv[0]).name}: {error}") from None
    except subprocess.CalledProcessError as error:  # the command has printed its own message
        raise SystemExit(error.returncode if error.returncode > 0 else 1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def run_python(arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    """Standard output of `python *arguments`. When interrupted, waits until the process has saved and ended.

    Raises CalledProcessError when it fails.
    """
    command = [sys.executable, *arguments]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **(environment or {})})
    try:
        printed, _ = running.communicate()
    except KeyboardInterrupt:
        running.terminate()
        running.wait()
        raise
    if running.returncode:
        raise subprocess.CalledProcessError(running.returncode, command)
    return printed


def lmtrain(*arguments: str | Path) -> dict[str, Any]:
    """The JSON object that a command of lmtrain prints. Raises CalledProcessError when it fails."""
    result: dict[str, Any] = json.loads(run_python(["-m", "lmtrain", *map(str, arguments), "--json"]))
    return result


def last_json(printed: str) -> Any:
    """The JSON in the last line that a program printed; other programs' models print lines of their own before."""
    return json.loads(printed.splitlines()[-1])


def seconds(run: Callable[..., object], *arguments: object) -> float:
    """How long a call takes."""
    start = time.perf_counter()
    run(*arguments)
    return time.perf_counter() - start


# Records


def write_record(
    file: str,
    benchmark: str,
    metrics: dict[str, Any],
    *,
    seeds: Sequence[int],
    settings: dict[str, Any] | None = None,
    device: str = "cpu",
    packages: Sequence[str] = (),
) -> Record:
    """Add a record to `scripts/results/<file>.json`, in place of one of the same command on the same machine."""
    import torch

    from lmtrain.storage.files import write_file
    from lmtrain.system.runtime import machine

    changed = "+changes" if _git("status", "--porcelain", "lmtrain", "configs") else ""
    record = {
        "benchmark": benchmark,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "commit": (_git("rev-parse", "HEAD") or "unknown") + changed,
        "command": shlex.join(["python", *sys.argv]),
        "machine": machine(torch.device(device)) | {"load_average": os.getloadavg()[0]},
        "versions": {package: version(package) for package in (*PACKAGES, *packages)},
        "seeds": list(seeds),
        **({"settings": settings} if settings else {}),
        "metrics": metrics,
    }
    path = RESULTS / f"{file}.json"
    kept = [old for old in read_records(path) if _identity(old) != _identity(record)]
    write_file(path, json.dumps([*kept, record], indent=1) + "\n")
    print(f"{path}: {benchmark}", file=sys.stderr)
    return record


def read_records(path: Path) -> list[Record]:
    """The records of a file; none where there is no file."""
    records: list[Record] = json.loads(path.read_text()) if path.exists() else []
    return records


def _identity(record: Record) -> tuple[object, ...]:
    machine = record["machine"]
    return record["benchmark"], record["command"], machine["processor"], machine["cores"], machine["device"]


def _git(*arguments: str) -> str:
    """What git prints; nothing without git or a repository."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


# Pages

SECTIONS = {
    "recipes": (
        "Recipes",
        "Validation scores of recipes trained by `scripts/reproduce`. `plain` scores each token once, by sliding "
        "windows; the other methods adapt to the text that has been scored, and are another quantity. Rows with the "
        "same number of tokens can be compared.",
    ),
    "peers": (
        "Perplexity beside other programs",
        "Validation word perplexity after the same minutes on the same data, each program by its own source "
        "(`scripts/benchmark peers`). In bf16 where the processor computes in it; word_language_model supports float32 "
        "only. nanoGPT is compiled, word_language_model is not; all have the retained heap. Machines with the same "
        "processor name differed in speed: lmtrain's figure beside 167.4 and 239.2 in 10 minutes is the recipe "
        "`wikitext2-cpu` above, beside the 60 minutes of two threads `wikitext2-cpu-hour` with 74.13, and beside those "
        "of one thread with 86.40.",
    ),
    "benchmarks": (
        "Speed and memory",
        "Measured by `scripts/benchmark`, or by the version of it at the record's commit. A comparison of different "
        "precisions, or of a compiled form with one that is not, says so in its row. In `decode`, each side has the "
        "fastest form of its weights; that lmtrain could compile decoding then, which it no longer does.",
    ),
    "soak": ("Kill and resume", "`scripts/soak`: runs that are killed with SIGKILL at random moments and resumed."),
    "examples": ("Examples", "What the programs of `scripts/examples` print."),
    "sweeps": (
        "Sweeps",
        "One recipe with different overrides at one budget. Small models, most with one or two seeds on one or two "
        "CPU cores: differences within the spread say nothing. Most sweeps ran beside other work, so their tokens/s "
        "are no comparison; `sweep-attention`, `sweep-equal-time` and `sweep-windowed` ran alone. Steps of 6 windows "
        "of 128 tokens are 1.1 passes over the text of these sweeps per hundred: 4,800 are 52 passes. Fields that have "
        "been removed since then appear under their old names.",
    ),
    "tuning": (
        "Settings of adaptive evaluation",
        "The best settings of `lmtrain eval` for each method, found on the first tokens of the validation split "
        "(`tuned_on_tokens`).",
    ),
}
PAGES = {
    "README.md": ("recipes", "tuning", "peers", "soak"),
    "SPEED.md": ("benchmarks", "examples"),
    "SWEEPS.md": ("sweeps",),
}
TITLES = {"README.md": "Records", "SPEED.md": "Records of speed and memory", "SWEEPS.md": "Records of sweeps"}
INTRODUCTION = (
    "Generated by `python scripts/record.py --write` from the JSON files in this folder, which also hold each record's "
    "command, versions, seeds, settings and raw samples. Pages: perplexities ([README.md](README.md)), speed and "
    "memory ([SPEED.md](SPEED.md)), sweeps ([SWEEPS.md](SWEEPS.md)); [LOG.md](LOG.md) says what was tried and did not "
    "help."
)
SHOWN = {
    "recipes": ("method", "tokens", "word_perplexity", "bits_per_byte", "context", "stride", "minutes", "parameters"),
    "sweeps": ("overrides", "word_perplexity", "spread", "tokens_per_second", "parameters"),
}
"""The columns of a file's tables; all where it is not listed."""
ORIGIN = ("machine", "date", "commit")
NOT_SHOWN = ("train.sample_prompts=", "train.eval_", "train.threads=", "train.compile=", "train.max_minutes=null")
"""Overrides of sweeps that hardly change a result: the record has them."""


def page(name: str) -> str:
    """One of `PAGES`, in Markdown."""
    parts = [f"# {TITLES[name]}", INTRODUCTION]
    for file in PAGES[name]:
        heading, text = SECTIONS[file]
        parts.append(f"## {heading}\n\n{text}")
        records = sorted(read_records(RESULTS / f"{file}.json"), key=lambda record: str(record["benchmark"]))
        for benchmark, group in groupby(records, key=lambda record: record["benchmark"]):
            parts += _section(benchmark, list(group), SHOWN.get(file))
    return "\n\n".join(parts) + "\n"


def _section(benchmark: str, records: list[Record], shown: Sequence[str] | None) -> list[str]:
    """A heading, what all rows of the benchmark's records have in common, and a table of the rest."""
    rows = [{**row, **_origin(record)} for record in records for row in _rows(record)]
    keys = [
        key
        for key in dict.fromkeys(key for row in rows for key in row)
        if shown is None or key in shown or key in ORIGIN
    ]
    common = [key for key in keys if len({str(row.get(key)) for row in rows}) == 1 and (len(rows) > 1 or key in ORIGIN)]
    columns = [key for key in keys if key not in common]
    about = [f"{key.replace('_', ' ')} {_cell(rows[0][key])}" for key in common if rows[0].get(key) is not None]
    settings = records[0].get("settings", {})
    if "common" in settings:
        overrides = [change for change in settings["common"] if not change.startswith(NOT_SHOWN)]
        about.insert(0, f"`{settings['recipe']}` with `{' '.join(overrides)}`")
    table = markdown_table(columns, ([row.get(key) for key in columns] for row in rows))
    return [f"### {benchmark}", *(["; ".join(about)] if about else []), table]


def _rows(record: Record) -> Iterable[Row]:
    """The scalars of the metrics, joined by those of each row where there are rows."""
    metrics = record["metrics"]
    scalars = {key: value for key, value in metrics.items() if not isinstance(value, dict | list)}
    return [scalars | row for row in metrics.get("rows", [{}])]


def _origin(record: Record) -> Row:
    machine = record["machine"]
    cores = f"{machine['cores']} core{'s' * (machine['cores'] > 1)}"
    name = f"{machine['processor']}, {cores}" if machine["device"] == "cpu" else machine["device"]
    return {"machine": f"{name}, torch {machine['torch']}", "date": record["date"], "commit": record["commit"][:7]}


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table in Markdown."""
    lines = [[column.replace("_", " ") for column in columns], ["---"] * len(columns)]
    lines += [[_cell(value) for value in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Any) -> str:
    match value:
        case None:
            return ""
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:.4g}" if abs(value) < 10 else f"{value:,.2f}" if abs(value) < 1000 else f"{value:,.0f}"
        case int():
            return f"{value:,}"
        case list():
            return f"`{' '.join(map(str, value))}`" if value else "nothing"
        case _:
            return str(value)


def main() -> None:
    for name in PAGES:
        if sys.argv[1:] == ["--write"]:
            (RESULTS / name).write_text(page(name))
        else:
            print(page(name))


if __name__ == "__main__":
    main()
