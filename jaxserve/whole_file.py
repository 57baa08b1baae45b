"""Files that only this user writes, and that are replaced as a whole: a reader sees the old content or the new."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from jaxserve.errors import InvalidValue

PARTIAL = ".partial"  # how the names of files that are being written end


def write_whole(path: Path, data: bytes) -> None:
    """Replace a file, for this user alone; several threads and processes may do so at once. Raises OSError."""
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=PARTIAL, delete=False) as file:
        try:
            file.write(data)
            file.close()
            Path(file.name).replace(path)
        except BaseException:
            with suppress(OSError):
                Path(file.name).unlink()
            raise


def check_output(path: Path, name: str) -> None:
    """Make the folder of a file that is written at the end. Raises InvalidValue, of `name`, if it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    except OSError as error:
        raise InvalidValue(f"{name}={str(path)!r} cannot be written: {error.strerror}", name) from error


def not_ours(status: os.stat_result) -> str | None:
    """Return why a file or folder may hold what another user wrote, or None."""
    if stat.S_ISLNK(status.st_mode):
        return "is a link"
    if hasattr(os, "geteuid") and status.st_uid != os.geteuid():
        return f"belongs to user {status.st_uid}, not to {os.geteuid()}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"can be written by others (mode {stat.S_IMODE(status.st_mode):o}): chmod go-w"
    return None
