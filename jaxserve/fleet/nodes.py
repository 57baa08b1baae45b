"""Which nodes of a cluster, or GPUs of this machine, each replica gets: pure arithmetic, without Ray."""

from __future__ import annotations

from collections.abc import Mapping

from jaxserve.config import ServeConfig, parse_mesh
from jaxserve.errors import InvalidValue

Shares = tuple[int, ...]  # the devices that a replica takes on each of its nodes


def devices_of(config: ServeConfig) -> int:
    """Return the devices of one replica; without a mesh it is one."""
    if config.mesh is None:
        return 1
    instances, degree = parse_mesh(config.mesh)
    return degree if config.share_devices else instances * degree


def visible(config: ServeConfig, gpus: int, given: str | None) -> list[str | None]:
    """Return CUDA_VISIBLE_DEVICES for each replica; None leaves it as it is.

    gpus: those of this machine. given: the variable's value here. Replicas share no GPU. Raises
    InvalidValue if there are too few.
    """
    count = config.most_replicas
    names = [str(at) for at in range(gpus)] if given is None else [name for name in given.split(",") if name]
    if count == 1 or not gpus or not names:
        return [None] * count
    each = len(names) // count if config.mesh is None else devices_of(config)
    if each < 1 or each * count > len(names):
        need = "a GPU each" if config.mesh is None else f"{each} GPUs each (mesh={config.mesh})"
        raise InvalidValue(
            f"{config.replicas_said} need {need}, and this process may use {len(names)}: ask for fewer replicas or "
            "a smaller --mesh",
            "replicas",
        )
    return [",".join(names[at * each : (at + 1) * each]) for at in range(count)]


def lay_out(config: ServeConfig, kind: str, nodes: Mapping[str, int]) -> list[Shares]:
    """Return the shares of each replica.

    A replica takes one node if any has room. An instance of more devices than a node has (mesh 1xT) takes
    equal shares of as few nodes as possible. nodes: the devices of each. Raises InvalidValue that says what
    is lacking.
    """
    free, replicas = dict(nodes), list[Shares]()
    for _ in config.replica_roles:
        shares = _one(config, free)
        if shares is None:
            raise InvalidValue(_lacking(config, kind, nodes, len(replicas)), "replicas")
        able = sorted((name for name in free if free[name] >= shares[0]), key=lambda name: free[name])
        for name in able[: len(shares)]:  # the fullest ones that have room
            free[name] -= shares[0]
        replicas.append(shares)
    return replicas


def _one(config: ServeConfig, free: Mapping[str, int]) -> Shares | None:
    need = devices_of(config)
    if any(room >= need for room in free.values()):
        return (need,)
    if not spans(config):
        return None
    for hosts in range(2, need + 1):
        share = need // hosts
        if need % hosts == 0 and sum(room >= share for room in free.values()) >= hosts:
            return (share,) * hosts
    return None


def spans(config: ServeConfig) -> bool:
    """Whether a replica may span nodes: one instance only, because no pages travel to or from such an instance."""
    return config.mesh is not None and parse_mesh(config.mesh)[0] == 1 and config.prefill_replicas is None


def _lacking(config: ServeConfig, kind: str, nodes: Mapping[str, int], placed: int) -> str:
    need, total = devices_of(config), sum(nodes.values())
    where = ", ".join(f"{count} on {name}" for name, count in nodes.items()) or "none"
    whole = "" if spans(config) or config.mesh is None else " on one node"
    remedy = "add nodes, ask for fewer replicas, or a smaller --mesh"
    if not spans(config) and need > max(nodes.values(), default=0) and total >= need:
        alone = config.prefill_replicas is None
        what = "meshes of one instance (1xT)" if alone else "replicas that also decode (--replicas)"
        remedy = f"only {what} span nodes; {remedy}"
    return (
        f"replicas={len(config.replica_roles)} need {need} {kind} each{whole} (mesh={config.mesh or '1x1'}), and the "
        f"Ray cluster has {total} ({where}), enough for {placed}: {remedy}"
    )
