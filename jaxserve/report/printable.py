"""Text of others for a terminal: what a model or a server writes never moves the cursor or sets a color."""

from __future__ import annotations

from collections.abc import Iterator

KEPT = "\n\t"
REPLACEMENT = "\ufffd"


def _shown() -> Iterator[tuple[int, str]]:
    for code in range(0x20):
        if chr(code) not in KEPT:
            yield code, chr(0x2400 + code)  # its picture: ESC is ␛
    yield 0x7F, "\u2421"
    for first, last in (
        (0x80, 0x9F),  # C1: 0x9B begins an escape sequence as ESC [ does
        (0x200E, 0x200F), (0x202A, 0x202E), (0x2066, 0x2069), (0x061C, 0x061C),  # change the order of what is shown
        (0xD800, 0xDFFF),  # lone surrogates cannot be encoded
    ):  # fmt: skip
        yield from ((code, REPLACEMENT) for code in range(first, last + 1))


_TABLE = dict(_shown())


def printable(text: str) -> str:
    """Return the text with control characters replaced by visible ones; line ends and tabs stay."""
    return text.replace("\r\n", "\n").translate(_TABLE)


def printable_line(text: str) -> str:
    """Return the text as one line, also without tabs."""
    return printable(text).replace("\n", "\u240a").replace("\t", "\u2409")
