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


@pytest.mark.parametrize("backend", ["mosaic_gpu", "tpu", "xla"])
def test_only_xla_reads_a_shared_prefix_once(backend: str) -> None:
    backends = Backends(attention=Choice(backend, SPEC))
    assert not backends.cascade("off")
    assert backends.cascade("auto") == (backend == "xla")
    if backend == "xla":
        assert backends.cascade("on")
        return
    with pytest.raises(InvalidValue, match=backend) as caught:
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
