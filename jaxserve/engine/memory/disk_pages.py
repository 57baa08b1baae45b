"""Pages on disk: the medium of the disk tier. One file per page, which survives the process.

    PATH/MODEL/N/DIGEST    a page of the model with digest MODEL, of process N of the machine
    PATH/MODEL/N/lock      locked as long as a process uses the folder

A process uses the first folder that no other one has locked. It removes folders of other models, the
least recently used first, where they and its own pages are more than its room; it never touches
folders that are locked. Only folders of this user that other users cannot write are used or removed:
what lies there becomes KV. A file
is a header (`HEADER`) and the bytes of the page. It is written under another name first, and its
checksum is verified when it is read: a file that is incomplete, damaged or gone is a missing page.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import math
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
ROOT = re.compile(r"[0-9a-f]{32}")  # names of the folders of models


class DiskPages:
    """The medium of the disk tier. Writer: the KVTier that owns it; files are touched in its threads only."""

    def __init__(
        self, path: Path, model: bytes, shapes: Sequence[tuple[int, ...]], codec: PageCodec, room: float = math.inf
    ) -> None:
        """model: digest of all that the contents of pages depend on. shapes: of the byte arrays of a page. room: bytes
        that pages of this process and those that other models have left may take together.

        Raises InvalidValue if the folder cannot be written.
        """
        self._model = model
        self._shapes = tuple(shapes)
        self._codec = codec
        self._room = room
        self._failed = False  # the last write has failed
        self.page_bytes = HEADER.size + sum(map(_size, shapes))
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="jaxserve-kv-disk-write")  # writes and removes in order
        self._readers = ThreadPoolExecutor(4, thread_name_prefix="jaxserve-kv-disk-read")
        try:
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
            if path.stat().st_mode & (stat.S_IWOTH | stat.S_ISVTX) == stat.S_IWOTH:
                raise ValueError(f"{path} can be written by others: chmod o-w")
            self.folder, self._lock = _own_folder(path / model.hex())
            self._pages = sum(1 for _ in _pages_in(self.folder))  # written by this process, or an earlier one
            self._left = _left(path, model.hex())
        except (OSError, ValueError) as error:
            raise InvalidValue(f"kv_disk={str(path)!r} cannot be used: {error}", "kv_disk") from error
        self._writer.submit(self._make_room)

    async def write(self, several: Sequence[Stored]) -> Sequence[bytes]:
        if not several:
            return ()
        return await asyncio.get_running_loop().run_in_executor(self._writer, self._write, several)

    def _write(self, several: Sequence[Stored]) -> Sequence[bytes]:
        self._pages += len(several)
        self._make_room()
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
                if not self._failed:  # a full disk fails many
                    log.warning("KV pages cannot be written to %s: %s", self.folder, error)
                self._failed = True
                with contextlib.suppress(OSError):
                    part.unlink()
            else:
                self._failed = False
                written.append(digest)
        self._pages -= len(several) - len(written)
        return written

    def _make_room(self) -> None:
        """Remove what other models have left, the least recently used first, until it fits with the pages."""
        while self._left and self._pages * self.page_bytes + sum(size for _, size in self._left) > self._room:
            folder, size = self._left.pop(0)
            if _removed(folder):
                log.info("%d MiB of KV of another model were removed: %s", size >> 20, folder)

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
            self._writer.submit(self._remove, digest)
        return None

    def _remove(self, digest: bytes) -> None:
        with contextlib.suppress(OSError):
            (self.folder / digest.hex()).unlink()
            self._pages -= 1

    def stored(self) -> Iterator[PageCopy]:
        """Yield the pages of an earlier process, each after the page before it, and remove other files of pages.

        Pages that name each other as the page before are none.
        """
        copies: dict[bytes, PageCopy] = {}
        for entry in os.scandir(self.folder):
            copy = self._header(Path(entry.path), entry.stat().st_size)
            if copy is not None:
                copies[copy.digest] = copy
            elif OURS.fullmatch(entry.name):
                os.unlink(entry.path)
        done: set[bytes] = set()
        for copy in copies.values():
            line: dict[bytes, PageCopy] = {}
            while copy.digest not in done and copy.digest not in line:
                line[copy.digest] = copy
                if copy.parent not in copies:
                    break
                copy = copies[copy.parent]
            circle = copy.digest in line and copy.parent in copies
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
        lock = _locked(folder)
        if lock is not None:
            os.utime(folder)
            return folder, lock
    raise AssertionError("unreachable")


def _locked(folder: Path) -> int | None:
    """Return the lock of a folder, to be held as long as it is used; None if another process has it. Raises OSError."""
    # A link would be another file.
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(lock).st_nlink:
            return lock
    except BlockingIOError:
        pass
    os.close(lock)  # held by another process, or removed with the folder a moment ago
    return None


def _pages_in(folder: Path) -> Iterator[os.DirEntry[str]]:
    """Return the files of pages in a folder, whole or not."""
    return (entry for entry in os.scandir(folder) if OURS.fullmatch(entry.name))


def _left(path: Path, model: str) -> list[tuple[Path, int]]:
    """Return the folders of other models, with their bytes, the least recently used first. Raises OSError."""
    folders = []
    for root in path.iterdir():
        if not ROOT.fullmatch(root.name) or root.name == model or _foreign(root):
            continue
        with contextlib.suppress(FileNotFoundError):  # another process has removed it
            for folder in root.iterdir():
                if folder.name.isdecimal() and not _foreign(folder):
                    size = sum(entry.stat(follow_symlinks=False).st_size for entry in _pages_in(folder))
                    folders.append((folder.stat().st_mtime, folder, size))
    return [(folder, size) for _, folder, size in sorted(folders)]


def _foreign(path: Path) -> bool:
    status = path.lstat()
    return not stat.S_ISDIR(status.st_mode) or not_ours(status) is not None


def _removed(folder: Path) -> bool:
    """Remove a folder of pages; return False if a process uses it, or it cannot be removed."""
    try:
        lock = _locked(folder)
        if lock is None:
            return False
        try:
            for entry in _pages_in(folder):
                os.unlink(entry.path)
            (folder / LOCK).unlink()
        finally:
            os.close(lock)
        folder.rmdir()
        folder.parent.rmdir()
    except OSError as error:  # it holds something else, or other folders
        log.debug("%s: %s", folder, error)
    return True


def _size(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape))


def _checksum(digest: bytes, parent: bytes, body: bytes | memoryview) -> bytes:
    hashed = blake2b(digest + parent.ljust(16, b"\0"), digest_size=16)
    hashed.update(body)
    return hashed.digest()
