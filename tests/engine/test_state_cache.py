"""Settings and memory of a model with a state per request."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from jaxserve.capacity.costs import Costs
from jaxserve.config import ServeConfig
from jaxserve.engine.memory import kv
from jaxserve.engine.startup.stateful import fitting
from jaxserve.errors import InvalidValue
from jaxserve.models.published import published_spec
from tests.support.parity.law import SPEC

SPEC_80B = published_spec("qwen3-next-80b-a3b")
STATE = 36 * 4 * (32 * 128 * 128 + 3 * (2 * 16 + 32) * 128)  # bytes: matrices and the inputs of convolutions


@pytest.mark.parametrize(
    "given",
    [
        {"speculative_config": '{"method": "ngram", "num_speculative_tokens": 3}'},
        {"kv_cache_dtype": "fp8"},
        {"kv_cache_dtype": "int8"},
        {"kv_host_memory": "1GiB"},
        {"kv_disk": "folder", "kv_disk_size": "1GiB", "kv_host_memory": "1GiB"},
    ],
)
def test_what_a_state_cannot_do_is_refused_by_name(given: dict[str, Any]) -> None:
    config = ServeConfig.load(**given)
    assert fitting(config, SPEC) is config
    with pytest.raises(InvalidValue, match="keep a state per request") as refused:
        fitting(config, SPEC_80B)
    assert refused.value.param in given


def test_prefix_caching_is_switched_off() -> None:
    config = ServeConfig.load()
    assert fitting(config, SPEC_80B) == replace(config, enable_prefix_caching=False)


def test_states_take_memory_before_pages_do() -> None:
    assert kv.without_states(SPEC_80B, 256, 100 << 30) == (100 << 30) - 256 * STATE
    assert kv.without_states(SPEC, 256, 1000) == 1000
    with pytest.raises(InvalidValue, match="lower max_num_seqs"):
        kv.without_states(SPEC_80B, 256, 256 * STATE)
    costs = Costs.of(SPEC_80B, 4, "bfloat16")
    assert costs.state == STATE / 4 and costs.kv_token == 12 * 2 * 2 * 256 * 2 * 2 / 4  # kv heads have copies


def test_heads_of_linear_attention_must_divide() -> None:
    with pytest.raises(InvalidValue, match="heads of linear attention"):
        replace(SPEC_80B, heads=32, delta=replace(SPEC_80B.delta, key_heads=2, value_heads=4)).for_tp(4)  # type: ignore[type-var]
