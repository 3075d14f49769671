"""The one file-writing protocol: folders that are whole or absent, with a manifest that names every byte in them.

A folder (corpus, token store, checkpoint) is written under a temporary name beside its target, every file and the
folder itself are flushed to disk, and only then it is renamed. A reader that finds the folder finds all of it.
"""

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lmtrain.errors import LmtrainError

MANIFEST = "manifest.json"
_TEMPORARY = ".tmp-"
_BLOCK = 1 << 20


def sha256_bytes(data: bytes) -> str:
    """SHA-256 of `data`, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: Path) -> str:
    """SHA-256 of the file's content, in hexadecimal, read in blocks."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def sync(path: Path) -> None:
    """Flush a file or a folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_file(path: Path, data: bytes | str) -> None:
    """Replace `path` by `data` at once: readers see the old content or the new, never a part.

    Raises LmtrainError where the disk is full or the place can't be written.
    """
    temporary = path.with_name(f"{_TEMPORARY}{path.name}-{uuid.uuid4().hex[:8]}")
    try:
        temporary.write_bytes(data.encode() if isinstance(data, str) else data)
        sync(temporary)
        temporary.replace(path)
        sync(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise write_error(path, error) from error


def write_error(path: Path, error: OSError) -> LmtrainError:
    """The sentence for a write that failed, with its remedy."""
    return LmtrainError(
        f"can't write {path}: {error.strerror or error}. Free some space or choose a folder that you may write to; "
        "what was there before is unharmed"
    )


@contextmanager
def new_folder(path: Path, kind: str, info: dict[str, Any]) -> Iterator[Path]:
    """Write a folder that appears at `path` whole or not at all.

    Yields a temporary folder beside `path` to write into. When the block ends well, the manifest (format `kind`, the
    entries of `info`, which the block may still extend, and the size and sha256 of every file) is added, everything is
    flushed and the folder takes its name, in place of an older one. When the block raises, nothing is left behind.

    Raises LmtrainError where the disk is full or the place can't be written.
    """
    temporary = path.with_name(f"{_TEMPORARY}{path.name}-{uuid.uuid4().hex[:8]}")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        files = {str(file.relative_to(temporary)): file for file in sorted(temporary.rglob("*")) if file.is_file()}
        entries = {name: {"bytes": file.stat().st_size, "sha256": sha256_file(file)} for name, file in files.items()}
        manifest = {"format": kind, **info, "files": entries}
        (temporary / MANIFEST).write_text(json.dumps(manifest, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        for file in [*files.values(), temporary / MANIFEST]:
            sync(file)
        sync(temporary)
        _take_place(temporary, path)
    except OSError as error:
        raise write_error(path, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _take_place(temporary: Path, path: Path) -> None:
    """Rename `temporary` to `path`; a folder already there steps aside first and is deleted after."""
    older = path.with_name(f"{_TEMPORARY}{path.name}-old-{uuid.uuid4().hex[:8]}")
    if path.exists():
        path.rename(older)
    temporary.rename(path)
    sync(path.parent)
    shutil.rmtree(older, ignore_errors=True)


def clear_temporary(parent: Path) -> None:
    """Delete what a killed process left half-written in `parent`."""
    for leftover in parent.glob(f"{_TEMPORARY}*"):
        if leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)


def read_manifest(folder: Path, kind: str) -> dict[str, Any]:
    """The manifest of `folder`, which must be of format `kind`; the sizes of its files are checked, not their content.

    The size check is what keeps a memory-mapped reader from a bus error on a truncated file.
    Raises LmtrainError when the folder or a file in it is missing, foreign, or of another size.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
    except FileNotFoundError:
        raise LmtrainError(f"{folder} has no {MANIFEST}: it is not a folder that lmtrain wrote") from None
    except (OSError, ValueError, RecursionError) as error:
        raise LmtrainError(f"{folder / MANIFEST} can't be read ({error}): delete {folder} and make it again") from error
    if not isinstance(manifest, dict) or manifest.get("format") != kind:
        found = manifest.get("format") if isinstance(manifest, dict) else type(manifest).__name__
        raise LmtrainError(f"{folder} has format {found!r} where {kind!r} is needed")
    files = manifest.get("files")
    if not isinstance(files, dict) or not all(
        isinstance(entry, dict) and isinstance(entry.get("bytes"), int) and isinstance(entry.get("sha256"), str)
        for entry in files.values()
    ):
        raise LmtrainError(f"{folder / MANIFEST} is damaged: delete {folder} and make it again")
    for name, entry in files.items():
        file = folder / name
        if not file.is_file() or file.stat().st_size != entry["bytes"]:
            raise LmtrainError(f"{file} is missing or truncated: delete {folder} and make it again")
    return manifest


def verify(folder: Path, manifest: dict[str, Any]) -> None:
    """Check the content of every file that `manifest` lists against its sha256.

    Raises LmtrainError naming the first file that differs or can't be read.
    """
    for name, entry in manifest["files"].items():
        try:
            found = sha256_file(folder / name)
        except OSError as error:
            raise LmtrainError(f"{folder / name} can't be read: {error.strerror or error}") from error
        if found != entry["sha256"]:
            raise LmtrainError(f"{folder / name} is damaged or was changed: delete {folder} and make it again")
