"""The file-system calls that create, replace, delete and sync files and folders.

Everything that must survive a crash is written through this module, so that a test can record the calls and check every
state of the disk that a crash between two of them may leave.
"""

import errno
import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO


def make_folder(path: Path) -> None:
    """Create a folder, unless another process just did; its parent must exist."""
    path.mkdir(exist_ok=True)


def write(path: Path, data: bytes | list[memoryview]) -> None:
    """Write a new file, which must not exist, from one or several buffers. It is durable only after `sync`."""
    with path.open("xb") as file:
        file.writelines([data] if isinstance(data, bytes) else data)


def sync(path: Path) -> None:
    """Flush the content of a file, or the list of names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_regular(path: Path) -> None:
    """Raise OSError if `path` exists and is not a regular file: opening a pipe or a device may block forever."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))


def open_in_place(path: Path) -> BinaryIO:
    """Open a file to change it in place, or create it. Raises OSError if it is a link or not a regular file."""
    check_regular(path)
    try:
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "r+b")
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a symbolic link (move it away)", str(path)) from error
        raise
    if os.fstat(file.fileno()).st_nlink > 1:
        file.close()
        raise OSError(errno.EMLINK, "it is also a file elsewhere, a hard link (copy it)", str(path))
    return file


def rename(path: Path, target: Path) -> None:
    """Rename a file or a folder atomically; a file replaces an existing one."""
    path.replace(target)


def remove(path: Path) -> None:
    """Delete a file, or a folder and its contents, as far as possible."""
    if os.path.isdir(path) and not os.path.islink(path):  # noqa: PTH112, PTH114 -- Path raises for a name too long
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()
