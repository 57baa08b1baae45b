"""Files that only this user writes, and that are replaced as a whole: a reader sees the old content or the new."""

from __future__ import annotations

import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

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


def not_ours(found: os.stat_result) -> str | None:
    """Return why a file or folder may hold what another user wrote, or None."""
    if stat.S_ISLNK(found.st_mode):
        return "is a link"
    if hasattr(os, "geteuid") and found.st_uid != os.geteuid():
        return f"belongs to user {found.st_uid}, not to {os.geteuid()}"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"can be written by others (mode {stat.S_IMODE(found.st_mode):o}): chmod go-w"
    return None
