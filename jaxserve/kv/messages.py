"""The messages between two engine processes, of which one takes KV pages from the other.

The content of pages travels beside them: as
`PagesPart`s of a few hundred KiB on the same connection, or from device to device.
"""

from __future__ import annotations

import msgspec

from jaxserve.kv.layout import Layout
from jaxserve.wire.connection import Message

# from the process that takes pages


class CompareLayouts(Message, frozen=True):
    """The first message: compare the layouts."""

    digest: bytes


class AwaitPage(Message, frozen=True):
    """Ask to be told once a page is there, or after some seconds without it."""

    call: int
    digest: bytes
    seconds: float


class GetPages(Message, frozen=True):
    """Ask for the first of these pages that are there."""

    call: int
    digests: tuple[bytes, ...]
    direct: bool


class Done(Message, frozen=True):
    """An answer has arrived, or is no longer wanted."""

    call: int


# from the process that gives pages


class LayoutReply(Message, frozen=True):
    """The answer to CompareLayouts. direct: the address for pulls between devices, if this process can."""

    layout: Layout
    equal: bool
    shards: str
    direct: str | None


class PageStatus(Message, frozen=True):
    """The answer to AwaitPage: whether the page is there."""

    call: int
    there: bool


class PagesHeader(Message, frozen=True):
    """The content of the first `pages` pages that were asked for; 0: none is there.

    Arrays of `sizes` bytes follow in PagesParts, with a CRC-32 for each. All pages of an array are one
    contiguous block.
    """

    call: int
    pages: int
    sizes: tuple[int, ...] = ()
    sums: tuple[int, ...] = ()


class PagesPart(Message, frozen=True):
    """The next bytes of the pages."""

    call: int
    content: bytes


class Offer(Message, frozen=True):
    """The first `pages` pages that were asked for can be pulled: a piece of `size` pages, under `uuid`.

    sums: the checksums of all shards of each array (programs/checksum.py), over the whole piece.
    """

    call: int
    pages: int
    size: int
    uuid: int
    sums: tuple[int, ...]


FromClient = CompareLayouts | AwaitPage | GetPages | Done
FromServer = LayoutReply | PageStatus | PagesHeader | PagesPart | Offer

decode_from_client = msgspec.msgpack.Decoder(FromClient).decode
decode_from_server = msgspec.msgpack.Decoder(FromServer).decode
