"""Child processes that download: the hub's libraries read their environment when they are first imported.

The children wait for nothing: the pauses between the hub client's own retries are taken out.
"""

import io
import os
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq

from lmtrain.config.schema import DataConfig
from lmtrain.data.corpus import download
from lmtrain.errors import LmtrainError

TOKEN = "hf_canaryTOKEN"
COMMIT = "1" * 40


def parquet(rows: list[str], column: str = "text") -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table({"id": range(len(rows)), column: rows}), file, compression="none", use_dictionary=False)
    return file.getvalue()


PLAIN = {
    f"data/{split}-00000-of-00001.parquet": parquet([f"{split} row {number}\nsecond line" for number in range(1_500)])
    for split in ("train", "validation", "test")
}


def prepare(environment: dict[str, str]) -> None:
    """Start a child: the environment, which the hub's libraries read when imported, and no pauses."""
    os.environ.update(environment)
    patch("time.sleep").start()


def fill(source: str, files: list[str], revision: str) -> str:
    """In a child: have the hub's own client put some files of a data set in the cache, and in what folder."""
    from huggingface_hub import snapshot_download

    return snapshot_download(source, repo_type="dataset", revision=revision, allow_patterns=files)


def convert(source: str, subset: str) -> None:
    """In a child: read a data set as `datasets` does, which keeps it in Arrow."""
    import datasets

    datasets.load_dataset(source, subset)


def attempt(fields: dict[str, Any], force: bool) -> tuple[dict[str, Any] | None, str, str]:
    """In a child: the manifest that a download gives, or the sentence that it fails with; and what stderr had."""
    with redirect_stderr(io.StringIO()) as stderr:
        try:
            manifest, sentence = download(DataConfig(**fields), force=force).manifest, ""
        except LmtrainError as error:
            manifest, sentence = None, str(error)
    return manifest, sentence, stderr.getvalue()


@dataclass
class Client:
    """Asks a child to download into `dir`."""

    pool: ProcessPoolExecutor
    dir: Path

    def manifest(self, source: str, *, force: bool = False, **fields: Any) -> dict[str, Any]:
        manifest, sentence = self._ask(source, force, fields)
        assert manifest is not None, sentence
        return manifest

    def sentence(self, source: str, *, force: bool = False, **fields: Any) -> str:
        manifest, sentence = self._ask(source, force, fields)
        assert manifest is None
        assert "\n" not in sentence
        assert TOKEN not in sentence
        assert "://" not in sentence
        folders = self.dir.iterdir() if self.dir.exists() else []
        assert not [folder for folder in folders if folder.name.startswith(".tmp-")]
        return sentence

    def fill(self, source: str, *files: str, revision: str = "main") -> Path:
        """Have files in the cache that lmtrain hasn't downloaded; returns their folder."""
        return Path(self.pool.submit(fill, source, list(files), revision).result())

    def attempt(self, source: str) -> None:
        """Download, or be refused."""
        self._ask(source, False, {})

    def _ask(self, source: str, force: bool, fields: dict[str, Any]) -> tuple[dict[str, Any] | None, str]:
        future = self.pool.submit(attempt, {"source": source, "dir": self.dir, **fields}, force)
        manifest, sentence, stderr = future.result()
        assert stderr == ""
        return manifest, sentence
