"""Register layouts of 8-bit operands and their widening on Hopper, as Mosaic lowers them and in PTX."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.mosaic import fragments, inline
from pallas_kernels.mosaic.compat import plgpu

THREADS = 128


def places(layout: Any, shape: tuple[int, ...]) -> tuple[np.ndarray[Any, Any], tuple[int, ...]]:
    """Return each thread's flat indices, [128, registers, length], and Mosaic's shape of registers."""
    registers = layout.registers_shape(shape)
    indices = np.arange(int(np.prod(shape))).reshape(shape)
    for tile in layout.tiling.tiles:  # split the last axes into tiles: the outer axes first, then those within
        kept, cut = indices.shape[: indices.ndim - len(tile)], indices.shape[indices.ndim - len(tile) :]
        parts = indices.reshape(*kept, *(n for size, of in zip(cut, tile, strict=True) for n in (size // of, of)))
        first, count = len(kept), len(tile)
        order = [*range(first), *range(first, first + 2 * count, 2), *range(first + 1, first + 2 * count, 2)]
        indices = parts.transpose(order)
    found = np.empty((THREADS, *registers, layout.vector_length), int)
    for thread in range(THREADS):
        where: list[Any] = [slice(None)] * indices.ndim
        for dims, number in ((layout.warp_dims, thread // 32), (layout.lane_dims, thread % 32)):
            for dim in reversed(dims):
                size = dim.times if isinstance(dim, plgpu.Replicated) else indices.shape[dim]
                if not isinstance(dim, plgpu.Replicated):
                    where[indices.ndim + dim] = number % size
                number //= size
        taken = indices[tuple(slice(n, n + 1) if isinstance(n, int) else n for n in where)]
        found[thread] = taken.reshape(*registers, layout.vector_length)
    return found.reshape(THREADS, -1, layout.vector_length), registers


class Threads:
    """A `FragmentedArray` of all threads; registers are arrays [128, length]."""

    def __init__(self, array: np.ndarray[Any, Any], layout: Any) -> None:
        at, registers = places(layout.to_mgpu(), array.shape)
        held = np.empty(at.shape[1], object)
        for number in range(at.shape[1]):
            held[number] = array.reshape(-1)[at[:, number]]
        self.registers, self.shape, self.mlir_dtype = held.reshape(registers), array.shape, array.dtype


def gather(made: Any) -> np.ndarray[Any, Any]:
    """Return the array whose registers were made."""
    at, _ = places(made.layout, made.shape)
    array = np.empty(made.shape, np.float32)
    for number, register in enumerate(made.registers.reshape(-1)):
        array.reshape(-1)[at[:, number]] = register
    return array


def mma(sums: Any, left: Any, right: Any) -> list[Any]:
    """Emulate mma.m16n8k16 for each warp, by PTX's table of fragments."""
    lane = np.arange(THREADS) % 32
    g, t, warp = lane // 4, lane % 4, np.arange(THREADS) // 32
    a, b, c = np.zeros((4, 16, 16)), np.zeros((4, 16, 8)), np.zeros((4, 16, 8))
    for number, word in enumerate(left):
        for e in range(2):
            a[warp, g + 8 * (number % 2), 2 * t + e + 8 * (number // 2)] = word[:, e]
    for number, word in enumerate(right):
        for e in range(2):
            b[warp, 2 * t + e + 8 * number, g] = word[:, e]
    for number, value in enumerate(sums):
        c[warp, g + 8 * (number // 2), 2 * t + number % 2] = value
    product = c + np.matmul(a, b)
    return [product[warp, g + 8 * (number // 2), 2 * t + number % 2] for number in range(4)]


@pytest.fixture
def instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for `inline` on words [128, 4 or 2] instead of MLIR values."""
    made = {
        "words": lambda register: np.split(register, register.shape[1] * register.itemsize // 4, axis=1),
        "halves": lambda word, _: (word[:, :2].astype(np.float32), word[:, 2:].astype(np.float32)),
        "crossed": lambda first, second: tuple(
            np.stack([first[:, n], second[:, n], first[:, n + 1], second[:, n + 1]], axis=1) for n in (0, 2)
        ),
        "mma": mma,
        "zeros": lambda: [np.zeros(THREADS)] * 4,
        "pair": lambda values: np.stack(values, axis=1),
        "singles": lambda register: list(register.T),
        "FragmentedArray": lambda _registers, _layout, _is_signed: SimpleNamespace(
            registers=_registers, layout=_layout
        ),
    }
    for name, instruction in made.items():
        monkeypatch.setattr(inline, name, instruction)


SIZES = [(64, 64), (128, 128), *(pytest.param(dim, 64, marks=pytest.mark.full) for dim in (128, 192, 256))]


@pytest.mark.parametrize(("dim", "tokens"), SIZES)
def test_threads_multiply_what_the_products_say(instructions: None, dim: int, tokens: int) -> None:
    random = np.random.default_rng(dim + tokens)
    q = random.integers(-9, 9, (16, dim)).astype(np.float16)
    k, v = random.integers(-9, 9, (2, tokens, dim)).astype(np.int8)
    weight = random.integers(-9, 9, (64, tokens // 4)).astype(np.float16)
    mixed = random.integers(-9, 9, (64, dim)).astype(np.float32)
    wgmma = plgpu.Layout.WGMMA

    made = fragments._scores(Threads(q, fragments.queries()), Threads(k, fragments.keys()))
    made.shape = (64, tokens // 4)
    np.testing.assert_array_equal(gather(made), fragments.scores(jnp.asarray(q), jnp.asarray(k), interpret="host"))
    ready = np.asarray(fragments.arranged(jnp.asarray(q)))
    made_of_ready = fragments._scores(Threads(ready, fragments.queries()), Threads(k, fragments.keys()), ready=True)
    made_of_ready.shape = made.shape
    np.testing.assert_array_equal(gather(made_of_ready), gather(made))
    host = fragments.scores(jnp.asarray(ready), jnp.asarray(k), interpret="host", ready=True)
    np.testing.assert_array_equal(host, gather(made))
    # The docstring's positions: row 16 w + r, column 16 c + n is query row r and key 64 c + 16 w + n.
    assert gather(made)[16 * 3 + 5, 7] == q[5].astype(int) @ k[16 * 3 + 7].astype(int)
    once = gather(made)
    made = fragments._scores(Threads(q, fragments.queries()), Threads(k, fragments.keys()), Threads(once, wgmma))
    made.shape = (64, tokens // 4)
    np.testing.assert_array_equal(gather(made), 2 * once)
    np.testing.assert_array_equal(fragments.scores(*map(jnp.asarray, (q, k)), "host", jnp.asarray(once)), 2 * once)

    made = fragments._mix(Threads(mixed, wgmma), Threads(weight, wgmma), Threads(v, fragments.values(dim)))
    made.shape = (64, dim)
    want = fragments.mix(*map(jnp.asarray, (mixed, weight, v)), interpret="host")
    np.testing.assert_array_equal(gather(made), want)
    keys = [64 * c + 16 * 2 + n for c in range(tokens // 64) for n in range(16)]
    straight = np.asarray(fragments.in_order(want - mixed, dim))[16 * 2 + 1]
    np.testing.assert_array_equal(straight, weight[16 * 2 + 1].astype(int) @ v[keys].astype(int))


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
