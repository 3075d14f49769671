"""From nothing to the first token of a text: how long a new process takes, and where the time goes."""

import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from record import seconds

STARTS = 9
PROMPT = "In 1950 , the"
CHILD = """
import sys, time
marks = [float(sys.argv[1]), time.time()]
from lmtrain.system.allocator import retain_heap
retain_heap()
import torch
marks.append(time.time())
from lmtrain.generation.complete import complete
from lmtrain.generation.options import Options
from lmtrain.model.trained import open_trained, ready_to_generate
from pathlib import Path
marks.append(time.time())
trained = ready_to_generate(open_trained(Path(sys.argv[2]), "best", "auto", "auto"), "auto", compiled=False)
marks.append(time.time())
complete(trained.model, trained.tokenizer, [sys.argv[3]], Options(max_tokens=1), step=trained.take_step)
marks.append(time.time())
assert "torch._dynamo" not in sys.modules
print(*(after - before for before, after in zip(marks, marks[1:])))
"""
PARTS = ("python", "import torch", "import lmtrain", "load the run", "read the prompt, first token")


def first_token(run: Path) -> dict[str, Any]:
    """Medians over new processes, in seconds: the parts, the whole command, and Python importing torch alone.

    The files are in the page cache. Raises CalledProcessError when the run can't be used.
    """
    parts = [_parts(run) for _ in range(STARTS)]
    medians = {name: statistics.median(values) for name, values in zip(PARTS, zip(*parts, strict=True), strict=True)}
    program = str(Path(sys.executable).with_name("lmtrain"))
    command = _median(program, "generate", PROMPT, "--run", str(run), "-n", "1")
    torch_alone = _median(sys.executable, "-c", "import torch")
    return {
        "title": f"from a new process to the first token, median of {STARTS}, model of `{run.name}`",
        "result": f"`lmtrain generate` {command:.2f} s in all, of it "
        + ", ".join(f"{name} {taken:.2f}" for name, taken in medians.items())
        + f"; `python -c 'import torch'` {torch_alone:.2f} s",
        "seed": None,
        "parts_seconds": medians,
        "command_seconds": command,
        "import_torch_seconds": torch_alone,
    }


def _parts(run: Path) -> list[float]:
    command = [sys.executable, "-c", CHILD, str(time.time()), str(run), PROMPT]
    printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return [float(word) for word in printed.split()]


def _median(*command: str) -> float:
    """The median time of the command, from its start to its end."""
    return statistics.median(seconds(subprocess.check_output, command) for _ in range(STARTS))
