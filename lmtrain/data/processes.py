"""Processes that do the tasks of shards.py, one to a core: threads would take turns at Python's lock.

They receive tasks and answer in lines of JSON. One whose parent was killed ends without a message, at the latest with
the batch of lines that it is encoding; its unfinished shard is made again by the next attempt. (The workers of a
`ProcessPoolExecutor` outlive a killed parent, and its resource tracker then warns of leaked semaphores.)
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
from lmtrain.data.shards import Advance, Task, from_json, perform, to_json
from lmtrain.errors import LmtrainError

_START = "from lmtrain.data.processes import serve; serve()"


def cores() -> int:
    """The processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def perform_all(tasks: Sequence[Task], advance: Advance, processes: int | None = None) -> Iterator[dict[str, Any]]:
    """The results of tasks in their order, by a number of processes (None = one to a core).

    Tasks of little text are done in this process: starting others would take longer, and bpe has threads of its own.
    Raises LmtrainError when a task fails or a process dies; finished shards are kept then.
    """
    processes = min(processes or cores(), len(tasks))
    size = sum(task.piece.end - task.piece.begin for task in tasks)
    if processes <= 1 or size <= 2 * shards.SHARD_BYTES:
        for task in tasks:
            yield perform(task, advance)
        return
    workers = [_start() for _ in range(processes)]
    idle: SimpleQueue[subprocess.Popen[str]] = SimpleQueue()
    for worker in workers:
        idle.put(worker)
    lock = Lock()

    def locked_advance(lines: int) -> None:
        with lock:
            advance(lines)

    def ask(task: Task) -> dict[str, Any]:
        worker = idle.get()
        try:
            return _ask(worker, task, locked_advance)
        finally:
            idle.put(worker)

    pool = ThreadPoolExecutor(processes)
    ahead: deque[Future[dict[str, Any]]] = deque()
    try:
        for task in tasks:
            if len(ahead) == 2 * processes:  # results that the caller has not taken yet would fill the memory
                yield ahead.popleft().result()
            ahead.append(pool.submit(ask, task))
        while ahead:
            yield ahead.popleft().result()
    finally:
        for worker in workers:
            worker.kill()  # idle, or no longer needed
        pool.shutdown(cancel_futures=True)
        for worker in workers:
            worker.communicate()


def serve() -> None:
    """The loop of a worker: a task in each line of stdin; on stdout the lines done so far, then the result."""

    def send(message: dict[str, Any]) -> None:
        try:
            print(json.dumps(message), flush=True)
        except BrokenPipeError:  # the parent was killed
            os._exit(1)

    for line in sys.stdin:
        try:
            send({"result": perform(from_json(line), lambda lines: send({"lines": lines}))})
        except LmtrainError as error:
            send({"error": str(error)})


def _start() -> "subprocess.Popen[str]":
    """Start a worker, which imports this very package and leaves the other cores to the other workers.

    It is in a process group of its own, so that Ctrl-C reaches the parent only, whatever the worker is doing.
    """
    path = os.pathsep.join([str(Path(lmtrain.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": path.rstrip(os.pathsep)}
    command = [sys.executable, "-c", _START]
    return subprocess.Popen(command, stdin=PIPE, stdout=PIPE, env=environment, encoding="utf-8", process_group=0)


def _ask(worker: "subprocess.Popen[str]", task: Task, advance: Advance) -> dict[str, Any]:
    """Have a worker do a task: its result."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    with suppress(BrokenPipeError):
        worker.stdin.write(to_json(task) + "\n")
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
        f"a process that tokenized {task.piece.text} was killed, perhaps for lack of memory: start again, and finished "
        "shards are kept"
    )
