"""A measured result as a file: the figures with all that is needed to judge and repeat them."""

import datetime
import json
import os
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from lmtrain.files import write_file
from lmtrain.runtime import machine

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("torch", "tokenizers", "datasets", "safetensors", "pydantic", "typer", "tensorboard", "numpy")


def write_record(name: str, figures: dict[str, Any], device: str = "cpu") -> Path:
    """Write `scripts/results/<name>.json` and return its path.

    `figures` must hold `title` and `result`, a line each, for the README's table.
    """
    record = {
        "command": shlex.join(["python", *sys.argv]),
        "commit": _git("rev-parse", "HEAD")
        + ("+changes" if _git("status", "--porcelain", "lmtrain", "configs") else ""),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "machine": machine(torch.device(device)) | {"load_average": os.getloadavg()[0]},
        "versions": {package: version(package) for package in PACKAGES},
        **figures,
    }
    path = ROOT / "scripts" / "results" / f"{name}.json"
    write_file(path, json.dumps(record, indent=2) + "\n")
    return path


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
