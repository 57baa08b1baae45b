"""What settings of `ServeConfig` may be, where a range or a list says it."""

from __future__ import annotations

# name, least, most (None: any)
RANGES: tuple[tuple[str, float, float | None], ...] = (
    ("max_model_len", 2, None),
    ("max_num_seqs", 1, None),
    ("max_num_batched_tokens", 1, None),
    ("max_num_queued_reqs", 1, None),
    ("queue_timeout", 0, None),
    ("preempt_depth", 1, None),
    ("block_size", 1, None),
    ("kv_cache_memory", 1, None),
    ("profile_time", 0.01, None),
    ("port", 0, 65535),
    ("gpu_memory_utilization", 0.01, 1),
)

CHOICES: tuple[tuple[str, tuple[str | None, ...]], ...] = (
    ("dtype", ("auto", "float32", "bfloat16")),
    ("load_format", ("auto", "safetensors", "orbax", "dummy")),
    ("mode", ("auto", "disaggregated", "colocated")),
    ("attention_backend", ("auto", "mosaic_gpu", "tpu", "xla")),
    ("experts_backend", ("auto", "mosaic_gpu", "xla")),
    ("products_backend", ("auto", "mosaic_gpu", "xla")),
    ("sampling_backend", ("auto", "mosaic_gpu", "xla")),
    ("first_token", ("prefill", "decode")),
    ("log_level", ("debug", "info", "warning", "error")),
    ("quantization", (None, "int8", "fp8", "fp8_per_block")),
    ("kv_cache_dtype", ("auto", "bfloat16", "float16", "float32", "fp8", "fp8_e4m3", "int8")),
)
