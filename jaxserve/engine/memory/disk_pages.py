"""Pages on disk: the medium of the disk tier. One file per page, which survives the process.

    PATH/MODEL/N/DIGEST    a page of the model with digest MODEL, of process N of the machine
    PATH/MODEL/N/lock      locked as long as a process uses the folder

A process uses the first folder that no other one has locked, and never touches the others. Only
folders of this user that other users cannot write are used: what lies there becomes KV. A file
is a header (`HEADER`) and the bytes of the page. It is written under another name first, and its
checksum is verified when it is read: a file that is incomplete, damaged or gone is a missing page.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import re
import stat
import struct
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from itertools import count
from pathlib import Path

import numpy as np

from jaxserve.engine.memory.host_pages import Bytes, Page, PageCodec
from jaxserve.sched.api.errors import InvalidValue
from jaxserve.sched.api.kv_source import PageCopy
from jaxserve.sched.cluster.kv_tier import Stored
from jaxserve.whole_file import not_ours

log = logging.getLogger(__name__)

MAGIC = b"jaxserveKVpage1\n"
HEADER = struct.Struct("<16s16s16s16s16sd")  # MAGIC, model, digest, parent, checksum of the rest, cost
LOCK = "lock"
OURS = re.compile(r"[0-9a-f]{32}(\.part)?")  # names of files of pages


class DiskPages:
    """The medium of the disk tier. Writer: the KVTier that owns it; files are touched in its threads only."""

    def __init__(self, path: Path, model: bytes, shapes: Sequence[tuple[int, ...]], codec: PageCodec) -> None:
        """model: digest of all that the contents of pages depend on. shapes: of the byte arrays of a page.

        Raises InvalidValue if the folder cannot be written.
        """
        self._model = model
        self._shapes = tuple(shapes)
        self._codec = codec
        self.page_bytes = HEADER.size + sum(map(_size, shapes))
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="jaxserve-kv-disk-write")  # writes and removes in order
        self._readers = ThreadPoolExecutor(4, thread_name_prefix="jaxserve-kv-disk-read")
        try:
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
            if path.stat().st_mode & (stat.S_IWOTH | stat.S_ISVTX) == stat.S_IWOTH:
                raise ValueError(f"{path} can be written by others: chmod o-w")
            self.folder, self._lock = _own_folder(path / model.hex())
        except (OSError, ValueError) as error:
            raise InvalidValue(f"kv_disk={str(path)!r} cannot be used: {error}", "kv_disk") from error

    async def write(self, several: Sequence[Stored]) -> Sequence[bytes]:
        if not several:
            return ()
        return await asyncio.get_running_loop().run_in_executor(self._writer, self._write, several)

    def _write(self, several: Sequence[Stored]) -> Sequence[bytes]:
        written = []
        for (digest, parent, cost), page, _ in several:
            body = b"".join(array.tobytes() for array in self._codec.plain(page))
            header = (MAGIC, self._model, digest, parent, _checksum(digest, parent, body), cost)
            part = self.folder / f"{digest.hex()}.part"
            try:
                part.touch(mode=0o600)
                with part.open("wb") as file:
                    file.write(HEADER.pack(*header))
                    file.write(body)
                part.replace(self.folder / digest.hex())
            except OSError as error:
                log.warning("a KV page could not be written to %s: %s", self.folder, error)
                with contextlib.suppress(OSError):
                    part.unlink()
            else:
                written.append(digest)
        return written

    async def read(self, digests: Sequence[bytes]) -> Sequence[Page | None]:
        loop = asyncio.get_running_loop()
        return await asyncio.gather(*(loop.run_in_executor(self._readers, self._read, digest) for digest in digests))

    def _read(self, digest: bytes) -> Page | None:
        try:
            data = (self.folder / digest.hex()).read_bytes()
        except OSError:
            return None
        if len(data) != self.page_bytes:
            return None
        magic, model, name, parent, checksum, _ = HEADER.unpack_from(data)
        body = memoryview(data)[HEADER.size :]
        if (magic, model, name, checksum) != (MAGIC, self._model, digest, _checksum(digest, parent, body)):
            return None
        return self._codec.of(tuple(self._arrays(body)))

    def _arrays(self, body: memoryview) -> Iterator[Bytes]:
        at = 0
        for shape in self._shapes:
            yield np.frombuffer(body, np.uint8, _size(shape), at).reshape(shape)
            at += _size(shape)

    def take(self, digest: bytes) -> Page | None:
        with contextlib.suppress(RuntimeError):  # closed
            self._writer.submit((self.folder / digest.hex()).unlink, missing_ok=True)
        return None

    def stored(self) -> Iterator[PageCopy]:
        """Yield the pages of an earlier process, each after the page before it, and remove other files of pages.

        Pages that name each other as the page before are none.
        """
        found: dict[bytes, PageCopy] = {}
        for entry in os.scandir(self.folder):
            copy = self._header(Path(entry.path), entry.stat().st_size)
            if copy is not None:
                found[copy.digest] = copy
            elif OURS.fullmatch(entry.name):
                os.unlink(entry.path)
        done: set[bytes] = set()
        for copy in found.values():
            line: dict[bytes, PageCopy] = {}
            while copy.digest not in done and copy.digest not in line:
                line[copy.digest] = copy
                if copy.parent not in found:
                    break
                copy = found[copy.parent]
            circle = copy.digest in line and copy.parent in found
            done.update(line)
            for page in reversed(line.values()):
                if circle:
                    os.unlink(self.folder / page.digest.hex())
                else:
                    yield page

    def _header(self, path: Path, size: int) -> PageCopy | None:
        if size != self.page_bytes:
            return None
        with path.open("rb") as file:
            magic, model, digest, parent, _, cost = HEADER.unpack(file.read(HEADER.size))
        if (magic, model, digest.hex()) != (MAGIC, self._model, path.name):
            return None
        return PageCopy(digest, parent.rstrip(b"\0") and parent, cost)

    def close(self) -> None:
        """Wait for the writes, and leave the folder to the next process."""
        self._writer.shutdown()
        self._readers.shutdown()
        os.close(self._lock)


def _own_folder(root: Path) -> tuple[Path, int]:
    """Return the first folder in `root` that no process uses, and its lock. Raises OSError, or ValueError if others can
    write it.
    """
    for number in count():
        folder = root / str(number)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for path in (root, folder):
            if why := not_ours(path.lstat()):
                raise ValueError(f"{path} {why}")
        # Held as long as the folder is used. A link would be another file.
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
        else:
            return folder, lock
    raise AssertionError("unreachable")


def _size(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape))


def _checksum(digest: bytes, parent: bytes, body: bytes | memoryview) -> bytes:
    hashed = blake2b(digest + parent.ljust(16, b"\0"), digest_size=16)
    hashed.update(body)
    return hashed.digest()
