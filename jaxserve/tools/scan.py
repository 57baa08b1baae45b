"""Where a JSON value ends, in text that arrives in pieces."""

from __future__ import annotations


class Scan:
    """Follows the strings and brackets of JSON. Writer: one parser."""

    def __init__(self, depth: int = 0) -> None:
        self.depth = depth  # open brackets
        self.inside = False  # in a string
        self._escaped = False

    def to_depth(self, text: str, depth: int | None, start: int = 0) -> int:
        """Read `text` from `start` until a bracket closes that leaves `depth` open, and return where that ends.

        Without such a bracket, or with a depth of None, all is read.
        """
        for at in range(start, len(text)):
            character = text[at]
            if self._escaped:
                self._escaped = False
            elif self.inside:
                self._escaped, self.inside = character == "\\", character != '"'
            elif character == '"':
                self.inside = True
            elif character in "{[":
                self.depth += 1
            elif character in "}]":
                self.depth -= 1
                if self.depth == depth:
                    return at + 1
        return len(text)


def in_string(text: str) -> bool:
    """Return whether a JSON text ends inside a string."""
    scan = Scan()
    scan.to_depth(text, None)
    return scan.inside
