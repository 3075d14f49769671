"""Processes that do the tasks of shards.py, one to a core: Python's own lock would let threads take turns.

They are told their tasks, and answer, in lines of JSON. One whose parent was killed ends without a message, at the
latest with the batch of lines that it is encoding; its unfinished shard is made again by the next attempt. (The workers
of a `ProcessPoolExecutor` outlive a killed parent, and its resource tracker then warns of leaked semaphores.)
"""

import json
import os
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from subprocess import PIPE
from threading import Lock
from typing import Any

import lmtrain
from lmtrain.data import shards
from lmtrain.data.shards import Advance, Task, dump, load, perform
from lmtrain.errors import LmtrainError

Worker = subprocess.Popen[str]

_START = "from lmtrain.data.processes import serve; serve()"


def cores() -> int:
    """The processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def perform_all(tasks: Sequence[Task], advance: Advance, processes: int | None = None) -> Iterator[dict[str, Any]]:
    """The results of tasks in their order, by so many processes (None = one to a core).

    Of little text they are done here: to start processes would take longer, and bpe has threads of its own.
    Raises LmtrainError when a task fails or a process dies; the shards that are finished then stay.
    """
    processes = min(processes or cores(), len(tasks))
    size = sum(task.piece.end - task.piece.begin for task in tasks)
    if processes <= 1 or size <= 2 * shards.SHARD_BYTES:
        for task in tasks:
            yield perform(task, advance)
        return
    workers = [_start() for _ in range(processes)]
    idle: SimpleQueue[Worker] = SimpleQueue()
    for worker in workers:
        idle.put(worker)
    one_at_a_time = Lock()

    def ask(task: Task) -> dict[str, Any]:
        worker = idle.get()
        try:
            return _ask(worker, task, told)
        finally:
            idle.put(worker)

    def told(lines: int) -> None:
        with one_at_a_time:
            advance(lines)

    pool = ThreadPoolExecutor(processes)
    ahead: deque[Future[dict[str, Any]]] = deque()
    try:
        for task in tasks:
            if len(ahead) == 2 * processes:  # results that nobody has taken yet would fill the memory
                yield ahead.popleft().result()
            ahead.append(pool.submit(ask, task))
        while ahead:
            yield ahead.popleft().result()
    finally:
        for worker in workers:
            worker.kill()  # at rest by now, or no longer wanted
        pool.shutdown(cancel_futures=True)
        for worker in workers:
            worker.communicate()


def serve() -> None:
    """Be such a process: a task in each line of stdin, and on stdout the lines done so far, then the result."""

    def say(message: dict[str, Any]) -> None:
        try:
            print(json.dumps(message), flush=True)
        except BrokenPipeError:  # the parent was killed
            os._exit(1)

    for line in sys.stdin:
        try:
            say({"result": perform(load(line), lambda lines: say({"lines": lines}))})
        except LmtrainError as error:
            say({"error": str(error)})


def _start() -> Worker:
    """A process that finds this very package, and lets the others have the other cores.

    It is in a process group of its own, so that Ctrl-C reaches the parent only, which decides, at whatever point the
    process is in its start.
    """
    path = os.pathsep.join([str(Path(lmtrain.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": path.rstrip(os.pathsep)}
    command = [sys.executable, "-c", _START]
    return subprocess.Popen(command, stdin=PIPE, stdout=PIPE, env=environment, encoding="utf-8", process_group=0)


def _ask(worker: Worker, task: Task, advance: Advance) -> dict[str, Any]:
    assert worker.stdin is not None
    assert worker.stdout is not None
    with suppress(BrokenPipeError):
        worker.stdin.write(dump(task) + "\n")
        worker.stdin.flush()
    for line in worker.stdout:
        message = json.loads(line)
        if "error" in message:
            raise LmtrainError(message["error"])
        if "result" in message:
            result: dict[str, Any] = message["result"]
            return result
        advance(message["lines"])
    raise LmtrainError(
        f"a process that tokenized {task.piece.text} was ended from outside, perhaps for want of memory: start again, "
        "and finished shards are kept"
    )
