"""Settings for all tests, as environment variables, and shared fixtures.

With environment variables, jax is imported only by tests that need it, and servers started by tests
inherit them.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import itertools
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import hypothesis
import pytest

pytest.register_assert_rewrite("tests.support")
ROOT = Path(__file__).resolve().parent.parent

# The same examples on every run: few in the bare one, all with `-m full`. HYPOTHESIS_PROFILE=random looks for
# new ones. tests/support/examples.py scales explicit numbers of examples.
DRAWN: dict[str, Any] = {"deadline": None, "database": None, "derandomize": True}
hypothesis.settings.register_profile("bare", **DRAWN, max_examples=16, print_blob=True)
hypothesis.settings.register_profile("full", **DRAWN, max_examples=100, print_blob=True)
# For scripts/mutants, which needs a failing example but not a small one.
FIRST = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
hypothesis.settings.register_profile("first", **DRAWN, max_examples=100, phases=FIRST)
hypothesis.settings.register_profile("random", deadline=None, max_examples=500, print_blob=True)


def pytest_configure(config: pytest.Config) -> None:
    """Configure jax before any test module is imported."""
    early = [name for name in ("jax", "jaxlib") if name in sys.modules]
    if early:
        raise pytest.UsageError(f"{early} imported before tests/conftest.py could configure jax: which plugin did it?")
    marks = str(config.getoption("markexpr", default=""))
    if "gpu" not in marks or "not gpu" in marks:
        os.environ["JAX_PLATFORMS"] = "cpu"
        # What tests compile on demand is optimized as much as what a server compiles ahead (`options_for`).
        os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=1")
    whole = "full" in marks.replace("not full", "")
    hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "full" if whole else "bare"))
    defaults = {
        "JAX_NUM_CPU_DEVICES": "8",
        # An implicit broadcast is an error. Strict dtype promotion would be too, but optax's adamw computes
        # int32 step * float (jax 0.10, optax 0.2.8), so the training tests could not run under it.
        "JAX_NUMPY_RANK_PROMOTION": "raise",
        # Shared by the processes of a run and by later runs; keyed by jax on the program, its flags
        # and versions.
        "JAX_COMPILATION_CACHE_DIR": str(Path(tempfile.gettempdir()) / f"jaxserve-tests-{os.getuid()}"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",  # compiling takes longer than loading for the smallest too
        "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "0",  # operations without their call stack, a tenth of the time of a load
        "HF_HUB_OFFLINE": "1",  # no test uses the network
        "TOKENIZERS_PARALLELISM": "false",
        "MPLBACKEND": "Agg",
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    # jax writes an entry in place: an early reader sees half of it, warns, and compiles.
    config.addinivalue_line("filterwarnings", "ignore:Error reading persistent compilation cache entry")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return the number of workers for `-n auto`, the default."""
    from tests.support import workers

    return workers.number(config)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Assign files that share an engine to one worker, unless --dist is given."""
    from tests.support import workers

    return workers.Grouped(config, log) if config.option.dist == "load" else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort tests by groups if there are workers, which must all see the same order."""
    if hasattr(config, "workerinput"):
        from tests.support import workers

        items.sort(key=lambda item: workers.place(item.nodeid.partition("::")[0]))


MAPS, OFTEN = Path("/proc/self/maps"), 25
MEMORY, HELD = Path("/proc/self/statm"), 2 << 30  # bytes that a worker may hold before it forgets compiled programs
GROWN = 512 << 20  # bytes more than were left the last time: forgetting takes seconds, and what is in use stays
_left = [0]
_tests = itertools.count(1)


@pytest.fixture(autouse=True)
def _few_mappings() -> Iterator[None]:
    """Forget compiled programs before the process runs out of memory mappings.

    Every program compiled by XLA for a CPU keeps some memory mapped. A process may have 65,530
    mappings, and whole matrices of kernels need more.
    """
    yield
    if next(_tests) % OFTEN == 0:
        let_go(40_000)


@pytest.fixture(autouse=True, scope="module")
def _little_memory() -> None:
    """Forget compiled programs between files if the worker holds much memory, since workers share a machine."""
    if resident() > max(HELD, _left[0] + GROWN):
        gc.collect()
        let_go(0)
        give_back()
        _left[0] = resident()


def resident() -> int:
    """Return the bytes of memory that this process holds; 0 where the system does not say."""
    return int(MEMORY.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if MEMORY.exists() else 0


def give_back() -> None:
    """Give memory that is free back to the system: glibc keeps what many compilations have left in pieces."""
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def let_go(most: int) -> None:
    """Forget compiled programs of jax if the process has more than `most` memory mappings.

    A live engine compiles its programs again, and counts that.
    """
    jax = sys.modules.get("jax")
    if jax is not None and MAPS.exists() and MAPS.read_bytes().count(b"\n") > most:
        jax.clear_caches()


@pytest.fixture(scope="session")
def compiled_is_let_go() -> Callable[[int], None]:
    """Return `let_go`, for folders that call it at other times."""
    return let_go


@pytest.fixture(scope="session")
def repo() -> Path:
    """The root of the checkout."""
    return ROOT


@pytest.fixture(scope="session")
def load_file(repo: Path) -> Callable[[str], ModuleType]:
    """A function that imports a Python file outside packages by its path in the checkout."""

    def load(path: str) -> ModuleType:
        name = Path(path).stem
        spec = importlib.util.spec_from_file_location(name, repo / path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses look up their own module there
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture(scope="session")
def traces() -> Path:
    """The folder of public request traces (azure/ burstgpt/ mooncake/ servegen/), which is not in the repository."""
    named = os.environ.get("JAXSERVE_TRACES")
    places = [Path(named)] if named else [ROOT / "shared" / "traces", ROOT.parent / "shared" / "traces"]
    for place in places:
        if place.is_dir():
            return place
    pytest.skip(f"no traces in {', '.join(map(str, places))}; JAXSERVE_TRACES names their folder")
