"""Models of every family, as wide as the Hopper kernels need, and the law of tokens on warm engines of one device."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import jax

from jaxserve.engine.startup.compiled import COMPILE
from jaxserve.models import registry
from jaxserve.sched.api.params import SamplingParams
from tests.support.parity.asks import ROOMY, TIGHT, asks
from tests.support.parity.law import LENGTH, Ask, Model, Setup, compare

CLOSE = 0.6  # a score of 64 to 128 is exact to 0.25 in bfloat16
STOPPED = 0.2  # largest share of comparisons that a close call may stop; chosen before any run on a GPU
INTERPRETED = {"jit(less)"}  # the interpreter of Mosaic kernels compares a count of copies with an array
SIZES: dict[str, Any] = {
    "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "intermediate_size": 256, "vocab_size": 256, "max_position_embeddings": LENGTH, "eos_token_id": 7,
    "tie_word_embeddings": False,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen3": {"head_dim": 128},
    "Gemma3": {
        "head_dim": 256, "sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 256, "hidden_activation": "gelu_pytorch_tanh",
    },
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 20},
    "OPT": {"ffn_dim": 256},
    "MiniMaxM2": {"num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 32},
    "DeepseekV2": {
        "num_key_value_heads": 4, "kv_lora_rank": 128, "q_lora_rank": None, "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 64, "v_head_dim": 32, "first_k_dense_replace": 1, "n_routed_experts": 4,
        "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "topk_method": "greedy",
        "norm_topk_prob": False,
    },
}  # fmt: skip
SCHEDULES = (("1x1", 64, TIGHT, "unified"), ("1x1", 16, TIGHT, "distserve"), ("2x1", 32, ROOMY, "distserve"))


@cache
def model(name: str) -> Model:
    config = {**SIZES, **FAMILIES[name], "architectures": [f"{name}ForCausalLM"]}
    return Model(registry.spec_from_config(config), "bfloat16", CLOSE)


def pressing() -> list[Ask]:
    """Return requests of all kinds, and some that together need more pages than `TIGHT`."""
    draw, params = random.Random(7), SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)
    return asks(1, 6) + [Ask(tuple(draw.randrange(8, 256) for _ in range(70)), params) for _ in range(4)]


def hold(model: Model, requests: Sequence[Ask], backend: str, mesh: str = "2x1", **options: Any) -> None:
    """Assert the law with a backend, and that nothing compiles after warm-up.

    `mesh`: the largest, 1x1 or 2x1, whose instances share the device if there is only one. All
    schedules run on the programs that one warm-up compiled: chunk sizes and pages are those of the
    schedulers.
    """
    backends = dict.fromkeys(("attention_backend", "sampling_backend"), backend)
    if model.spec.moe is not None:
        backends["experts_backend"] = backend
    engine = Setup(mesh, 64, ROOMY, model=model, share_devices=True, warm=True, **backends, **options)
    with compilations() as compiled:
        alone = engine.narrowed("1x1", 64, ROOMY).each(requests)
        schedules = [schedule for schedule in SCHEDULES if schedule[0] in ("1x1", mesh)]
        runs = [engine.narrowed(*narrow).run(requests, policy) for *narrow, policy in schedules]
    late = set(compiled) - (INTERPRETED if options.get("interpret") else set())
    assert not late, f"compiled after warm-up: {late}"
    drops = 0
    for (served, cluster), (instances, *_) in zip(runs, schedules, strict=True):
        assert all(request.finish_reason in ("stop", "length") for request in served)
        if instances == "2x1":
            assert cluster.kv_transfers.transfers > 0, "no KV was transferred"
        drops += sum(request.drops for request in served)
    # `unified` may serve them one after the other, if the machine is too slow for their objectives; `distserve` not
    assert drops or list(requests) != pressing(), "no request was preempted"
    stopped = sum(compare(requests, served, alone, model) for served, _ in runs)
    assert stopped <= STOPPED * len(runs) * len(requests), f"{stopped} comparisons stopped at a close call"


@contextmanager
def compilations() -> Iterator[list[str]]:
    """Collect the names of the programs that are compiled, or loaded from the cache, inside the block."""
    found: list[str] = []

    def heard(event: str, _: float, fun_name: str = "?", **more: Any) -> None:
        if event == COMPILE:
            found.append(fun_name)

    jax.monitoring.register_event_duration_secs_listener(heard)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(heard)
