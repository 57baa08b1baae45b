"""Output of a plan, as tables and as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxserve.capacity.fit import Fit, Setting, floors
from jaxserve.models.spec import ModelSpec
from jaxserve.report.table import print_table

GB, ROWS = 1e9, (1, 16, 64, 256)  # rows of the decode steps to show


@dataclass(frozen=True)
class Plan:
    """The requested meshes and the recommended one."""

    model: str
    source: str
    spec: ModelSpec
    setting: Setting
    fits: list[Fit]
    taken: Fit | None
    why: str


def tables(plan: Plan) -> None:
    spec, setting, device = plan.spec, plan.setting, plan.setting.device
    some = next((fit.costs for fit in plan.fits if fit.costs is not None), None)
    if some is not None:
        active = "" if spec.moe is None else f", of which a token uses {some.active / GB:.3g} billion"
        print(
            f"{plan.model}: {spec.architecture}, {some.parameters / GB:.4g} billion parameters{active}; {plan.source}"
        )
    print(
        f"{setting.count} x {setting.name}: {device.title}; {device.bandwidth / GB:.4g} GB/s, "
        f"{device.flops / 1e12:.4g} TFLOP/s ({device.source})"
    )
    for note in notes(plan):
        print(f"note: {note}")
    print_table(
        f"Meshes (weights and KV in GB per device; decode with {setting.context} tokens of context, at the floor)",
        ["mesh", "fits", "weights", "activations", "KV pages", "KV tokens", "rows in TPOT", "limit", "tokens/s", ""],
        [_row(fit, fit is plan.taken) for fit in plan.fits],
    )
    for fit in plan.fits:
        if fit.refusal:
            print(f"{fit.mesh}: {fit.refusal}")
    if plan.taken is None:
        print(f"does not fit: {plan.why}")
        return
    print(f"recommended mesh {plan.taken.mesh}: {plan.why}")
    print_table(
        f"Steps of one instance of {plan.taken.mesh}: at least",
        ["step", "GB", "TFLOP", "ms", "waits for", "tokens/s"],
        [
            [
                what,
                work.bytes / GB,
                work.flops / 1e12,
                1e3 * work.seconds(device),
                work.bound(device),
                tokens / work.seconds(device),
            ]
            for what, tokens, work in _floors(plan, plan.taken)
        ],
    )


def notes(plan: Plan) -> list[str]:
    """Return remarks about the figures."""
    spec, setting = plan.spec, plan.setting
    said = [f"{setting.name}: {setting.device.note}"] if setting.device.note else []
    if spec.quantized is not None:
        said.append(f"weights of matmuls in {spec.quantized.dtype}; arithmetic is counted in {setting.dtype}")
    said += sorted(
        {f"activations {f.activations.source}" for f in plan.fits if f.activations} - {"activations counted"}
    )
    batch = plan.taken.batch if plan.taken else None
    if batch is not None and batch.rows > setting.max_num_seqs:
        said.append(
            f"a batch of {batch.rows} rows needs --max-num-seqs {batch.rows}; the activations are those of "
            f"{setting.max_num_seqs}"
        )
    return said


def _floors(plan: Plan, fit: Fit) -> list[Any]:
    if fit.costs is None:
        return []
    rows = sorted({*ROWS, *([fit.batch.rows] if fit.batch else [])})
    most = fit.tokens // plan.setting.context
    return floors(fit.costs, plan.setting, [count for count in rows if count <= most])


def _row(fit: Fit, taken: bool) -> list[object]:
    batch = fit.batch
    return [
        fit.mesh,
        fit.fits,
        None if fit.costs is None else fit.costs.weights / GB,
        None if fit.activations is None else fit.activations.bytes / GB,
        fit.pool / GB if fit.pages else None,
        fit.tokens if fit.pages else None,
        None if batch is None else batch.rows,
        "" if batch is None else batch.limit,
        None if batch is None else round(fit.rate),
        "<-" if taken else "",
    ]


def as_json(plan: Plan) -> dict[str, Any]:
    """Return the plan as JSON, in bytes, FLOPs, seconds and tokens."""
    setting = plan.setting
    return {
        "model": plan.model,
        "source": plan.source,
        "architecture": plan.spec.architecture,
        "devices": {
            "kind": setting.name,
            "count": setting.count,
            **{name: getattr(setting.device, name) for name in ("title", "memory", "bandwidth", "flops", "source")},
        },
        "settings": {
            name: getattr(setting, name)
            for name in (
                "max_model_len", "max_num_seqs", "max_num_batched_tokens", "page_size", "utilization", "dtype",
                "kv_cache_dtype", "context", "prompt", "tpot",
            )
        },
        "notes": notes(plan),
        "fits": plan.taken is not None,
        "mesh": plan.taken.mesh if plan.taken else None,
        "why": plan.why,
        "meshes": [_fit(plan, fit) for fit in plan.fits],
    }  # fmt: skip


def _fit(plan: Plan, fit: Fit) -> dict[str, Any]:
    fields: dict[str, Any] = {"mesh": fit.mesh, "fits": fit.fits, "refusal": fit.refusal or None}
    if fit.costs is None or fit.activations is None:
        return fields
    device = plan.setting.device
    fields |= {
        "parameters": fit.costs.parameters,
        "active_parameters": fit.costs.active,
        "weight_bytes": fit.costs.weights,
        "activation_bytes": fit.activations.bytes,
        "activations": fit.activations.source,
        "kv_bytes_per_token": fit.costs.kv_token,
        "kv_bytes": fit.pool,
        "kv_pages": fit.pages,
        "kv_tokens": fit.tokens,
        "steps": {
            what: {
                "bytes": work.bytes,
                "flops": work.flops,
                "seconds": work.seconds(device),
                "waits_for": work.bound(device),
            }
            for what, _, work in _floors(plan, fit)
        },
    }
    if fit.batch is not None:
        fields["batch"] = {"rows": fit.batch.rows, "seconds": fit.batch.seconds, "limit": fit.batch.limit}
        fields["tokens_per_second"] = fit.rate
    return fields
