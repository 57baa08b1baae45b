"""Widen all 256 codes of both 8-bit types to float16, emulating each PTX instruction as defined."""

from __future__ import annotations

import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.mosaic import inline

ALL = np.arange(256, dtype=np.uint8)


def permuted(first: Any, second: Any, order: int) -> Any:
    """Emulate prmt.b32 on words as bytes [N, 4], lowest first."""
    both = np.concatenate([first, second], axis=1)
    return both[:, [order >> 4 * n & 7 for n in range(4)]]


def executed(text: str, word: Any) -> tuple[Any, Any]:
    """Return $0 and $1 as float16 [N, 2] after running `text` with $2 = word [N, 4] bytes."""
    held: dict[str, Any] = {"$2": word}

    def read(name: str) -> Any:
        if name in held:
            return held[name]
        return np.broadcast_to(np.frombuffer(int(name, 16).to_bytes(4, "little"), np.uint8), word.shape)

    for line in filter(None, map(str.strip, text.split(";"))):
        if split := re.fullmatch(r"mov\.b32 \{(\w+), (\w+)\}, (\S+)", line):
            held[split[1]], held[split[2]] = read(split[3])[:, :2], read(split[3])[:, 2:]
            continue
        name, into, *operands = line.replace(",", "").split()
        of = [read(operand) for operand in operands[:2]]
        match name:
            case "mov.b32":
                held[into] = of[0]
            case "xor.b32":
                held[into] = of[0] ^ of[1]
            case "prmt.b32":
                held[into] = permuted(*of, int(operands[2], 16))
            case "sub.f16x2":
                left, right = (np.ascontiguousarray(x).view(np.float16) for x in of)
                held[into] = (left - right).view(np.uint8)
            case "cvt.rn.f16x2.e4m3x2":
                halves = np.ascontiguousarray(of[0]).view(ml_dtypes.float8_e4m3fn).astype(np.float16)
                held[into] = halves.view(np.uint8)
            case _:
                raise AssertionError(f"unknown instruction: {line}")
    return held["$0"].view(np.float16), held["$1"].view(np.float16)


@pytest.mark.parametrize(("name", "stored"), [("int8", np.int8), ("e4m3", ml_dtypes.float8_e4m3fn)])
def test_every_value_is_what_it_was_and_nan_stays_nan(name: str, stored: Any) -> None:
    word = np.stack([np.roll(ALL, n) for n in range(4)], axis=1)
    made = np.concatenate(executed(inline.HALVES[name], word), axis=1)
    want = word.view(stored).astype(np.float32)
    np.testing.assert_array_equal(made.astype(np.float32), want)
    assert np.isnan(want).any() == (name == "e4m3")
    assert bool(np.any((want != 0) & (np.abs(want) < 2**-8))) == (name == "e4m3")  # e4m3's subnormals are covered


def test_bytes_of_two_words_by_turns() -> None:
    word = np.arange(4, dtype=np.uint8)[None]
    crossed = [permuted(word, word + 10, order).tolist() for order in inline.TURNS]
    assert crossed == [[[0, 10, 1, 11]], [[2, 12, 3, 13]]]
