"""The calls by which whole files and folders come, go and become durable.

All that must survive a crash goes through them, so that a test can record them and try every state of the disk that a
crash between two of them may leave.
"""

import errno
import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO


def make_folder(path: Path) -> None:
    """Make a folder that must not be there yet, in one that is."""
    path.mkdir()


def write(path: Path, data: bytes | list[memoryview]) -> None:
    """Write a file that must not be there yet, whole or in parts; it is not on the disk before `sync`."""
    with path.open("xb") as file:
        file.writelines([data] if isinstance(data, bytes) else data)


def sync(path: Path) -> None:
    """Flush a file's content, or a folder's list of names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_regular(path: Path) -> None:
    """Raise OSError where `path` is a pipe or a device, which may keep who opens it waiting for ever, or a folder."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is no regular file (move it away)", str(path))


def open_in_place(path: Path) -> BinaryIO:
    """Open a file to change it where it is, or make it. Raises OSError where it is not a regular file, or a link."""
    check_regular(path)
    try:
        return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "r+b")
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a symbolic link (move it away)", str(path)) from error
        raise


def rename(path: Path, target: Path) -> None:
    """Give a file or a folder another name at once; a file takes the place of another."""
    path.replace(target)


def remove(path: Path) -> None:
    """Delete a file or a folder with all that is in it, as far as that can be done."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()
