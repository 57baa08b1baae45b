"""Fit of a model on a mesh of devices: memory left for KV, and the load that it can serve."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from jaxserve.capacity.activations import Activations
from jaxserve.capacity.costs import Costs, LayerWork
from jaxserve.capacity.devices import Device
from jaxserve.engine.memory import kv
from jaxserve.models.spec import ModelSpec
from jaxserve.sched.api.errors import InvalidValue

MOST = 64  # largest number of devices per instance to try
ENOUGH = 0.8  # share of the best tokens/s that a smaller T must reach, because the floor omits collectives


@dataclass(frozen=True, slots=True)
class Setting:
    """The devices, the engine's limits, and the load."""

    device: Device
    name: str  # of the device
    count: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    page_size: int
    utilization: float
    kv_cache_memory: int | None  # bytes of all pools together; None: all that is left
    dtype: Any
    kv_cache_dtype: str  # as for `kv.pool_dtype`
    context: int  # tokens that a running decode attends to
    prompt: int  # tokens of a prompt
    tpot: float  # seconds


@dataclass(frozen=True, slots=True)
class Batch:
    """The largest decode step of one instance, and what limits it."""

    rows: int
    seconds: float  # the floor
    limit: str  # "TPOT" or "KV"


@dataclass(frozen=True, slots=True)
class Fit:
    """A model on a mesh of `instances` times `tp` devices. Bytes are per device."""

    instances: int
    tp: int
    costs: Costs | None  # None: the model cannot be split over tp devices
    activations: Activations | None
    pool: int  # bytes of KV pages
    pages: int  # of one instance
    page_size: int
    batch: Batch | None  # None: even one row exceeds the TPOT
    refusal: str  # why an engine would not start; "": it would

    @property
    def mesh(self) -> str:
        return f"{self.instances}x{self.tp}"

    @property
    def fits(self) -> bool:
        return not self.refusal

    @property
    def tokens(self) -> int:
        """The KV tokens that fit one instance."""
        return self.pages * self.page_size

    @property
    def rate(self) -> float:
        """The tokens/s of all instances at their largest batch, as an upper bound."""
        return 0.0 if self.batch is None else self.instances * self.batch.rows / self.batch.seconds


