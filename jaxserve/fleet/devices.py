"""Which GPUs each replica of a server gets."""

from __future__ import annotations

from jaxserve.config import ServeConfig, parse_mesh
from jaxserve.errors import InvalidValue


def visible(config: ServeConfig, gpus: int, given: str | None) -> list[str | None]:
    """Return CUDA_VISIBLE_DEVICES for each replica; None leaves it as it is.

    gpus: those of this machine. given: the variable's value here. Replicas share no GPU. Raises
    InvalidValue if there are too few.
    """
    count = config.most_replicas
    names = [str(at) for at in range(gpus)] if given is None else [name for name in given.split(",") if name]
    if count == 1 or not gpus or not names:
        return [None] * count
    if config.mesh is None:
        each = len(names) // count
    else:
        instances, degree = parse_mesh(config.mesh)
        each = degree if config.share_devices else instances * degree
    if each < 1 or each * count > len(names):
        need = "a GPU each" if config.mesh is None else f"{each} GPUs each (mesh={config.mesh})"
        raise InvalidValue(
            f"{config.replicas_said} need {need}, and this process may use {len(names)}: ask for fewer replicas or "
            "a smaller --mesh",
            "replicas",
        )
    return [",".join(names[at * each : (at + 1) * each]) for at in range(count)]
