"""Pages on disk: the medium of the disk tier. One file per page, which survives the process.

    PATH/MODEL/N/DIGEST    a page of the model with digest MODEL, of process N of the machine
    PATH/MODEL/N/lock      locked as long as a process uses the folder

A process uses the first folder that no other one has locked, and never touches the others. A file
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
import struct
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from itertools import count
from pathlib import Path
from typing import IO

import numpy as np

from jaxserve.engine.memory.host_pages import Bytes, Page, PageCodec
from jaxserve.sched.api.errors import InvalidValue
from jaxserve.sched.api.kv_source import PageCopy
from jaxserve.sched.cluster.kv_tier import Stored

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
            self.folder, self._lock = _own_folder(path / model.hex())
        except OSError as error:
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
        """Yield the pages of an earlier process, each after the page before it, and remove other files of pages."""
        found: dict[bytes, PageCopy] = {}
        for entry in os.scandir(self.folder):
            copy = self._header(Path(entry.path), entry.stat().st_size)
            if copy is not None:
                found[copy.digest] = copy
            elif OURS.fullmatch(entry.name):
                os.unlink(entry.path)
        done: set[bytes] = set()
        for copy in found.values():
            line = [copy]
            while line[-1].parent in found and line[-1].parent not in done and line[-1].digest not in done:
                line.append(found[line[-1].parent])
            for one in reversed(line):
                if one.digest not in done:
                    done.add(one.digest)
                    yield one

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
        self._lock.close()


def _own_folder(root: Path) -> tuple[Path, IO[bytes]]:
    """Return the first folder in `root` that no process uses, and its lock."""
    for number in count():
        folder = root / str(number)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = (folder / LOCK).open("wb")  # held as long as the folder is used
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
        else:
            return folder, file
    raise AssertionError("unreachable")


def _size(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape))


def _checksum(digest: bytes, parent: bytes, body: bytes | memoryview) -> bytes:
    hashed = blake2b(digest + parent.ljust(16, b"\0"), digest_size=16)
    hashed.update(body)
    return hashed.digest()
