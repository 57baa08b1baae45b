"""KV tiers of a real engine: the same tokens, no compilation, every page accounted for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxserve.config import ServeConfig
from jaxserve.engine.engine import Engine
from jaxserve.engine.memory import host_pages
from jaxserve.engine.runtime.gc_control import uncollected
from jaxserve.engine.runtime.info import Stats
from jaxserve.engine.startup import assemble as assembling
from jaxserve.engine.startup import tiers
from jaxserve.engine.startup.assemble import Machine, assemble
from jaxserve.errors import InvalidValue
from jaxserve.sched.api.params import SamplingParams
from tests.support.engine.faults import Submitted
from tests.support.engine.fetches import wait_for_pages
from tests.support.server.live import ALONE

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=6, seed=5, ignore_eos=True)
PROMPTS = [[(7 * start + at * at) % 200 + 5 for at in range(250)] for start in range(5)]
FULL = 250 // 16  # pages of a prompt that can be found again
PAGES = 34  # that the scheduler sees: for two of the prompts with their outputs
ROOM = 64 << 20
Tokens, Settings = list[list[int]], dict[str, Any]


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    """An executor of the same size as other tests have, whose programs are in the cache."""
    made = assemble(ServeConfig.load(mesh="1x1", preempt_boundary="chunk", **ALONE))
    with uncollected():  # objects stay frozen from one engine to the next: each would scan all of them at its start
        yield made
    executor = made.executors[0]
    executor._movers.shutdown()


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    wait_for_pages(monkeypatch)


@contextmanager
def engine(machine: Machine, **settings: Any) -> Iterator[Engine]:
    limits = replace(machine.limits, pages=PAGES)
    serving = Engine.on(machine.serving(replace(machine.config, **settings), limits))
    try:
        yield serving
        serving.check()
    finally:
        serving.close()


def served(machine: Machine, rounds: int = 2, **settings: Any) -> tuple[Tokens, Stats]:
    """Serve all prompts one after the other, and return their tokens and the last statistics."""
    outputs = []
    with engine(machine, **settings) as serving:
        for _ in range(rounds):
            for number, prompt in enumerate(PROMPTS):
                outputs.append(Submitted(serving, SAMPLED if number % 2 else GREEDY, prompt).whole())
                serving.run(serving.copied)
        return outputs, serving.stats()


@pytest.fixture
def disk(tmp_path: Path) -> Settings:
    return {"kv_disk": str(tmp_path), "kv_disk_size": ROOM}


@pytest.fixture(scope="module")
def alone(machine: Machine) -> Tokens:
    """The tokens without tiers."""
    return served(machine)[0]


@pytest.mark.parametrize("pinned", [False, True])
def test_host_memory_changes_no_token(
    machine: Machine, alone: Tokens, pinned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiers, "pins", lambda device: pinned)
    outputs, stats = served(machine, kv_host_memory=ROOM)
    host = stats.kv_tiers["host"]
    assert outputs == alone and stats.compilations_after_warmup == 0
    assert host.hits == stats.prefix_fetch_pages == FULL * len(PROMPTS) and stats.prefix_fetches == len(PROMPTS)
    assert host.pages == host.stores >= FULL * len(PROMPTS) and host.bytes == host.pages * (host.bytes // host.pages)
    assert stats.prefix_fetch_failures == host.missing == stats.kv_copies_skipped == 0


def test_pages_on_disk_are_found_after_a_restart(machine: Machine, alone: Tokens, disk: Settings) -> None:
    outputs, first = served(machine, **disk)
    again, second = served(machine, 1, **disk)
    assert outputs == alone and again == alone[: len(PROMPTS)]
    assert first.compilations_after_warmup == second.compilations_after_warmup == 0
    assert first.kv_tiers["disk"].hits == second.kv_tiers["disk"].hits == FULL * len(PROMPTS)
    assert second.kv_tiers["disk"].stores == 0 and second.kv_tiers["disk"].pages == first.kv_tiers["disk"].pages


def test_damaged_and_missing_files_are_computed_again(
    machine: Machine, alone: Tokens, disk: Settings, tmp_path: Path
) -> None:
    served(machine, 1, **disk)
    files = sorted(path for path in tmp_path.rglob("*") if path.is_file() and path.name != "lock")
    for number, path in enumerate(files):
        if number % 4 == 0:
            data = bytearray(path.read_bytes())
            data[-1 - number] ^= 1
            path.write_bytes(data)
        elif number % 4 == 1:
            path.write_bytes(path.read_bytes()[:-1])
    outputs, stats = served(machine, 1, **disk)
    assert outputs == alone[: len(PROMPTS)] and stats.kv_tiers["disk"].missing > 0


def test_another_model_or_layout_finds_nothing(machine: Machine, disk: Settings, tmp_path: Path) -> None:
    served(machine, 1, **disk)
    same = tiers.model_digest(machine.config, machine.executors[0])
    assert same == tiers.model_digest(replace(machine.config, policy="vllm"), machine.executors[0])
    assert same != tiers.model_digest(replace(machine.config, load_format="dummy"), machine.executors[0])
    folder = tmp_path / same.hex()
    folder.rename(tmp_path / bytes(16).hex())
    _, stats = served(machine, 1, **disk)
    assert stats.kv_tiers["disk"].hits == 0


def test_a_small_host_tier_passes_pages_on_to_the_disk(machine: Machine, alone: Tokens, disk: Settings) -> None:
    outputs, stats = served(machine, kv_host_memory=2 << 20, **disk)
    host, disk = stats.kv_tiers["host"], stats.kv_tiers["disk"]
    assert outputs == alone and host.evictions > 0 and disk.hits > 0
    assert host.bytes <= 2 << 20


def test_a_restart_finds_what_host_memory_held(machine: Machine, alone: Tokens, disk: Settings) -> None:
    both = {"kv_host_memory": ROOM, **disk}
    _, first = served(machine, 1, **both)
    again, second = served(machine, 1, **both)
    assert first.kv_tiers["disk"].pages == 0 and again == alone[: len(PROMPTS)]
    assert second.kv_tiers["disk"].hits == FULL * len(PROMPTS) and second.compilations_after_warmup == 0


def test_closing_writes_for_a_bounded_time(machine: Machine, disk: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembling, "FLUSHING", 0.0)
    both = {"kv_host_memory": ROOM, **disk}
    served(machine, 1, **both)
    assert served(machine, 1, **both)[1].kv_tiers["disk"].pages == 0


def test_resetting_the_prefix_cache_forgets_the_tiers(machine: Machine, disk: Settings, tmp_path: Path) -> None:
    with engine(machine, kv_host_memory=1 << 20, **disk) as serving:
        for prompt in PROMPTS:
            Submitted(serving, GREEDY, prompt).whole()
            serving.run(serving.copied)
        assert serving.stats().kv_tiers["disk"].pages > 0
        assert serving.reset_prefix_cache()
        assert all(tier.pages == 0 for tier in serving.stats().kv_tiers.values())
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["lock"]


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"kv_disk": "x"}, "kv_disk"),
        ({"kv_disk_size": 1 << 30}, "kv_disk"),
        ({"kv_host_memory": -1}, "kv_host_memory"),
        ({"kv_host_memory": 1 << 30, "enable_prefix_caching": False}, "kv_host_memory"),
    ],
)
def test_settings_that_do_not_go_together_are_named(settings: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidValue, match=f"^{name}="):
        ServeConfig(**settings)


def test_a_tier_below_one_page_is_refused(machine: Machine) -> None:
    with pytest.raises(InvalidValue, match="kv_host_memory=5 must be at least"):
        machine.serving(replace(machine.config, kv_host_memory=5))


def test_a_folder_that_cannot_be_written_is_named(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidValue, match=r"kv_disk=.*cannot be used"):
        machine.serving(replace(machine.config, kv_disk=str(tmp_path / "file"), kv_disk_size=ROOM))


def test_pinned_memory_is_for_accelerators() -> None:
    assert not host_pages.pins(jax.devices("cpu")[0])
