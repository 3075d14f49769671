"""The one file-writing protocol: folders that are whole or absent, with a manifest that names every byte in them.

A folder (corpus, token store, checkpoint) is written under a temporary name beside its target, every file and the
folder itself are flushed to disk, and only then it is renamed. A reader that finds the folder finds all of it.
"""

import errno
import fcntl
import hashlib
import json
import os
import re
import stat
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lmtrain.errors import LmtrainError, UnreadableError
from lmtrain.system import disk

MANIFEST = "manifest.json"
_SEAL = "sha256"
_TEMPORARY = ".tmp-"
_ASIDE = "~old"
_OURS = re.compile(rf"{re.escape(_TEMPORARY)}(.+?)({_ASIDE})?-[0-9a-f]{{8}}", re.DOTALL)
"""A name that `_temporary` or `_take_place` gave."""
_BLOCK = 1 << 20
_LONGEST_NAME = 255
_NO_FILE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EINVAL, errno.ELOOP, errno.ENAMETOOLONG, None)
"""What the system says where a file is missing or something else has its name."""


def sha256_bytes(*data: bytes | memoryview) -> str:
    """SHA-256 of `data`, one part after the other, in hexadecimal."""
    digest = hashlib.sha256()
    for part in data:
        digest.update(part)
    return digest.hexdigest()


def sha256_file(path: Path) -> str:
    """SHA-256 of the file's content, in hexadecimal, read in blocks. Raises OSError where it is no regular file."""
    disk.check_regular(path)
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def write_file(path: Path, data: bytes | str) -> None:
    """Replace `path` by `data` at once: readers see the old content or the new, never a part.

    Raises LmtrainError where the disk is full or the place can't be written.
    """
    temporary = _temporary(path)
    try:
        disk.write(temporary, data.encode() if isinstance(data, str) else data)
        disk.sync(temporary)
        disk.rename(temporary, path)
        disk.sync(path.parent)
    except OSError as error:
        disk.remove(temporary)
        raise write_error(path, error) from error


def make_folders(path: Path) -> None:
    """Make a folder and those above it that are missing, durably. Raises LmtrainError where that can't be done."""
    with writing(path):
        for folder in [*reversed(path.parents), path]:
            if not folder.is_dir():
                _make_folder(folder)


def _make_folder(folder: Path) -> None:
    try:
        disk.make_folder(folder)
    except FileExistsError:
        if not folder.is_dir():  # else another process was quicker
            raise
    disk.sync(folder.parent)


def write_error(path: Path, error: OSError) -> LmtrainError:
    """The sentence for a write that failed, with its remedy."""
    return LmtrainError(
        f"can't write {path}: {error.strerror or error}. Free some space or choose a folder that you may write to; "
        "what was there before is unharmed"
    )


def read_error(path: Path, error: OSError) -> LmtrainError:
    """The sentence for a read that failed: UnreadableError unless the file is missing or is no file."""
    if error.errno in _NO_FILE:
        return LmtrainError(f"{path} can't be read: {error.strerror or error}")
    return UnreadableError(f"{path} can't be read: {error.strerror}. Make it readable; nothing was changed")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what the system says when `path` can't be written into LmtrainError."""
    try:
        yield
    except OSError as error:
        raise write_error(path, error) from error


@contextmanager
def new_folder(
    path: Path, kind: str, info: dict[str, Any], hashes: Mapping[str, str] = MappingProxyType({})
) -> Iterator[Path]:
    """Write a folder that appears at `path` whole or not at all.

    Yields a temporary folder beside `path` to write into. When the block ends well, the manifest (format `kind`, the
    entries of `info`, which the block may still extend, the size and sha256 of every file, and a sha256 of all this) is
    added, everything is flushed and the folder takes its name, in place of an older one. When the block raises, nothing
    is left behind. A file is not read again whose sha256 the block has put into `hashes`, as of what it wrote.

    Raises LmtrainError where the disk is full or the place can't be written.
    """
    temporary = _temporary(path)
    held: int | None = None
    try:
        make_folders(path.parent)
        with alone_in(path.parent):
            disk.make_folder(temporary)
            held = _lock(temporary, fcntl.LOCK_EX)  # while this process lives, `recover` leaves the folder alone
        yield temporary
        files = {str(file.relative_to(temporary)): file for file in sorted(temporary.rglob("*")) if file.is_file()}
        entries = {
            name: {"bytes": file.stat().st_size, "sha256": hashes.get(name) or sha256_file(file)}
            for name, file in files.items()
        }
        manifest = {"format": kind, **info, "files": entries}
        manifest[_SEAL] = _content_hash(manifest)
        disk.write(temporary / MANIFEST, (json.dumps(manifest, indent=2, ensure_ascii=False) + "\n").encode())
        for file in [*files.values(), temporary / MANIFEST]:
            disk.sync(file)
        disk.sync(temporary)
        with alone_in(path.parent):
            _take_place(temporary, path)
    except OSError as error:
        raise write_error(path, error) from error
    finally:
        if held is not None:
            os.close(held)
        if temporary.exists():
            disk.remove(temporary)


def remove_folder(path: Path) -> None:
    """Delete a folder that readers may be looking for: it loses its name at once, and its content after that."""
    doomed = _temporary(path)
    with writing(path):
        disk.rename(path, doomed)
    disk.remove(doomed)


def _temporary(path: Path) -> Path:
    return path.with_name(f"{_TEMPORARY}{path.name}-{uuid.uuid4().hex[:8]}")


