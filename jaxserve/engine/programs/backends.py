"""Kernel selection: resolved once when an engine starts; every refused backend is logged."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
from jax.sharding import AbstractMesh, Mesh

from jaxserve.engine.memory import kv
from jaxserve.engine.programs.mesh import MeshPlan
from jaxserve.models import registry
from jaxserve.models.layers import Info
from jaxserve.models.quantized import Quantized
from jaxserve.models.spec import ModelSpec
from jaxserve.sched.api.errors import InvalidValue
from pallas_kernels.attention import api as dispatch
from pallas_kernels.attention.api import Attention, Choice, attention
from pallas_kernels.ops.gated_matmul import api as mlps
from pallas_kernels.ops.grouped_matmul import api as experts
from pallas_kernels.ops.grouped_matmul.api import experts as made
from pallas_kernels.ops.quantized_matmul import api as products
from pallas_kernels.ops.sampling_threshold import api as thresholds

log = logging.getLogger(__name__)


class Backends(NamedTuple):
    """The selected kernel for each operation; None: XLA."""

    attention: Choice | None = None
    experts: Choice | None = None
    products: Choice | None = None
    sampling: Choice | None = None
    mlp: Choice | None = None

    def kernel(self, mesh: AbstractMesh, *, decode: bool = False, few: bool = False) -> Attention:
        """Return the attention of a bucket's programs, with its grouped, quantized and gated matmuls."""
        return attention(
            mesh,
            self.attention,
            decode=decode,
            few=few,
            experts=made(self.experts),
            products=products.products(self.products),
            mlp=mlps.gated(self.mlp, mesh),
        )

    def pooled(self, spec: ModelSpec) -> ModelSpec:
        """Return `spec` with the pool layout that the attention kernel needs."""
        heads, width = dispatch.pool_row(self.attention, spec.head_dim)
        first = dispatch.heads_first(self.attention)
        return replace(spec, kv_row=heads, kv_width=width, kv_heads_first=first)

    def cascade(self, asked: str) -> bool:
        """Return whether attention reads a shared prefix once. `asked`: on, off, or auto: on if it can.

        Raises InvalidValue for `on` with kernels that cannot.
        """
        reason = dispatch.refuses_cascade(self.attention)
        if asked == "on" and reason is not None:
            raise InvalidValue(
                f"cascade_attention='on' cannot run here: {reason}; allowed: auto, off, or attention_backend='xla'",
                "cascade_attention",
            )
        if asked == "auto" and reason is not None:
            log.info("cascade attention: off, because %s", reason)
        return asked != "off" and reason is None

    def thresholds(self, mesh: AbstractMesh) -> thresholds.Thresholds:
        """Return the search for sampling thresholds."""
        return thresholds.thresholds(self.sampling, mesh)


class BackendOptions(Protocol):
    """The fields of an `ExecutorConfig` that decide the selection."""

    @property
    def mesh(self) -> MeshPlan: ...
    @property
    def kv_cache_dtype(self) -> str: ...
    @property
    def page_size(self) -> int: ...
    @property
    def attention_backend(self) -> str: ...
    @property
    def experts_backend(self) -> str: ...
    @property
    def products_backend(self) -> str: ...
    @property
    def sampling_backend(self) -> str: ...
    @property
    def mlp_backend(self) -> str: ...
    @property
    def interpret(self) -> bool: ...


def resolve_backends(config: BackendOptions, spec: ModelSpec, dtype: Any, mesh: Mesh) -> Backends:
    """Select the kernels of all instances; `spec` is the one from `for_tp`.

    Raises InvalidValue if a backend that the user named cannot run.
    """
    device = mesh.devices.flat[0]
    # An interpreter runs the blocks of a kernel one after the other, so it pretends to have few cores.
    cores = 2 if config.interpret else int(getattr(device, "core_count", 0) or dispatch.AttentionSpec.cores)
    here = {
        "platform": device.platform,
        "device": device.device_kind,
        "capability": str(getattr(device, "compute_capability", "")),
        "cores": cores,
        "interpret": config.interpret,
    }
    return Backends(
        _resolved(dispatch.resolve, _attention(config, spec, dtype, here), config.attention_backend, "attention"),
        _resolved(experts.resolve_experts, _experts(config, spec, dtype, here), config.experts_backend, "experts"),
        _resolved(
            products.resolve_quantized_matmul, _products(config, spec, dtype, here), config.products_backend, "products"
        ),
        _resolved(
            thresholds.resolve_sampling,
            thresholds.ThresholdSpec(**here, vocab=spec.vocab),
            config.sampling_backend,
            "sampling",
        ),
        _resolved(mlps.resolve_gated_matmul, _mlp(config, spec, dtype, here), config.mlp_backend, "mlp"),
    )


