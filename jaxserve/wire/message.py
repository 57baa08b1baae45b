"""What a frame holds: msgpack of fixed types, so that decoding runs no code of the other process, unlike pickle."""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all messages."""


encode = msgspec.msgpack.Encoder().encode
