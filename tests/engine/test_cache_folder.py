"""An unwritable compile cache folder is reported once and counted, and the engine still serves."""

from __future__ import annotations

import logging

import jax
import pytest
from jax._src import compiler

from jaxserve.engine.startup import compiled
from jaxserve.engine.startup.compiled import compile_counter, use_persistent_cache, why_not_writable


@pytest.fixture
def unchanged():
    """Restore what the test changes in jax and in the counter of this process."""
    before, writable = jax.config.jax_compilation_cache_dir, compile_counter().writable
    yield
    jax.config.update("jax_compilation_cache_dir", before)
    compile_counter().writable = writable


@pytest.mark.parametrize(("given", "kept"), [(None, 0), ("3", 10)])
def test_programs_are_kept_without_call_stacks_unless_asked_for(tmp_path, monkeypatch, unchanged, given, kept):
    before = jax.config.jax_traceback_in_locations_limit
    monkeypatch.delenv(compiled.FRAMES)
    if given is not None:
        monkeypatch.setenv(compiled.FRAMES, given)
    try:
        jax.config.update(compiled.FRAMES.lower(), 10)
        use_persistent_cache(tmp_path)
        assert jax.config.jax_traceback_in_locations_limit == kept
    finally:
        jax.config.update(compiled.FRAMES.lower(), before)


def test_an_unwritable_cache_folder_is_reported_once(tmp_path, caplog, unchanged):
    (tmp_path / "file").write_text("not a folder")
    folder, counter = tmp_path / "file" / "cache", compile_counter()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):  # two engines in a process
            assert use_persistent_cache(folder) == folder
    (record,) = caplog.records
    assert str(folder) in record.getMessage() and "JAXSERVE_CACHE_DIR" in record.getMessage()
    assert counter.unkept_total == counter.compilations_total
    compiled.use_persistent_cache(tmp_path / "new" / "cache")
    assert counter.unkept_total == 0 and why_not_writable(tmp_path / "new" / "cache") is None


def test_results_of_autotuning_are_stored_beside_the_programs(tmp_path, unchanged):
    """jax does this by default; XLA then measures a matrix product of a changed program once per GPU kind."""
    use_persistent_cache(tmp_path)
    made = compiler.get_compile_options(num_replicas=1, num_partitions=1)
    build = made.executable_build_options  # kept: its options are views
    options = build.debug_options
    assert options.xla_gpu_per_fusion_autotune_cache_dir == str(tmp_path / "xla_gpu_per_fusion_autotune_cache_dir")