def _attention(config: BackendOptions, spec: ModelSpec, dtype: Any, here: Mapping[str, Any]) -> dispatch.AttentionSpec:
    return dispatch.AttentionSpec(
        **here,
        dtype=str(dtype),
        heads=spec.heads // config.mesh.tp,
        kv_heads=spec.cache.heads // config.mesh.tp,
        head_dim=spec.cache.dim,
        latent=spec.latent.rank if spec.latent is not None else 0,
        page=config.page_size,
        windows=spec.windows,
        kv_dtype=str(kv.pool_dtype(config.kv_cache_dtype, dtype)),
    )


def _experts(
    config: BackendOptions, spec: ModelSpec, dtype: Any, here: Mapping[str, Any]
) -> experts.ExpertsSpec | None:
    """Describe the mixture of experts for its selection; None: the model has none."""
    if spec.moe is None:
        return None
    narrow = spec.quantized
    if narrow is not None and not any(map(_narrow_experts, registry.abstract_weights(spec, dtype)["layers"])):
        narrow = None  # other weights are quantized, not the experts
    return experts.ExpertsSpec(
        **here,
        dtype=str(dtype),
        experts=spec.moe.experts // config.mesh.tp,
        dim=spec.dim,
        ff_dim=spec.moe.ff_dim,
        weights="" if narrow is None else narrow.dtype,
        block=narrow.block[1] if narrow is not None and narrow.block is not None else 0,
    )


def _narrow_experts(layer: Any) -> bool:
    leaves = jax.tree.leaves(layer, is_leaf=lambda leaf: isinstance(leaf, Info | Quantized))
    return any(isinstance(leaf, Quantized) and leaf.values.axes[0] == "experts" for leaf in leaves)


def _products(
    config: BackendOptions, spec: ModelSpec, dtype: Any, here: Mapping[str, Any]
) -> products.MatmulSpec | None:
    """Describe the 8-bit weights for the selection of their matmul; None: the model has none."""
    if spec.quantized is None:
        return None
    blocks = spec.quantized.block is not None
    weights = spec.quantized.dtype
    return products.MatmulSpec(**here, dtype=str(dtype), weights=weights, blocks=blocks, shards=config.mesh.tp)


def _mlp(config: BackendOptions, spec: ModelSpec, dtype: Any, here: Mapping[str, Any]) -> mlps.GatedSpec | None:
    """Describe the dense gated feed-forwards for the selection of their product; None: the model has none."""
    layers = [layer["mlp"] for layer in registry.abstract_weights(spec, dtype)["layers"]]
    dense = [mlp["gate_up"] for mlp in layers if "gate_up" in mlp and "router" not in mlp]
    if not dense:
        return None
    narrow = spec.quantized is not None and any(isinstance(weight, Quantized) for weight in dense)
    return mlps.GatedSpec(
        **here,
        dtype=str(dtype),
        dim=spec.dim,
        ff_dim=spec.ff_dim // config.mesh.tp,
        activation=spec.activation,
        weights=spec.quantized.dtype if spec.quantized is not None and narrow else "",
        biased=spec.mlp_bias,
        shards=config.mesh.tp,
    )


A = TypeVar("A")


def _resolved(resolve: Callable[[A, str], Choice], asked: A | None, name: str, what: str) -> Choice | None:
    """Resolve and log a choice; None if the model does not need the operation."""
    if asked is None:
        return None
    try:
        choice = resolve(asked, name)
    except dispatch.Unsupported as error:
        raise InvalidValue(str(error), f"{what}_backend") from error
    for backend, reason in choice.refusals:
        log.warning("%s backend %s refused: %s", what, backend, reason)
    log.info("%s backend: %s", what, choice)
    return choice
