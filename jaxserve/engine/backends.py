"""Which kernels the programs of an engine use: resolved once at its start, every refusal logged."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

from jax.sharding import AbstractMesh, Mesh

from jaxserve.engine import kv
from jaxserve.engine.mesh import MeshPlan
from jaxserve.models.spec import ModelSpec
from jaxserve.sched.errors import InvalidValue
from pallas_kernels import dispatch, experts, products
from pallas_kernels.dispatch import Attention, Choice, attention
from pallas_kernels.experts import experts as made

log = logging.getLogger(__name__)


class Backends(NamedTuple):
    """A choice for each operation; None: XLA."""

    attention: Choice | None = None
    experts: Choice | None = None
    products: Choice | None = None

    def kernel(self, mesh: AbstractMesh, *, decode: bool = False, few: bool = False) -> Attention:
        """What the programs of a bucket are given: the attention, and with it the experts and the products."""
        return attention(
            mesh,
            self.attention,
            decode=decode,
            few=few,
            experts=made(self.experts),
            products=products.products(self.products),
        )


class Asked(Protocol):
    """What of an `ExecutorConfig` decides."""

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
    def interpret(self) -> bool: ...


def resolve_backends(config: Asked, spec: ModelSpec, dtype: Any, mesh: Mesh) -> Backends:
    """Of all instances. `spec` is that of `for_tp`; raises InvalidValue where what is named cannot run."""
    each = resolve_attention, resolve_experts, resolve_products
    return Backends(*(resolve(config, spec, dtype, mesh) for resolve in each))


def resolve_attention(config: Asked, spec: ModelSpec, dtype: Any, mesh: Mesh) -> Choice:
    """The attention."""
    device = mesh.devices.flat[0]
    asked = dispatch.Spec(
        platform=device.platform,
        dtype=str(dtype),
        heads=spec.heads // config.mesh.tp,
        kv_heads=spec.cache.heads // config.mesh.tp,
        head_dim=spec.cache.dim,
        latent=spec.latent.rank if spec.latent is not None else 0,
        page=config.page_size,
        windows=spec.windows,
        device=device.device_kind,
        capability=str(getattr(device, "compute_capability", "")),
        cores=_cores(config, device),
        interpret=config.interpret,
        kv_dtype=str(kv.pool_dtype(config.kv_cache_dtype, dtype)),
    )
    return _told(partial(dispatch.resolve, asked, config.attention_backend), "attention")


def resolve_experts(config: Asked, spec: ModelSpec, dtype: Any, mesh: Mesh) -> Choice | None:
    """The products of the mixture of experts, where the model has one."""
    if spec.moe is None:
        return None
    device = mesh.devices.flat[0]
    asked = experts.Spec(
        platform=device.platform,
        dtype=str(dtype),
        experts=spec.moe.experts // config.mesh.tp,
        dim=spec.dim,
        ff_dim=spec.moe.ff_dim,
        weights="" if spec.quantised is None else str(spec.quantised),
        device=device.device_kind,
        capability=str(getattr(device, "compute_capability", "")),
        cores=_cores(config, device),
        interpret=config.interpret,
    )
    return _told(partial(experts.resolve_experts, asked, config.experts_backend), "experts")


def resolve_products(config: Asked, spec: ModelSpec, dtype: Any, mesh: Mesh) -> Choice | None:
    """The products with weights of 8 bits, where the model has them."""
    if spec.quantised is None:
        return None
    device = mesh.devices.flat[0]
    asked = products.Spec(
        platform=device.platform,
        dtype=str(dtype),
        weights=spec.quantised.dtype,
        blocks=spec.quantised.block is not None,
        shards=config.mesh.tp,
        device=device.device_kind,
        capability=str(getattr(device, "compute_capability", "")),
        cores=_cores(config, device),
        interpret=config.interpret,
    )
    return _told(partial(products.resolve_products, asked, config.products_backend), "products")


def _cores(config: Asked, device: Any) -> int:
    # An interpreter runs every block of a kernel, one after the other: few of them.
    return 2 if config.interpret else int(getattr(device, "core_count", 0) or dispatch.Spec.cores)


def _told(resolve: Callable[[], Choice], what: str) -> Choice:
    try:
        choice = resolve()
    except dispatch.Unsupported as error:
        raise InvalidValue(str(error), f"{what}_backend") from error
    for backend, reason in choice.refusals:
        log.warning("%s backend %s refused: %s", what, backend, reason)
    log.info("%s backend: %s", what, choice)
    return choice
