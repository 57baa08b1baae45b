"""What must be equal in two engine processes for one to use the KV pages of the other."""

from __future__ import annotations

from hashlib import blake2b

import msgspec

from jaxserve.engine.startup.assemble import Machine
from jaxserve.version import __version__
from jaxserve.wire.connection import encode


class Layout(msgspec.Struct, frozen=True):
    """The model, and how its KV lies in a page. Compared by digest, and by field to name what differs."""

    jaxserve: str  # version
    model: str
    revision: str | None
    weights: str  # format, quantization, and the seed of random ones
    architecture: str  # digest of the model's and the draft model's specification
    dtype: str
    page_size: int  # tokens
    pages: tuple[tuple[tuple[int, ...], str], ...]  # shape and data type of one page in each array of a piece

    @property
    def digest(self) -> bytes:
        return blake2b(encode(self), digest_size=16).digest()

    def difference(self, other: Layout) -> str | None:
        """Return the first difference, with both values; None if there is none."""
        for name in self.__struct_fields__:
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                return f"{name} is {theirs!r} there and {mine!r} here"
        return None


def shards_of(machine: Machine) -> str:
    """Return how a page lies on the devices of an instance; pulls between devices need equal shards."""
    arrays = machine.executors[0].state.kv_buffer(1)
    platform = machine.executors[0].state.mesh.devices.flat[0].platform
    return f"{platform}: " + ", ".join(str(array.sharding.shard_shape(array.shape)) for array in arrays)


def layout_of(machine: Machine) -> Layout:
    config, state = machine.config, machine.executors[0].state
    spec = state.programs.spec
    arrays = state.kv_buffer(1)
    seed = f", seed {config.seed or 0}" if config.load_format == "dummy" else ""
    drafts = "" if config.speculative is None else repr(config.speculative)
    return Layout(
        jaxserve=__version__,
        model=machine.info.model,
        revision=config.revision,
        weights=f"{config.load_format}, quantization {config.quantization}{seed}",
        architecture=blake2b(f"{spec!r} {drafts}".encode(), digest_size=8).hexdigest(),
        dtype=machine.info.dtype,
        page_size=machine.limits.page_size,
        pages=tuple((tuple(array.shape), str(array.dtype)) for array in arrays),
    )
