"""Bytes, FLOPs and parameters against hand computation, published figures and the compiler."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.capacity.activations import Activations, adjusted
from jaxserve.capacity.costs import Costs, LayerWork, _pairs
from jaxserve.capacity.devices import devices
from jaxserve.models.published import published, published_spec
from jaxserve.models.registry import spec_from_config
from pallas_kernels.gate import bounds
from pallas_kernels.gate.targets import TARGETS
from tests.support.capacity.sizes import KV, SIZES

QKV, OUT, MLP, HEAD = 32 * (4 + 2 * 2) * 8, 4 * 8 * 32, 3 * 32 * 64, 96 * 32
MATRICES, NORMS = 2 * (QKV + OUT + MLP), 2 * 2 * 32 + 32


def costs(tp: int = 1, **changes: Any) -> Costs:
    return Costs.of(spec_from_config({**SIZES, **changes}), tp, "float32")


def test_hand_computed_decode_step() -> None:
    made = costs()
    assert made.parameters == MATRICES + NORMS + 2 * HEAD
    assert made.active == made.parameters - HEAD
    assert (made.weights, made.tables, made.kv_token) == (4 * made.parameters, 4 * HEAD, KV)
    weights = 4 * (MATRICES + NORMS + HEAD)
    each = 10 * KV + KV + 4 * 32  # reads ten tokens, writes one, and its embedding row
    flops = 2 * MATRICES + 2 * HEAD + 10 * 2 * (2 * 4 * 8 + 2 * 4 * 8)  # ten pairs: a score and a sum in each layer
    assert made.decode(3, 10) == LayerWork(weights + 3 * each, 3 * flops)


def test_hand_computed_chunked_prefill() -> None:
    made = costs()
    every = 4 * (MATRICES + NORMS)
    moved = 3 * every + 4 * HEAD + 10 * (KV + 4 * 32) + (0 + 4 + 8) * KV  # chunks of 4, 4 and 2
    flops = 10 * 2 * MATRICES + 2 * HEAD + 55 * 2 * 4 * 4 * 8
    assert made.prefill(10, 4) == LayerWork(moved, flops)
    assert made.prefill(10, 10).flops == flops


def test_shards_take_their_part_and_copies_of_indivisible_weights() -> None:
    one, two, four = costs(1), costs(2), costs(4)
    assert two.weights == 4 * (MATRICES // 2 + NORMS + 2 * HEAD // 2)
    assert two.kv_token == KV / 2
    assert four.weights == 4 * (
        (MATRICES + 2 * 32 * 2 * 2 * 8) // 4 + NORMS + 2 * HEAD // 4
    )  # two kv heads become four
    assert four.kv_token == KV / 2
    assert one.parameters == two.parameters == four.parameters
    assert two.decode(1, 10).flops == one.decode(1, 10).flops / 2
    padded = costs(2, vocab_size=95)
    assert padded.head == 4 * 48 * 32 and padded.parameters == one.parameters - 2 * 32


def test_a_tied_head_is_read_whole() -> None:
    tied = costs(tie_word_embeddings=True)
    assert (tied.tables, tied.head) == (0, 4 * HEAD)
    assert tied.decode(1, 1) == costs().decode(1, 1)


def test_a_window_bounds_the_kv_read() -> None:
    far, near = (costs(architectures=["MistralForCausalLM"], sliding_window=w) for w in (None, 4))
    assert far.decode(1, 10).bytes - near.decode(1, 10).bytes == (10 - 4) * KV
    assert near.decode(1, 3) == far.decode(1, 3)
    assert near.prefill(10, 5).bytes == far.prefill(10, 5).bytes - (5 - 4) * KV


@given(st.integers(1, 60), st.integers(1, 70))
def test_attention_pairs_are_those_of_a_causal_mask(tokens: int, window: int) -> None:
    assert _pairs(tokens, window) == sum(min(i + 1, window) for i in range(tokens))


def test_experts_are_read_as_tokens_select_them() -> None:
    moe = costs(
        architectures=["Qwen3MoeForCausalLM"],
        head_dim=8,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
    )
    experts, router = 2 * 8 * 3 * 32 * 16, 2 * 32 * 8
    assert moe.experts == 4 * experts
    assert [moe.touched(n) for n in (1, 2, 3)] == pytest.approx([0.25, 0.4375, 0.578125])
    other = 4 * (2 * (QKV + OUT) + router + NORMS + 2 * 2 * 8 + HEAD)  # with the norms of queries and keys
    assert moe.decode(2, 1).bytes == other + 0.4375 * moe.experts + 2 * (KV + KV + 4 * 32)
    flops = 2 * (2 * (QKV + OUT) + router + experts / 4 + HEAD) + 2 * 4 * 4 * 8
    assert moe.decode(1, 1).flops == flops
    assert moe.touched(8192) == pytest.approx(1.0)


@pytest.mark.parametrize("name", [name for name, entry in published().items() if entry.parameters])
def test_published_models_have_their_published_parameter_counts(name: str) -> None:
    assert Costs.of(published_spec(name), 1, "bfloat16").parameters == published()[name].parameters


def test_minimax_m2_has_229_billion_parameters_and_ten_active() -> None:
    made = Costs.of(published_spec("minimax-m2"), 4, "bfloat16")
    assert made.parameters == pytest.approx(228.7e9, rel=1e-3)
    assert made.active == pytest.approx(10e9, rel=0.06)
    assert 4 * made.kv_token == 253_952  # as in the latency preset
    products = 62 * (3 * 256 * 1536 + (48 + 2 * 8 + 48) * 128) * 3072  # in FP8, with a scale for each 128
    bytes_ = 2 * made.parameters - (1 - 4 / 128) * products
    assert Costs.of(published_spec("minimax-m2"), 1, "bfloat16").weights == pytest.approx(bytes_, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "whole", "used"), [("gpt-oss-20b", 20.91e9, 3.61e9), ("gpt-oss-120b", 116.83e9, 5.13e9)]
)
def test_gpt_oss_matches_its_model_card(name: str, whole: float, used: float) -> None:
    made = Costs.of(published_spec(name), 1, "bfloat16")
    assert (made.parameters, made.active) == (pytest.approx(whole, rel=1e-3), pytest.approx(used, rel=1e-3))


def test_a_latent_is_read_once_and_each_shard_has_all_of_it() -> None:
    one, four = (Costs.of(published_spec("deepseek-v2-lite"), tp, "bfloat16") for tp in (1, 4))
    assert one.kv_token == four.kv_token == 27 * (512 + 64) * 2  # as in the latency preset
    more = one.decode(1, 11).flops - one.decode(1, 10).flops
    assert more == 27 * 2 * 16 * (576 + 512)
    assert four.decode(1, 11).flops - four.decode(1, 10).flops == more / 4


def test_hand_computed_8_bit_weights() -> None:
    spec = spec_from_config(SIZES)
    plain, narrow = Costs.of(spec, 1, "float32"), Costs.of(spec.quantized_as("int8"), 1, "float32")
    scales = 2 * ((4 + 2 * 2) * 8 + 32 + 2 * 64 + 32)  # one for each output of each matrix
    assert narrow.every == MATRICES + 4 * (NORMS + scales)
    assert (narrow.parameters, narrow.token) == (plain.parameters, plain.token)


def test_the_roofline_is_the_slower_of_two_terms() -> None:
    device = devices()["h200"]
    assert LayerWork(4.8e9, 0.0).seconds(device) == pytest.approx(1e-3)
    assert LayerWork(4.8e9, 989e10).seconds(device) == pytest.approx(1e-2)
    assert (LayerWork(4.8e9, 0.0).bound(device), LayerWork(4.8e9, 989e10).bound(device)) == ("bytes", "FLOPs")


def test_counted_activations_are_close_to_the_compilers_plan() -> None:
    """Compare with the temporaries recorded by the compile gate plus the hidden states between segments."""
    recorded = json.loads(bounds.FILE.read_text())["h200"]["0.11 ptxas 13.5.37"]
    seen = 0
    for name, bound in recorded.items():
        model, _, rest = name.partition(" tp")
        if model not in published():
            continue
        tp, kind = rest.split(" ", 1)
        spec = published_spec(model)
        if kind not in ("prefill", "draw") or spec.latent is not None:
            continue
        counted = Activations.counted(spec, int(tp), "bfloat16", 8192, 256)
        if kind == "draw":
            assert counted.draw - adjusted(spec, 256) == pytest.approx(bound["temp"], rel=0.02), name
        else:
            assert counted.step == pytest.approx(bound["temp"] + 8192 * spec.dim * 2, rel=0.15), name
        seen += 1
    assert seen >= 10
    assert adjusted(published_spec("llama3-8b"), 256) == pytest.approx(
        recorded["draw fully llama3 r256"]["temp"], rel=0.02
    )


def test_devices_agree_with_the_compile_gate() -> None:
    for device in devices().values():
        if device.target is not None:
            assert device.memory == TARGETS[device.target].memory
