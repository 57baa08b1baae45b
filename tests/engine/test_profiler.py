"""Profiles that cannot be written."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from jaxserve.engine.runtime.profiler import Profiler
from jaxserve.errors import JaxserveError


def test_a_profile_that_a_full_disk_does_not_take_prevents_no_other(tmp_path: Path) -> None:
    profiler = Profiler(str(tmp_path))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    assert profiler.set(True)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(JaxserveError, match="failed"):
            profiler.set(False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert profiler.set(True) and profiler.set(False)
    assert list(tmp_path.rglob("*.trace.json.gz"))
