"""Signals that a process sends itself at a chosen moment of its training."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from lmtrain.evaluation.perplexity import Score, evaluate
from lmtrain.system import disk
from lmtrain.training import loop, validation
from lmtrain.training.monitor import Monitor


@contextmanager
def watched(heard: Callable[[str], None]) -> Iterator[None]:
    """Tell of every step, logged point, batch of an evaluation and call to the disk while signals are caught."""

    def told(kind: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
                heard(kind)
            return real(*arguments, **options)

        return call

    def evaluated(*arguments: Any, advance: Callable[[int], object], **options: Any) -> Score:
        return evaluate(*arguments, advance=told("batch", advance), **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(validation, "evaluate", evaluated)
        patch.setattr(loop, "train_step", told("step", loop.train_step))
        patch.setattr(Monitor, "_record", told("log", Monitor._record))
        for name in ("make_folder", "write", "sync", "rename", "remove"):
            patch.setattr(disk, name, told("disk", getattr(disk, name)))
        yield


class Sender:
    """Sends this process a signal when it hears for the n-th time of one kind of moment."""

    def __init__(self, kind: str, count: int, number: int, announcement: str = "") -> None:
        self._kind, self._left, self._number, self._announcement = kind, count, number, announcement
        self._sent = False
        self.after: list[str] = []

    def __call__(self, kind: str) -> None:
        if self._sent:
            self.after.append(kind)
        elif kind == self._kind:
            self._left -= 1
            if self._left == 0:
                if self._announcement:
                    print(self._announcement, file=sys.stderr, flush=True)
                signal.raise_signal(self._number)
                self._sent = True
