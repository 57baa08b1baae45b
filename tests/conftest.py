"""Settings every test relies on. They are environment variables, so jax is imported only by tests that need it,
and a server started by a test inherits them."""

from __future__ import annotations

import gc
import importlib.util
import itertools
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import hypothesis
import pytest

pytest.register_assert_rewrite("tests.support")
ROOT = Path(__file__).resolve().parent.parent

# The same examples on every run: few in the bare one, all with `-m full`. HYPOTHESIS_PROFILE=random looks for
# new ones. tests/support/examples.py applies the same share to tests with a number of their own.
DRAWN: dict[str, Any] = {"deadline": None, "database": None, "derandomize": True}
hypothesis.settings.register_profile("bare", **DRAWN, max_examples=25, print_blob=True)
hypothesis.settings.register_profile("full", **DRAWN, max_examples=100, print_blob=True)
# For scripts/mutants: that an example fails is enough, it need not be small.
FIRST = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
hypothesis.settings.register_profile("first", **DRAWN, max_examples=100, phases=FIRST)
hypothesis.settings.register_profile("random", deadline=None, max_examples=500, print_blob=True)


def pytest_configure(config: pytest.Config) -> None:
    """Runs before any test module is imported, hence before jax reads its configuration."""
    early = [name for name in ("jax", "jaxlib") if name in sys.modules]
    if early:
        raise pytest.UsageError(f"{early} imported before tests/conftest.py could configure jax: which plugin did it?")
    marks = str(config.getoption("markexpr", default=""))
    if "gpu" not in marks or "not gpu" in marks:
        os.environ["JAX_PLATFORMS"] = "cpu"
    whole = "full" in marks.replace("not full", "")
    hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "full" if whole else "bare"))
    defaults = {
        "JAX_NUM_CPU_DEVICES": "8",
        # An implicit broadcast is an error. Strict dtype promotion would be too, but optax's adamw computes
        # int32 step * float (jax 0.10, optax 0.2.8), so the training tests could not run under it.
        "JAX_NUMPY_RANK_PROMOTION": "raise",
        # Shared by the processes of a run and by later runs; keyed by jax on the program, its flags and versions.
        "JAX_COMPILATION_CACHE_DIR": str(Path(tempfile.gettempdir()) / f"jaxserve-tests-{os.getuid()}"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
        "HF_HUB_OFFLINE": "1",  # no test reaches for the network
        "TOKENIZERS_PARALLELISM": "false",
        "MPLBACKEND": "Agg",
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    # jax writes an entry in place: a reader that comes too early sees half of it, warns, and compiles.
    config.addinivalue_line("filterwarnings", "ignore:Error reading persistent compilation cache entry")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """`-n auto`, which is the default."""
    from tests.support import workers

    return workers.number(config)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Files that share an engine are one worker's. An explicit --dist has its way."""
    from tests.support import workers

    return workers.Grouped(config, log) if config.option.dist == "load" else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort by groups where there are workers: every worker must see the same order."""
    if hasattr(config, "workerinput"):
        from tests.support import workers

        items.sort(key=lambda item: workers.place(item.nodeid.partition("::")[0]))


MAPS, OFTEN = Path("/proc/self/maps"), 25
MEMORY, HELD = Path("/proc/self/statm"), 2 << 30  # bytes that a worker may hold before it lets go
_tests = itertools.count(1)


@pytest.fixture(autouse=True)
def _few_mappings() -> Iterator[None]:
    """Every program that XLA compiles for a CPU keeps some memory mapped. A process may have 65,530 mappings: whole
    matrices of kernels need more, and the process dies. What is compiled is let go of before that."""
    yield
    if next(_tests) % OFTEN == 0:
        let_go(40_000)


@pytest.fixture(autouse=True, scope="module")
def _little_memory() -> None:
    """Between files a worker lets go of what is compiled where it holds much: several of them share a machine."""
    if MEMORY.exists() and int(MEMORY.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") > HELD:
        gc.collect()
        let_go(0)


def let_go(most: int) -> None:
    """Forget what jax has compiled where that maps more than `most` pieces of memory. An engine that lives on compiles
    its programs again, and counts that."""
    jax = sys.modules.get("jax")
    if jax is not None and MAPS.exists() and MAPS.read_bytes().count(b"\n") > most:
        jax.clear_caches()


@pytest.fixture(scope="session")
def compiled_is_let_go() -> Callable[[int], None]:
    """`let_go`, for folders that do it at a time of their own."""
    return let_go


@pytest.fixture(scope="session")
def repo() -> Path:
    """Root of the checkout."""
    return ROOT


@pytest.fixture(scope="session")
def load_file(repo: Path) -> Callable[[str], ModuleType]:
    """Imports a Python file that is in no package, by its path in the checkout."""

    def load(path: str) -> ModuleType:
        name = Path(path).stem
        spec = importlib.util.spec_from_file_location(name, repo / path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses look themselves up there
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture(scope="session")
def traces() -> Path:
    """Folder of public request traces (azure/ burstgpt/ mooncake/ servegen/), which the repository does not hold."""
    named = os.environ.get("JAXSERVE_TRACES")
    places = [Path(named)] if named else [ROOT / "shared" / "traces", ROOT.parent / "shared" / "traces"]
    for place in places:
        if place.is_dir():
            return place
    pytest.skip(f"no traces in {', '.join(map(str, places))}; JAXSERVE_TRACES names their folder")
