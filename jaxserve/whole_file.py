"""Files that are replaced as a whole: a reader, or a start after a crash, sees the old content or the new."""

from __future__ import annotations

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