def fit(spec: ModelSpec, setting: Setting, instances: int, tp: int, measured: Activations | None = None) -> Fit:
    """Compute the fit of a model on a mesh. measured: activations of compiled programs, not estimates."""
    found = Fit(instances, tp, None, None, 0, 0, setting.page_size, None, "")
    try:
        costs = Costs.of(spec, tp, setting.dtype, kv.pool_dtype(setting.kv_cache_dtype, setting.dtype))
        tokens, rows = setting.max_num_batched_tokens, setting.max_num_seqs
        held = measured or Activations.counted(spec, tp, setting.dtype, tokens, rows)
        found = replace(found, costs=costs, activations=held)
        room, name = _room(setting, instances, tp, costs, held)
        room = kv.without_states(costs.spec, setting.max_num_seqs, room)
        page = kv.page_bytes(costs.spec, setting.page_size, costs.cache_dtype)
        found = replace(found, pool=room // tp, pages=room // page)
        pages = kv.fit_pages(
            costs.spec,
            setting.page_size,
            costs.cache_dtype,
            pool_bytes=room,
            max_model_len=setting.max_model_len,
            name=name,
        )
    except InvalidValue as error:
        return replace(found, refusal=str(error))
    return replace(found, pool=pages * page // tp, pages=pages, batch=largest(costs, setting, pages))


def _room(setting: Setting, instances: int, tp: int, costs: Costs, held: Activations) -> tuple[int, str]:
    """Return the bytes for an instance's pool, and the setting that decides them."""
    if setting.device.platform == "cpu" or setting.kv_cache_memory is not None:
        return _told(setting, instances, tp, costs, held), "kv_cache_memory"
    name = "gpu_memory_utilization"
    return kv.pool_bytes(
        setting.device.memory,
        tp,
        utilization=setting.utilization,
        weights=costs.weights,
        temporaries=held.bytes,
        where=setting.name,
    ), name


def _told(setting: Setting, instances: int, tp: int, costs: Costs, held: Activations) -> int:
    """Return the bytes for an instance's pool if set explicitly, or on a CPU with its shared memory."""
    memory, total = setting.device.memory, setting.kv_cache_memory
    on_cpu = setting.device.platform == "cpu"
    weights = costs.weights * (tp if on_cpu else 1)  # instances share one copy
    if total is None:
        total = min(kv.MOST_ON_CPU, max(0, int(memory - weights)) // 4)
    pools = total if on_cpu else total // (instances * tp)
    if weights + held.bytes + pools > memory:
        raise InvalidValue(
            f"weights of {weights} bytes, a step's temporaries of {held.bytes} and KV pools of {pools} exceed "
            f"the {memory:.0f} bytes of {setting.name}: lower kv_cache_memory",
            "kv_cache_memory",
        )
    return kv.cpu_pool_bytes(total, instances)


def largest(costs: Costs, setting: Setting, pages: int) -> Batch | None:
    """Find the most rows that meet the TPOT and fit the pool; None if one row is too slow."""

    def seconds(rows: int) -> float:
        return costs.decode(rows, setting.context).seconds(setting.device)

    fitting = pages // -(-setting.context // setting.page_size)
    if costs.state:  # there are states for so many requests
        fitting = min(fitting, setting.max_num_seqs)
    if fitting < 1 or seconds(1) > setting.tpot:
        return None
    low, high = 1, fitting
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if seconds(middle) <= setting.tpot else (low, middle - 1)
    return Batch(low, seconds(low), "KV" if low == fitting else "TPOT")


def choose(fits: list[Fit]) -> tuple[Fit, str] | None:
    """Choose a mesh and give the reason; None if no mesh fits."""
    able = [option for option in fits if option.fits]
    if not able:
        return None
    best = max(able, key=lambda option: option.rate)
    if not best.rate:
        wide = max(able, key=lambda option: option.tp)
        return wide, "no mesh meets the TPOT even with one row; the widest is the fastest"
    taken = min((option for option in able if option.rate >= ENOUGH * best.rate), key=lambda option: option.tp)
    if len(able) == 1:
        return taken, "the only one that fits"
    if taken is best:
        return taken, "the most tokens/s within the TPOT; a smaller T is more than a fifth slower"
    return taken, (
        f"the smallest T within a fifth of the most tokens/s ({best.mesh} has {best.rate / taken.rate:.2f} times as "
        "many): each doubling of T adds collectives, which the floor omits"
    )


def remedy(spec: ModelSpec, setting: Setting, fits: list[Fit]) -> str:
    """Return what to change if no mesh fits."""
    longest = max((option.pages * option.page_size for option in fits), default=0)
    if longest:
        return f"a request of {setting.max_model_len} tokens does not fit; --max-model-len {longest} does"
    for tp in range(1, MOST + 1):
        minimal = fit(spec, replace(setting, max_model_len=min(setting.max_model_len, setting.page_size)), 1, tp)
        if minimal.fits:
            return f"one instance needs at least {tp} of {setting.name}: --devices {setting.name}:{tp}"
    return f"one instance does not fit even {MOST} of {setting.name}"


def floors(costs: Costs, setting: Setting, rows: list[int]) -> list[tuple[str, int, LayerWork]]:
    """Return steps with their lower bounds: (name, new tokens, work)."""
    decode = [(f"decode {count} x {setting.context}", count, costs.decode(count, setting.context)) for count in rows]
    prompt = costs.prefill(setting.prompt, min(setting.prompt, setting.max_num_batched_tokens))
    return [*decode, (f"prefill {setting.prompt}", setting.prompt, prompt)]
