"""Capacity agrees with the engine's own arithmetic, and the largest batch is the largest that fits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.capacity.activations import Activations
from jaxserve.capacity.costs import Costs
from jaxserve.capacity.devices import Device, devices, meshes, parse_devices
from jaxserve.capacity.fit import Setting, choose, fit, largest, remedy
from jaxserve.errors import InvalidValue
from jaxserve.models.published import published, published_spec
from jaxserve.models.registry import spec_from_config
from tests.support.capacity.sizes import KV, SIZES
from tests.support.examples import examples

SPEC = spec_from_config({**SIZES, "max_position_embeddings": 64})
WEIGHTS = Costs.of(SPEC, 1, "float32").weights
DEVICE = Device("made up", "gpu", 1e6, 1e9, 1e9, 1e9, "a test")
HELD = Activations(1000, 10, 24)


def setting(**changes: Any) -> Setting:
    made = Setting(DEVICE, "made-up", 4, 64, 8, 32, 4, 0.5, None, "float32", "auto", 10, 20, 1.0)
    return replace(made, **changes)


def test_hand_computed_pages() -> None:
    made = fit(SPEC, setting(), 1, 1, HELD)
    left = 500_000 - WEIGHTS - 1024
    pages = left // (4 * KV)
    grid = 2 ** (pages.bit_length() - 1) // 16  # pools come in sixteen sizes per octave
    assert made.pages == pages // grid * grid and made.tokens == 4 * made.pages
    assert made.pool == made.pages * 4 * KV
    assert made.fits and made.activations == HELD
    both = fit(SPEC, setting(), 1, 2, HELD)
    assert both.tokens > 2 * made.tokens  # half the weights on each device, and pages on both


def test_models_that_do_not_fit_give_the_engines_error() -> None:
    small = replace(DEVICE, memory=100_000.0)
    refused = fit(SPEC, setting(device=small), 1, 1, HELD)
    assert refused.refusal.startswith("gpu_memory_utilization=0.5 of 100000 bytes on made-up leaves nothing for the KV")
    tight = fit(SPEC, setting(device=replace(DEVICE, memory=2.0 * (WEIGHTS + 1024 + 15 * 4 * KV))), 1, 1, HELD)
    assert "holds 15 pages of 4 tokens" in tight.refusal and "fewer than the 16 that max_model_len=64" in tight.refusal
    none = fit(SPEC, setting(device=replace(DEVICE, memory=2.0 * (WEIGHTS + 1024 + 3 * KV))), 1, 1, HELD)
    assert "holds 0 pages" in none.refusal and "lower max_model_len" not in none.refusal
    assert remedy(SPEC, setting(), [tight]) == "a request of 64 tokens does not fit; --max-model-len 60 does"
    assert "must divide heads=4" in fit(SPEC, setting(), 1, 3, HELD).refusal
    assert not any(one.fits for one in (refused, tight))


def test_a_configured_pool_size_is_used() -> None:
    asked = setting(kv_cache_memory=2 * 64 * 4 * KV)
    made = fit(SPEC, asked, 2, 1, HELD)
    assert made.pages == 64 and made.fits
    assert fit(SPEC, asked, 1, 2, HELD).pages == 128
    refused = fit(SPEC, setting(kv_cache_memory=2_000_000), 2, 1, HELD).refusal
    assert refused.endswith("KV pools of 1000000 exceed the 1000000 bytes of made-up: lower kv_cache_memory")


def test_instances_on_a_cpu_share_its_memory() -> None:
    cpu = replace(DEVICE, platform="cpu", memory=4e6 + WEIGHTS)
    one, two = (fit(SPEC, setting(device=cpu, max_model_len=8), r, 1, HELD) for r in (1, 2))
    assert one.pages == 1_000_000 // (4 * KV) // 32 * 32
    assert two.tokens == pytest.approx(one.tokens / 2, rel=0.07)


@settings(max_examples=examples(40), deadline=None)
@given(st.integers(1, 4000), st.floats(1e-4, 0.2), st.integers(1, 64))
def test_the_largest_batch_cannot_be_larger(pages: int, tpot: float, context: int) -> None:
    asked, costs = setting(tpot=tpot, context=context), Costs.of(SPEC, 1, "float32")
    batch = largest(costs, asked, pages)
    room = pages // -(-context // 4)
    if batch is None:
        assert room < 1 or costs.decode(1, context).seconds(DEVICE) > tpot
        return
    assert 1 <= batch.rows <= room and batch.seconds <= tpot
    assert batch.limit == ("KV" if batch.rows == room else "TPOT")
    assert batch.rows == room or costs.decode(batch.rows + 1, context).seconds(DEVICE) > tpot


@pytest.mark.parametrize("name", published())
def test_every_published_model_can_be_planned(name: str) -> None:
    """Plan for as many of the largest devices as the table allows; a step holds more than its hidden states."""
    spec = published_spec(name)
    able = [one for one in (fit(spec, h200(8, max_model_len=2048), 1, tp) for tp in (1, 8)) if one.fits]
    assert able and all(one.batch is not None for one in able)
    for one in able:
        assert one.activations is not None and one.activations.step > 8192 * spec.dim * 2


def h200(count: int, **changes: Any) -> Setting:
    device = devices()["h200"]
    return setting(
        **{
            "device": device, "name": "h200", "count": count, "max_model_len": 8192, "max_num_seqs": 256,
            "max_num_batched_tokens": 8192, "page_size": 64, "utilization": 0.9, "dtype": "bfloat16",
            "context": 2048, "prompt": 8192, "tpot": 0.05, **changes,
        }
    )  # fmt: skip


def test_llama_3_70b_needs_two_h200() -> None:
    spec, asked = published_spec("llama3-70b"), h200(8)
    fits = [fit(spec, asked, *mesh) for mesh in meshes(8)]
    assert [(one.mesh, one.fits) for one in fits] == [("8x1", False), ("4x2", True), ("2x4", True), ("1x8", True)]
    chosen = choose(fits)
    assert chosen is not None and chosen[0].mesh == "2x4"
    assert "within a fifth of the most tokens/s (1x8 has" in chosen[1]
    assert remedy(spec, h200(1), fits[:1]) == "one instance needs at least 2 of h200: --devices h200:2"


def test_choosing_if_no_mesh_keeps_the_tpot() -> None:
    spec = published_spec("llama3-70b")
    slow = [fit(spec, replace(h200(4), tpot=1e-4), *mesh) for mesh in meshes(4)]
    chosen = choose(slow)
    assert chosen is not None and chosen[0].mesh == "1x4" and chosen[1].startswith("no mesh meets the TPOT")
    assert choose(slow[:1]) is None
    only = choose(slow[:2])
    assert only is not None and only[0].mesh == "2x2"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("b200:8", "unknown device 'b200'; allowed: h200, h100, a100-80, "),
        ("h200:0", "must be a device and a count above 0, as in h200:8"),
        ("h200:x", "must be a device and a count above 0"),
        ("h200:", "must be a device and a count above 0"),
        ("", "unknown device ''"),
    ],
)
def test_unknown_devices_are_named(text: str, message: str) -> None:
    with pytest.raises(InvalidValue, match=f"devices='{text}'.*{message}"):
        parse_devices(text)


def test_devices_by_name() -> None:
    assert parse_devices("H200:8") == ("h200", 8)
    assert parse_devices("a100-40") == ("a100-40", 1)
    assert all(device.source for device in devices().values())
    assert list(meshes(6)) == [(6, 1), (3, 2), (2, 3), (1, 6)]