def _take_place(temporary: Path, path: Path) -> None:
    """Rename `temporary` to `path`; a folder already there steps aside first and is deleted after.

    Between the two renames nothing has the name; `recover` gives it back to the folder that stepped aside.
    """
    older = path.with_name(f"{_TEMPORARY}{path.name}{_ASIDE}-{uuid.uuid4().hex[:8]}")
    replaces = path.exists()
    if replaces:
        disk.rename(path, older)
    try:
        disk.rename(temporary, path)
    except OSError:
        if replaces:
            disk.rename(older, path)
        raise
    disk.sync(path.parent)
    if replaces:
        disk.remove(older)


def recover(parent: Path) -> None:
    """Put in order what a killed process left in `parent`, where others may be writing folders, but no single files.

    Half-written files and folders are deleted; a folder that had stepped aside for one that never came is put back.
    Nothing else is touched, whatever it is called.
    """
    with alone_in(parent):
        for leftover in sorted(parent.glob(f"{_TEMPORARY}*")):
            name = _OURS.fullmatch(leftover.name)
            if name is None:
                continue
            if name[2] and not (parent / name[1]).exists():
                with writing(parent / name[1]):
                    disk.rename(leftover, parent / name[1])
                    disk.sync(parent)
            elif not (leftover.is_dir() and _is_locked(leftover)):
                disk.remove(leftover)


def is_temporary(name: str) -> bool:
    """Whether `recover` would delete or rename a file or folder of this name."""
    return _OURS.fullmatch(name) is not None


@contextmanager
def alone_in(parent: Path) -> Iterator[None]:
    """Let no other process make, replace or put in order a folder in `parent` meanwhile, where locks are to be had."""
    held = _lock(parent, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if held is not None:
            os.close(held)


def _is_locked(folder: Path) -> bool:
    held = _lock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    if held is not None:
        os.close(held)
    return held is None


def _lock(folder: Path, operation: int) -> int | None:
    """Lock a folder until what is returned is closed, or the process ends; None where that can't be had."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, operation)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def read_manifest(folder: Path, kind: str) -> dict[str, Any]:
    """The manifest of `folder`, which must be of format `kind`; the sizes of its files are checked, not their content.

    The size check is what keeps a memory-mapped reader from a bus error on a truncated file.
    Raises LmtrainError when the folder or a file in it is missing, foreign, or of another size, and UnreadableError
    where the system does not let it be read.
    """
    manifest = parse_manifest(folder, kind)
    for name, entry in manifest["files"].items():
        if _size(folder / name) != entry["bytes"]:
            raise LmtrainError(f"{folder / name} is missing or truncated: delete {folder} and make it again")
    return manifest


def parse_manifest(folder: Path, kind: str) -> dict[str, Any]:
    """The manifest as `read_manifest` has it, whatever has become of the files that it names.

    Its own sha256 is checked and taken off; one that was written before manifests had it is taken as it is.
    """
    try:
        disk.check_regular(folder / MANIFEST)
        manifest = json.loads((folder / MANIFEST).read_bytes())
        seal = manifest.pop(_SEAL, None) if isinstance(manifest, dict) else None
        changed = seal is not None and seal != _content_hash(manifest)
    except OSError as error:
        if error.errno in _NO_FILE:
            raise LmtrainError(f"{folder} has no {MANIFEST}: it is not a folder that lmtrain wrote") from error
        raise read_error(folder / MANIFEST, error) from error
    except (ValueError, RecursionError) as error:
        raise LmtrainError(f"{folder / MANIFEST} can't be read ({error}): delete {folder} and make it again") from error
    if not isinstance(manifest, dict) or manifest.get("format") != kind:
        found = manifest.get("format") if isinstance(manifest, dict) else type(manifest).__name__
        raise LmtrainError(f"{folder} has format {str(found)[:99]!r} where {kind!r} is needed")
    files = manifest.get("files")
    if not isinstance(files, dict) or not all(
        isinstance(entry, dict) and isinstance(entry.get("bytes"), int) and isinstance(entry.get("sha256"), str)
        for entry in files.values()
    ):
        raise LmtrainError(f"{folder / MANIFEST} is damaged: delete {folder} and make it again")
    for name in files:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise LmtrainError(f"{folder / MANIFEST} names {name[:99]!r}, which lies outside of {folder}")
        if not name.isprintable() or len(name) > _LONGEST_NAME:
            raise LmtrainError(f"{folder / MANIFEST} names {name[:99]!r}, which can be no file of lmtrain's")
    if changed:
        raise LmtrainError(f"{folder / MANIFEST} is damaged or was changed: delete {folder} and make it again")
    return manifest


def _content_hash(manifest: dict[str, Any]) -> str:
    """SHA-256 of a manifest's entries, in their order."""
    return sha256_bytes(json.dumps(manifest).encode())


def _size(file: Path) -> int | None:
    """The size of a regular file; None where there is none, or can be none under such a name."""
    try:
        status = file.stat()
    except OSError as error:
        if error.errno in _NO_FILE:
            return None
        raise read_error(file, error) from error
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def verify(folder: Path, manifest: dict[str, Any], sha256: Callable[[Path], str] = sha256_file) -> None:
    """Check the content of every file that `manifest` lists against its sha256.

    Raises LmtrainError naming the first file that differs or can't be read.
    """
    for name, entry in manifest["files"].items():
        try:
            found = sha256(folder / name)
        except OSError as error:
            raise read_error(folder / name, error) from error
        if found != entry["sha256"]:
            raise LmtrainError(f"{folder / name} is damaged or was changed: delete {folder} and make it again")
