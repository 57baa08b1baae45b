"""Settings of other engines and their equivalents here, for errors about unknown settings."""

from __future__ import annotations

from collections.abc import Callable

Setting = tuple[str, str | bool | None]  # name in ServeConfig, and a value to show if it differs

_MESH: tuple[Setting, ...] = (("mesh", "1xT"),)
_REPLICAS: tuple[Setting, ...] = (("mesh", "RxT"), ("mode", "colocated"))
_ROLES: tuple[Setting, ...] = (("mesh", "RxT"), ("prefill", "N"))

SETTINGS: dict[str, tuple[Setting, ...]] = {
    "tensor_parallel_size": _MESH,
    "tp": _MESH,
    "tp_size": _MESH,
    "data_parallel_size": _REPLICAS,
    "dp_size": _REPLICAS,
    "disaggregation_mode": _ROLES,
    "kv_transfer_config": _ROLES,
    "scheduling_policy": (("policy", None),),
    "schedule_policy": (("policy", None),),
    "model_path": (("model", None),),
    "tokenizer_path": (("tokenizer", None),),
    "context_length": (("max_model_len", None),),
    "max_running_requests": (("max_num_seqs", None),),
    "chunked_prefill_size": (("max_num_batched_tokens", None),),
    "mem_fraction_static": (("gpu_memory_utilization", None),),
    "page_size": (("block_size", None),),
    "max_queued_requests": (("max_num_queued_reqs", None),),
    "speculative_algorithm": (("speculative_config", None),),
    "disable_radix_cache": (("enable_prefix_caching", False),),
    "disable_cascade_attn": (("cascade_attention", "off"),),
    "random_seed": (("seed", None),),
    "kv_cache_memory_bytes": (("kv_cache_memory", None),),
}
# Settings without an equivalent, and why they are not needed.
NOT_NEEDED = {
    "trust_remote_code": "leave it out, code from a model's repository is never run",
    "enforce_eager": "leave it out, every step is compiled at startup",
    "enable_chunked_prefill": "leave it out, prompts are always computed in chunks of at most {max_num_batched_tokens}",
    "enable_auto_tool_choice": "leave it out, tools need no flag (--tool-call-parser chooses how calls are read)",
    "enable_reasoning": "leave it out, thinking is told from the answer (--reasoning-parser chooses how)",
    "swap_space": "leave it out, KV of preempted requests is recomputed",
}


def flag_hint(flag: str) -> str | None:
    """Return the replacement for another engine's flag; None if the name is unknown."""
    return _hint(flag.lstrip("-").replace("-", "_"), _as_flag)


def argument_hint(name: str) -> str | None:
    """Return the replacement for another engine's keyword argument; None if the name is unknown."""
    return _hint(name, _as_argument)


def _hint(name: str, shown: Callable[[str, str | bool | None], str]) -> str | None:
    if name in NOT_NEEDED:
        return NOT_NEEDED[name].format(max_num_batched_tokens=shown("max_num_batched_tokens", None))
    if name not in SETTINGS:
        return None
    return "use " + " with ".join(shown(setting, value) for setting, value in SETTINGS[name])


def _as_flag(name: str, value: str | bool | None) -> str:
    flag = name.replace("_", "-")
    if value is False:
        return f"--no-{flag}"
    return f"--{flag}" if value is None else f"--{flag} {value}"


def _as_argument(name: str, value: str | bool | None) -> str:
    if isinstance(value, str):
        return f'{name}="{value}"' if value != "N" else f"{name}={value}"
    return name if value is None else f"{name}={value}"
