"""lmtrain: end-to-end language-model training, from a corpus to text out of a trained model.

From Python, `lmtrain.load` returns a trained run, and `lmtrain.train` trains one.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmtrain.api.run import Run, load
    from lmtrain.api.train import train

__version__ = "0.1.0"
__all__ = ["Run", "__version__", "load", "train"]


def __getattr__(name: str) -> Any:
    """The Python interface is imported on first use, because it imports torch, and `lmtrain --help` does without."""
    if name not in __all__:
        raise AttributeError(f"module 'lmtrain' has no attribute {name!r}")
    from lmtrain.api import run, train

    return train.train if name == "train" else getattr(run, name)


def __dir__() -> list[str]:
    """Return the names for completion, with those that `__getattr__` imports."""
    return sorted({*globals(), *__all__})
