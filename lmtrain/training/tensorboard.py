"""TensorBoard event files of a run."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from lmtrain.storage.files import write_error
from lmtrain.training.heatmap import heatmap

CHARTS = {
    ("train", "loss"): "loss/train",
    ("valid", "loss"): "loss/valid",
    ("train", "lr"): "optimizer/learning_rate",
    ("train", "grad_norm"): "optimizer/gradient_norm",
    ("valid", "word_perplexity"): "perplexity/valid",
    ("valid", "bits_per_byte"): "quality/bits_per_byte",
    ("train", "tokens_per_second"): "speed/tokens_per_second",
    ("train", "mfu"): "speed/mfu",
    ("train", "memory_gb"): "speed/memory_gb",
}
"""The metrics that are charted, and their tags. TensorBoard sorts groups by name, so the page opens on the losses."""


class TensorBoard:
    """Writes event files into `folder`, that of the run, for a run that resumes from `step` (0: a new one).

    TensorBoard drops the points that an earlier part of the run wrote after `step`. Raises LmtrainError if it can't
    write.
    """

    def __init__(self, folder: Path, step: int) -> None:
        from torch.utils import tensorboard  # takes seconds to import, so only training does it

        untyped: Any = tensorboard
        self._folder = folder
        with self._naming_folder():
            self._writer = untyped.SummaryWriter(folder, purge_step=step + 1 if step else 0, flush_secs=30)

    def scalars(self, kind: str, metrics: dict[str, float], step: int) -> None:
        """Write the metrics that are charted: of a score one figure, bits per byte where it is given."""
        with self._naming_folder():
            for name, value in metrics.items():
                double = name == "word_perplexity" and "bits_per_byte" in metrics
                if (kind, name) in CHARTS and not double:
                    self._writer.add_scalar(CHARTS[kind, name], value, step)

    def text(self, title: str, text: str, step: int) -> None:
        """Show `text` literally, whatever characters it contains."""
        with self._naming_folder():
            self._writer.add_text(title, _escape(text), step)

    def weights(self, title: str, tokens: list[str], weights: np.ndarray, step: int) -> None:
        """Show attention weights (H heads, T tokens) as an image."""
        with self._naming_folder():
            self._writer.add_image(title, heatmap(tokens, weights), step, dataformats="HWC")

    def flush(self) -> None:
        """Write everything to the files now."""
        with self._naming_folder():
            self._writer.flush()

    def close(self) -> None:
        """Flush and close the files."""
        with self._naming_folder():
            self._writer.close()

    @contextmanager
    def _naming_folder(self) -> Iterator[None]:
        """Name the folder in the error, which comes from TensorBoard's thread and does not."""
        try:
            yield
        except OSError as error:
            raise write_error(self._folder, error) from error


def _escape(text: str) -> str:
    """Markdown that renders as `text`: punctuation as character references, so that none is read as markup or HTML."""
    lines = ("".join(_reference(character) for character in line.strip()) for line in text.splitlines())
    return "  \n".join(lines)


def _reference(character: str) -> str:
    plain = character.isalnum() or character == " " or not character.isascii()
    return character if plain else f"&#{ord(character)};"
