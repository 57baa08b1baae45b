"""Cascade attention is on only where it is asked for and the attention kernels have it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jaxserve.engine.programs.backends import Backends
from jaxserve.engine.programs.inputs import Bucket, Layout, Limits
from jaxserve.errors import InvalidValue
from jaxserve.sched.api.plan import LEAST_SHARING
from pallas_kernels.attention.api import AttentionSpec, Choice

LIMITS = Limits(slots=8, tokens=64, pages=32, page_size=16, row_pages=4, vocab=100)
SPEC = AttentionSpec("float32", 4, 2, 64, 16, platform="cpu")


LATENT = replace(SPEC, kv_heads=1, head_dim=576, latent=512)


@pytest.mark.parametrize(
    "choice", [None, Choice("xla", SPEC), Choice("xla", LATENT), Choice("mosaic_gpu", SPEC)], ids=str
)
def test_these_kernels_read_a_shared_prefix_once(choice: Choice | None) -> None:
    backends = Backends(attention=choice)
    assert backends.cascade("on") and backends.cascade("auto") and not backends.cascade("off")


@pytest.mark.parametrize(
    ("choice", "why"),
    [(Choice("tpu", SPEC), "backend tpu"), (Choice("mosaic_gpu", LATENT), r"latent KV cache \(MLA\)")],
)
def test_other_kernels_say_why_not(choice: Choice, why: str) -> None:
    backends = Backends(attention=choice)
    assert not backends.cascade("auto") and not backends.cascade("off")
    with pytest.raises(InvalidValue, match=why) as caught:
        backends.cascade("on")
    assert caught.value.param == "cascade_attention"


def test_programs_are_as_many_as_without_it() -> None:
    cascade = replace(LIMITS, cascade=True)
    assert cascade.buckets == LIMITS.buckets
    for bucket in cascade.buckets:
        groups = bucket.rows // LEAST_SHARING
        more = bucket.rows + 2 * groups if groups else 0
        assert Layout.of(bucket, cascade).end == Layout.of(bucket, LIMITS).end + more


def test_a_step_of_few_rows_has_no_groups() -> None:
    bucket = Bucket(LEAST_SHARING - 1, LEAST_SHARING - 1, 8, True)
    assert Layout.of(bucket, LIMITS) == Layout.of(bucket, replace(LIMITS, cascade=True))
