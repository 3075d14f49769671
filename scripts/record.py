"""What the scripts share: running commands, timing, and a result as a file with what is needed to repeat it."""

import datetime
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch

from lmtrain.errors import LmtrainError
from lmtrain.storage.files import write_file
from lmtrain.system.machine import machine

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "scripts" / "results"
PACKAGES = ("torch", "tokenizers", "datasets", "safetensors", "pydantic", "typer", "tensorboard", "numpy")


_running: set[subprocess.Popen[bytes]] = set()
"""The commands of `lmtrain` that run now, in whichever thread."""


def run_script(main: Callable[[], object]) -> None:
    """Run a script's `main`: a user's mistake and Ctrl-C end it as they end lmtrain's commands, without a traceback.

    SIGTERM and SIGUSR1 end it as Ctrl-C does, which the commands that it runs hear of by themselves.
    """

    def pass_on(number: int, _frame: FrameType | None) -> NoReturn:
        for command in list(_running):
            command.send_signal(number)
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, pass_on)
    try:
        main()
    except LmtrainError as error:
        raise SystemExit(f"{Path(sys.argv[0]).name}: {error}") from None
    except subprocess.CalledProcessError as error:  # which has said itself why
        raise SystemExit(error.returncode if error.returncode > 0 else 1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def lmtrain(*arguments: str) -> dict[str, Any]:
    """Run a command, its progress on stderr, and return its JSON. Raises CalledProcessError when it fails."""
    command = [sys.executable, "-m", "lmtrain", *arguments, "--json"]
    running = subprocess.Popen(command, stdout=subprocess.PIPE)
    _running.add(running)
    try:
        printed, _ = running.communicate()
    except KeyboardInterrupt:
        running.wait()  # it saves, as it was asked to; subprocess.run would kill it
        raise
    finally:
        _running.discard(running)
    if running.returncode:
        raise subprocess.CalledProcessError(running.returncode, command)
    result: dict[str, Any] = json.loads(printed)
    return result


def seconds(run: Callable[..., object], *arguments: object) -> float:
    """How long a call takes."""
    begun = time.perf_counter()
    run(*arguments)
    return time.perf_counter() - begun


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
