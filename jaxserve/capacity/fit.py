"""Whether a model fits a mesh of devices, what is left for KV, and what that can serve."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from jaxserve.capacity.activations import Activations
from jaxserve.capacity.costs import Costs, LayerWork
from jaxserve.capacity.devices import Device
from jaxserve.engine.memory import kv
from jaxserve.models.spec import ModelSpec
from jaxserve.sched.api.errors import InvalidValue

MOST = 64  # devices of one instance that are tried
ENOUGH = 0.8  # of the best tokens/s: what a smaller T must reach, as what collectives take is not in the floor


@dataclass(frozen=True, slots=True)
class Setting:
    """What is asked: devices, the engine's limits, and the load to count for."""

    device: Device
    name: str  # of the device
    count: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    page_size: int
    utilization: float
    kv_cache_memory: int | None  # bytes of all pools together; None: what is left
    dtype: Any
    kv_cache_dtype: str  # as for `kv.pool_dtype`
    context: int  # tokens that a row of a decode step attends to
    prompt: int  # tokens of a prefill
    tpot: float  # seconds


@dataclass(frozen=True, slots=True)
class Batch:
    """The largest decode step of one instance, and what keeps it from being larger."""

    rows: int
    seconds: float  # its floor
    limit: str  # "TPOT" or "KV"


@dataclass(frozen=True, slots=True)
class Fit:
    """A model on a mesh of `instances` times `tp` devices. Bytes are of one device."""

    instances: int
    tp: int
    costs: Costs | None  # None: tp does not fit the model
    activations: Activations | None
    pool: int  # bytes of KV pages
    pages: int  # of one instance
    page_size: int
    batch: Batch | None  # None: no row stays within the TPOT
    refusal: str  # why an engine would not start; "": it would

    @property
    def mesh(self) -> str:
        return f"{self.instances}x{self.tp}"

    @property
    def fits(self) -> bool:
        return not self.refusal

    @property
    def tokens(self) -> int:
        """Tokens of KV that one instance holds."""
        return self.pages * self.page_size

    @property
    def rate(self) -> float:
        """Tokens/s of all instances at their largest batch, at the floor."""
        return 0.0 if self.batch is None else self.instances * self.batch.rows / self.batch.seconds


def fit(spec: ModelSpec, setting: Setting, instances: int, tp: int, measured: Activations | None = None) -> Fit:
    """The model on that mesh. `measured`: activations of compiled programs, in place of those that are counted."""
    nothing = Fit(instances, tp, None, None, 0, 0, setting.page_size, None, "")
    try:
        costs = Costs.of(spec, tp, setting.dtype, kv.pool_dtype(setting.kv_cache_dtype, setting.dtype))
    except InvalidValue as error:
        return replace(nothing, refusal=str(error))
    held = measured or Activations.counted(
        spec,
        tp,
        setting.dtype,
        setting.max_num_batched_tokens,
        setting.max_num_seqs,
    )
    weighed = replace(nothing, costs=costs, activations=held)
    try:
        room, name = _room(setting, instances, tp, costs, held)
    except InvalidValue as error:
        return replace(weighed, refusal=str(error))
    with_pool = replace(
        weighed, pool=room // tp, pages=room // kv.page_bytes(costs.spec, setting.page_size, costs.cache_dtype)
    )
    try:
        pages = kv.fit_pages(
            costs.spec,
            setting.page_size,
            costs.cache_dtype,
            pool_bytes=room,
            max_model_len=setting.max_model_len,
            name=name,
        )
    except InvalidValue as error:
        return replace(with_pool, refusal=str(error))
    used = pages * kv.page_bytes(costs.spec, setting.page_size, costs.cache_dtype) // tp
    return replace(with_pool, pool=used, pages=pages, batch=largest(costs, setting, pages))


def _room(setting: Setting, instances: int, tp: int, costs: Costs, held: Activations) -> tuple[int, str]:
    """Bytes for an instance's pool, and the setting that decides them."""
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
    """Bytes for an instance's pool where a setting says them, or on a CPU, where all instances are in one memory."""
    memory, total = setting.device.memory, setting.kv_cache_memory
    on_cpu = setting.device.platform == "cpu"
    weights = costs.weights * (tp if on_cpu else 1)  # instances share one copy
    if total is None:
        total = min(kv.MOST_ON_CPU, max(0, int(memory - weights)) // 4)
    pools = total if on_cpu else total // (instances * tp)
    if weights + held.bytes + pools > memory:
        raise InvalidValue(
            f"weights of {weights} bytes, a step's temporaries of {held.bytes} and KV pools of {pools} are more than "
            f"the {memory:.0f} bytes of {setting.name}: lower kv_cache_memory",
            "kv_cache_memory",
        )
    return kv.cpu_pool_bytes(total, instances)


def largest(costs: Costs, setting: Setting, pages: int) -> Batch | None:
    """The most rows whose step keeps the TPOT and whose contexts fit the pool; None where one row is too slow."""

    def seconds(rows: int) -> float:
        return costs.decode(rows, setting.context).seconds(setting.device)

    fitting = pages // -(-setting.context // setting.page_size)
    if fitting < 1 or seconds(1) > setting.tpot:
        return None
    low, high = 1, fitting
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if seconds(middle) <= setting.tpot else (low, middle - 1)
    return Batch(low, seconds(low), "KV" if low == fitting else "TPOT")


def choose(fits: list[Fit]) -> tuple[Fit, str] | None:
    """The mesh to take, and why; None where none fits."""
    able = [one for one in fits if one.fits]
    if not able:
        return None
    best = max(able, key=lambda one: one.rate)
    if not best.rate:
        wide = max(able, key=lambda one: one.tp)
        return wide, "no mesh keeps the TPOT even with one row; the widest is the fastest"
    taken = min((one for one in able if one.rate >= ENOUGH * best.rate), key=lambda one: one.tp)
    if len(able) == 1:
        return taken, "the only one that fits"
    if taken is best:
        return taken, "the most tokens/s within the TPOT, and a smaller T falls behind by more than a fifth"
    return taken, (
        f"the smallest T within a fifth of the most tokens/s ({best.mesh} has {best.rate / taken.rate:.2f} times as "
        "many): each doubling of T costs collectives, which the floor leaves out"
    )


def remedy(spec: ModelSpec, setting: Setting, fits: list[Fit]) -> str:
    """What to do where none fits."""
    longest = max((one.pages * one.page_size for one in fits), default=0)
    if longest:
        return f"a request of {setting.max_model_len} tokens does not fit; --max-model-len {longest} does"
    for tp in range(1, MOST + 1):
        one = fit(spec, replace(setting, max_model_len=min(setting.max_model_len, setting.page_size)), 1, tp)
        if one.fits:
            return f"one instance needs at least {tp} of {setting.name}: --devices {setting.name}:{tp}"
    return f"one instance does not fit even {MOST} of {setting.name}"


def floors(costs: Costs, setting: Setting, rows: list[int]) -> list[tuple[str, int, LayerWork]]:
    """Steps with their floors: (what, new tokens, work)."""
    decode = [(f"decode {count} x {setting.context}", count, costs.decode(count, setting.context)) for count in rows]
    prompt = costs.prefill(setting.prompt, min(setting.prompt, setting.max_num_batched_tokens))
    return [*decode, (f"prefill {setting.prompt}", setting.prompt, prompt)]
