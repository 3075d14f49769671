"""What the measuring scripts share: running commands, and a result as a file with what is needed to repeat it."""

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
RESULTS = ROOT / "scripts" / "results"
PACKAGES = ("torch", "tokenizers", "datasets", "safetensors", "pydantic", "typer", "tensorboard", "numpy")


def lmtrain(*arguments: str) -> dict[str, Any]:
    """Run a command, its progress on stderr, and return its JSON. Raises CalledProcessError when it fails."""
    command = [sys.executable, "-m", "lmtrain", *arguments, "--json"]
    result: dict[str, Any] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    return result


def write_record(name: str, figures: dict[str, Any], device: str = "cpu") -> Path:
    """Write `scripts/results/<name>.json` and return its path.

    `figures` must hold `title` and `result`, a line each, for the README's table.
    """
    record = {
        "command": shlex.join(["python", *sys.argv]),
        "commit": (_git("rev-parse", "HEAD") or "unknown")
        + ("+changes" if _git("status", "--porcelain", "lmtrain", "configs") else ""),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "machine": machine(torch.device(device)) | {"load_average": os.getloadavg()[0]},
        "versions": {package: version(package) for package in PACKAGES},
        **figures,
    }
    path = RESULTS / f"{name}.json"
    write_file(path, json.dumps(record, indent=2) + "\n")
    return path


def _git(*arguments: str) -> str:
    """What git says; nothing where there is no git, or no repository that it trusts."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
