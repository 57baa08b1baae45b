"""The Ray cluster: connecting to it, and whether its nodes can run engines."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from jaxserve.errors import InvalidValue, short
from jaxserve.server.start_times import version_of
from jaxserve.version import __version__
from jaxserve.wire.address import Address

LOCAL, AUTO, CLIENT = "local", "auto", "ray://"
REACHING = 5.0  # seconds in which a cluster's address must accept a connection
LOOKING = 60.0  # seconds in which each node must describe itself
OBJECTS = 100 << 20  # bytes of the object store of a cluster that this process starts: no engine uses it
KINDS = ("GPU", "TPU")  # resources that jax prefers over CPUs, in this order

Facts = Mapping[str, Any]

# Linux kills what Ray starts when the thread that has started it ends, so one that stays starts clusters.
_lasting = ThreadPoolExecutor(1, "jaxserve-ray")


class Node(NamedTuple):
    """A node that is alive."""

    id: str
    name: str
    resources: Mapping[str, float]


def connect(address: str, cpus: int) -> None:
    """Connect to a cluster, or start one for `local`, with at least `cpus` CPUs.

    Raises InvalidValue, within seconds, if there is none at the address.
    """
    if address == LOCAL:
        most = max(cpus, os.cpu_count() or 1)
        _lasting.submit(_init, address, address="local", num_cpus=most, **own_options()).result()
        return
    if address != AUTO:
        _reach(address)
    _init(address, address=address)


def own_options() -> dict[str, Any]:
    """Return the options of a cluster that this process starts.

    Ray's workers have niceness 15 by default, to which Linux gives a 28th of the share of the front, or of any other
    process that wants the cores. The options are made anew because Ray adds those of the session to `_system_config`.
    """
    system = {"worker_niceness": 0}
    return {"include_dashboard": False, "object_store_memory": OBJECTS, "_system_config": system}


def _reach(address: str) -> None:
    try:
        at = Address.parse(address.removeprefix(CLIENT))
    except InvalidValue:
        at = Address()
    if not at.host:
        raise InvalidValue(f"ray={short(address)} must be HOST:PORT, ray://HOST:PORT, auto or local", "ray")
    try:
        socket.create_connection((at.host, at.port), timeout=REACHING).close()
    except OSError as error:
        raise InvalidValue(
            f"ray={address!r}: no Ray cluster answers there ({error.strerror or error}); `ray start --head` starts one "
            "and prints its address, `--ray local` needs none",
            "ray",
        ) from error


def _init(said: str, **options: Any) -> None:
    try:
        ray.init(log_to_driver=True, **options)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        (first, *_) = str(error).strip().splitlines() or [type(error).__name__]
        raise InvalidValue(
            f"ray={said!r}: cannot join a Ray cluster ({first}); `ray start --head` starts one on this machine, `--ray "
            "local` needs none, and all machines need one version of Python and of Ray",
            "ray",
        ) from error


def nodes() -> list[Node]:
    """Return the nodes that are alive."""
    return [
        Node(node["NodeID"], f"{node['NodeName']} ({node['NodeID'][:6]})", node["Resources"])  # names may be equal
        for node in ray.nodes()
        if node["Alive"]
    ]


def kind_of(members: Sequence[Node]) -> str:
    """Return the resource that engines take: GPU or TPU if a node has any, else CPU."""
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        return "CPU"
    return next((kind for kind in KINDS if any(kind in node.resources for node in members)), "CPU")


def check_nodes(members: Sequence[Node], model: str | None) -> None:
    """Raise InvalidValue if a node has other versions than this process, or no model. model: a folder, or None."""
    look: Any = ray.remote(num_cpus=0, max_retries=0)(looker())
    affine = (NodeAffinitySchedulingStrategy(node.id, soft=False) for node in members)
    asked = [look.options(scheduling_strategy=where).remote(model) for where in affine]
    try:
        seen: list[Facts] = ray.get(asked, timeout=LOOKING)
    except ray.exceptions.RayError as error:
        raise InvalidValue(f"a node of the Ray cluster does not answer: {error}", "ray") from error
    check_facts(dict(zip((node.name for node in members), seen, strict=True)), here(), model)


def here() -> Facts:
    """Return the versions of this process."""
    return {"python": platform.python_version(), "jax": version_of("jax"), "jaxserve": __version__}


def looker() -> Callable[[str | None], Facts]:
    """Return a function that describes the node it runs on. Ray sends its code, so jaxserve need not be there."""

    def look(model: str | None) -> Facts:
        import os
        import platform
        from importlib.metadata import PackageNotFoundError, version

        def installed(package: str) -> str | None:
            try:
                return version(package)
            except PackageNotFoundError:
                return None

        try:
            from jaxserve.version import __version__ as ours
        except ImportError:
            ours = None  # type: ignore[assignment]
        versions = {"python": platform.python_version(), "jax": installed("jax"), "jaxserve": ours}
        return {**versions, "model": model is None or os.path.exists(model)}

    return look


def check_facts(seen: Mapping[str, Facts], mine: Facts, model: str | None) -> None:
    """Raise InvalidValue naming the first node that differs from `mine`, or has no model."""
    for node, facts in seen.items():
        for name, wanted in mine.items():
            if facts[name] != wanted:
                has = "is not installed" if facts[name] is None else f"is {facts[name]}"
                raise InvalidValue(
                    f"{name} {has} on the Ray node {node}, and {wanted} here: install one version everywhere (tokens "
                    "must not depend on the node)",
                    "ray",
                )
        if not facts["model"]:
            raise InvalidValue(
                f"model={model!r} does not exist on the Ray node {node}: copy it there, use a shared file system, or "
                "name a model of the Hugging Face hub",
                "model",
            )


def model_folder(model: str | None) -> str | None:
    """Return the absolute path of a model that is a folder; None for one of the hub or the demo model."""
    if model is None:
        return None
    path = Path(model).expanduser()
    return str(path.absolute()) if path.is_absolute() or path.is_dir() else None
