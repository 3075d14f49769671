"""What the scripts share: running commands, and records.

A file in scripts/results/ is a list of records. A record has the keys that `write_record` writes, and `settings` where
a result depends on any. `metrics` maps names to numbers; its `rows` is a list of such mappings, and nested values other
than `rows` are details that the pages leave out.
"""

import datetime
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lmtrain.errors import LmtrainError

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "scripts" / "results"
PACKAGES = ("torch", "tokenizers", "safetensors", "pydantic", "typer", "tensorboard", "numpy", "transformers")
RETAINED_HEAP = {
    "THP_MEM_ALLOC_ENABLE": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1),
    "MALLOC_TOP_PAD_": str(64 << 20),
}
"""What lmtrain sets for itself on glibc, as an environment, so that other programs have it too."""

Record = dict[str, Any]
Row = dict[str, Any]


# Running commands


def run_script(main: Callable[[], object]) -> None:
    """Run a script's `main`. A user error ends it with a message and status 1, Ctrl-C with 130."""
    try:
        main()
    except LmtrainError as error:
        raise SystemExit(f"{Path(sys.argv[0]).name}: {error}") from None
    except subprocess.CalledProcessError as error:  # the command has printed its own message
        raise SystemExit(error.returncode if error.returncode > 0 else 1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def run_python(arguments: Sequence[str]) -> str:
    """Standard output of `python *arguments`, with `RETAINED_HEAP`. Raises CalledProcessError when it fails."""
    environment = os.environ | RETAINED_HEAP
    return subprocess.run(
        [sys.executable, *arguments], stdout=subprocess.PIPE, text=True, env=environment, check=True
    ).stdout


def lmtrain(*arguments: str | Path) -> dict[str, Any]:
    """The JSON object that a command of lmtrain prints. Raises CalledProcessError when it fails."""
    return json.loads(run_python(["-m", "lmtrain", *map(str, arguments), "--json"]))


def train_points(run: str | Path) -> list[Row]:
    """What a run has logged of its steps, oldest first."""
    lines = (Path(run) / "metrics.jsonl").read_text().splitlines()
    return [point for point in map(json.loads, lines) if point["kind"] == "train"]


def measure_beside(script: str, side: Row) -> Any:
    """The JSON in the last line that `python script SIDE` prints: another program's model prints lines of its own."""
    return json.loads(run_python([script, json.dumps(side)]).splitlines()[-1])


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
) -> None:
    """Add a record to `scripts/results/<file>.json`, in place of one of the same command on the same machine.

    `device` is what `train.device` may be.
    """
    from lmtrain.storage.files import write_file
    from lmtrain.system.device import choose_device
    from lmtrain.system.machine import machine

    record = {
        "benchmark": benchmark,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "commit": COMMIT,
        "command": shlex.join(["python", os.path.relpath(sys.argv[0], ROOT), *sys.argv[1:]]),
        "machine": machine(choose_device(device)) | {"load_average": os.getloadavg()[0]},
        "versions": {package: version(package) for package in PACKAGES if find_spec(package)},
        "seeds": list(seeds),
        **({"settings": settings} if settings else {}),
        "metrics": metrics,
    }
    path = RESULTS / f"{file}.json"
    kept = [old for old in read_records(path) if _identity(old) != _identity(record)]
    write_file(path, json.dumps([*kept, record], indent=1) + "\n")
    print(f"{path}: {benchmark}", file=sys.stderr)


def read_records(path: Path) -> list[Record]:
    """The records of a file; none where there is no file."""
    return json.loads(path.read_text()) if path.exists() else []


def _identity(record: Record) -> tuple[object, ...]:
    machine = record["machine"]
    return record["benchmark"], record["command"], machine["processor"], machine["cores"], machine["device"]


def find_commit() -> str:
    """The commit of the repository, and whether files that matter differ from it."""
    changed = "+changes" if _git("status", "--porcelain", "lmtrain", "configs", "scripts", ":!scripts/results") else ""
    return (_git("rev-parse", "HEAD") or "unknown") + changed


def _git(*arguments: str) -> str:
    """What git prints; nothing without git or a repository."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


COMMIT = find_commit()
"""When the script started: others may be made while it runs."""
