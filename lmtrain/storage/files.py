"""How files and folders are written: atomically, so that they are complete or absent, with a manifest of hashes.

A folder (corpus, token store, checkpoint) is written under a temporary name beside its target; every file and the
folder itself are flushed to disk; only then is it renamed. A reader that finds the folder finds all of it.
"""

import errno
import fcntl
import hashlib
import json
import os
import re
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from lmtrain.errors import LmtrainError, UnreadableError
from lmtrain.system import disk

MANIFEST = "manifest.json"
_SEAL = "sha256"
_MAY_LACK_SEAL = "lmtrain-checkpoint/1"
"""The format whose first manifests had no hash of themselves."""
_TEMPORARY = ".tmp-"
_OLD = "~old"
TEMPORARY_NAME = re.compile(rf"{re.escape(_TEMPORARY)}(.+?)({_OLD})?-[0-9a-f]{{8}}", re.DOTALL)
"""A name that `_temporary` returned."""
_NO_FILE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EINVAL, errno.ELOOP, errno.ENAMETOOLONG, None)
"""The system's errors for a file that is missing or is not a file."""


def sha256_bytes(*data: bytes | memoryview) -> str:
    """Return the SHA-256 of the concatenation of `data`, in hexadecimal."""
    digest = hashlib.sha256()
    for part in data:
        digest.update(part)
    return digest.hexdigest()


def sha256_file(path: Path) -> str:
    """Return the SHA-256 of the content of a file, in hexadecimal. Raises LmtrainError if it can't be read."""
    with read_errors(path):
        disk.check_regular(path)
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()


def write_file(path: Path, data: bytes | str) -> None:
    """Replace the content of `path` atomically: readers see the old content or the new, never a part.

    Raises LmtrainError if the disk is full or `path` can't be written.
    """
    temporary = _temporary(path)
    with write_errors(path):
        try:
            disk.write(temporary, data.encode() if isinstance(data, str) else data)
            disk.sync(temporary)
            disk.rename(temporary, path)
            disk.sync(path.parent)
        except OSError:
            disk.remove(temporary)
            raise


def make_folders(path: Path) -> None:
    """Make a folder and its missing parents, and flush them to disk. Raises LmtrainError if that fails."""
    with write_errors(path):
        for folder in [*reversed(path.parents), path]:
            if not folder.is_dir():
                disk.make_folder(folder)
                disk.sync(folder.parent)


@contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Turn an OSError of writing `path` into LmtrainError with a remedy."""
    try:
        yield
    except OSError as error:
        raise LmtrainError(
            f"can't write {path}: {error.strerror or error}. Free some space or choose a folder that you may write to; "
            "existing files are unchanged"
        ) from error


@contextmanager
def read_errors(path: Path) -> Iterator[None]:
    """Turn an error of reading `path` into LmtrainError, or UnreadableError if the system denies it."""
    try:
        yield
    except ValueError as error:
        raise LmtrainError(f"{path} is damaged: {error}") from error
    except OSError as error:
        if error.errno in _NO_FILE:
            raise LmtrainError(f"{path} can't be read: {error.strerror or error}") from error
        message = f"{path} can't be read: {error.strerror}. Make it readable"
        raise UnreadableError(message) from error


@contextmanager
def new_folder(path: Path, folder_format: str, info: dict[str, Any], hashes: Mapping[str, str] = {}) -> Iterator[Path]:
    """Write a folder that appears at `path` complete or not at all.

    Yields a temporary folder beside `path` to write into. When the block ends, the manifest is added: `folder_format`,
    the entries of `info`, which the block may extend, the size and SHA-256 of every file, and a SHA-256 of all this.
    Then everything is flushed to disk and the folder is renamed. It replaces an older one, except an undamaged one of
    the same content, which another process may have just made and be reading. If the block raises, nothing is left.
    The block may put the hashes of files that it wrote into `hashes`, so that those files are not read again.

    Raises LmtrainError if the disk is full or `path` can't be written.
    """
    temporary = _temporary(path)
    try:
        with write_errors(path), ExitStack() as stack:
            make_folders(path.parent)
            with folder_lock(path.parent):
                disk.make_folder(temporary)
                stack.enter_context(folder_lock(temporary))  # `recover` deletes only folders that are not locked
            yield temporary
            files = sorted(temporary.iterdir())
            entries = {
                file.name: {"bytes": file.stat().st_size, "sha256": hashes.get(file.name) or sha256_file(file)}
                for file in files
            }
            manifest = {"format": folder_format, **info, "files": entries}
            manifest[_SEAL] = _content_hash(manifest)
            disk.write(temporary / MANIFEST, (json.dumps(manifest, indent=2, ensure_ascii=False) + "\n").encode())
            for file in [*files, temporary / MANIFEST]:
                disk.sync(file)
            disk.sync(temporary)
            with folder_lock(path.parent):
                if not _already_there(path, temporary / MANIFEST, entries):
                    _replace_folder(path, temporary)
    finally:
        disk.remove(temporary)


def remove_folder(path: Path) -> None:
    """Delete a folder, atomically for readers: it is renamed first, then deleted."""
    doomed = _temporary(path)
    with write_errors(path):
        disk.rename(path, doomed)
    disk.remove(doomed)


def _temporary(path: Path) -> Path:
    """Return a new name beside `path`, by which `recover` recognizes what a killed process left."""
    return path.with_name(f"{_TEMPORARY}{path.name}-{uuid.uuid4().hex[:8]}")


def _already_there(path: Path, manifest: Path, files: Mapping[str, Any]) -> bool:
    """Whether the folder at `path` already has this manifest, and undamaged `files`."""
    with suppress(LmtrainError, OSError):
        if (path / MANIFEST).read_bytes() == manifest.read_bytes():
            verify(path, files)
            return True
    return False


def _replace_folder(path: Path, temporary: Path) -> None:
    """Rename `temporary` to `path`. An older folder is first renamed, and deleted at the end.

    After a crash between the two renames the older folder has its temporary name, until `recover` renames it back.
    """
    older = _temporary(path.with_name(path.name + _OLD))
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
    disk.remove(older)


def recover(parent: Path) -> None:
    """Clean up what a killed process left in `parent`, where other processes may be writing folders, but not files.

    Half-written files and folders are deleted. A folder whose replacement was not complete is renamed back.
    """
    with folder_lock(parent):
        for leftover in sorted(parent.glob(f"{_TEMPORARY}*")):
            name = TEMPORARY_NAME.fullmatch(leftover.name)
            if name is None:
                continue
            if name[2] and not (parent / name[1]).exists():
                with write_errors(parent / name[1]):
                    disk.rename(leftover, parent / name[1])
                    disk.sync(parent)
            elif not leftover.is_dir():
                disk.remove(leftover)
            else:
                with folder_lock(leftover, fcntl.LOCK_EX | fcntl.LOCK_NB) as is_left:
                    if is_left:  # no living process writes it
                        disk.remove(leftover)


@contextmanager
def folder_lock(folder: Path, operation: int = fcntl.LOCK_EX) -> Iterator[bool]:
    """Lock a folder inside the block. Yields False if that is not possible: not every file system has locks.

    The process that holds the lock of a folder may make, replace and clean up folders in it.
    """
    with ExitStack() as stack:
        locked = False
        with suppress(OSError):
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, operation)
            locked = True
        yield locked


def read_manifest(folder: Path, folder_format: str) -> dict[str, Any]:
    """Return the manifest of `folder`; `verify` checks the files that it names.

    The manifest's own hash is verified and removed. An old checkpoint's manifest may have none. Raises LmtrainError if
    it is missing, damaged, or of another format, and UnreadableError if the system denies reading it.
    """
    path = folder / MANIFEST
    with read_errors(path):
        try:
            disk.check_regular(path)
            content = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            raise LmtrainError(f"{folder} has no {MANIFEST}: it is not a folder that lmtrain wrote") from None
    with suppress(ValueError, RecursionError):
        manifest: dict[str, Any] = json.loads(content)
        stored_format = manifest.get("format") if isinstance(manifest, dict) else type(manifest).__name__
        if stored_format != folder_format:
            raise LmtrainError(f"{folder} has format {str(stored_format)[:99]!r} where {folder_format!r} is needed")
        seal = manifest.pop(_SEAL, None)
        is_sealed = seal == _content_hash(manifest) or (seal is None and folder_format == _MAY_LACK_SEAL)
        if is_sealed and _is_table(manifest.get("files")):
            return manifest
    raise LmtrainError(f"{path} is damaged or was changed")


def _is_table(files: object) -> bool:
    """Whether this is a manifest's table of files: names without a folder, each with the file's hash."""
    return isinstance(files, dict) and all(
        isinstance(entry, dict)
        and isinstance(entry.get("sha256"), str)
        and name.isprintable()
        and Path(name).name == name
        for name, entry in files.items()
    )


def _content_hash(manifest: dict[str, Any]) -> str:
    """Return the SHA-256 of a manifest's entries, in their order."""
    return sha256_bytes(json.dumps(manifest).encode())


def verify(folder: Path, files: Mapping[str, Any]) -> None:
    """Verify the hashes of `files`, entries of a manifest's table, in parallel.

    Raises LmtrainError, which names the file, if one differs or can't be read.
    """

    def check(name: str) -> None:
        if sha256_file(folder / name) != files[name]["sha256"]:
            raise LmtrainError(f"{folder / name} is damaged or was changed")

    with ThreadPoolExecutor() as pool:
        list(pool.map(check, files))
