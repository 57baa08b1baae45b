"""Replicas on nodes: no node gives more devices than it has, and what is lacking is named."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.config import ServeConfig
from jaxserve.errors import InvalidValue
from jaxserve.fleet.nodes import devices_of, lay_out


def test_prefill_and_decode_replicas_count_and_stay_on_a_node() -> None:
    config = ServeConfig(mesh="1x2", prefill_replicas=2, decode_replicas=1)
    assert lay_out(config, "GPU", {"node0": 4, "node1": 2}) == [(2,)] * 3
    with pytest.raises(InvalidValue, match=r"replicas=3 need 2 GPU each on one node .* only replicas that also decode"):
        lay_out(config, "GPU", {f"node{at}": 1 for at in range(6)})


@given(st.integers(1, 4), st.integers(1, 8), st.integers(1, 4), st.lists(st.integers(1, 8), min_size=1, max_size=5))
def test_shares_fit_and_are_those_of_a_mesh(instances: int, degree: int, replicas: int, rooms: list[int]) -> None:
    config = ServeConfig(mesh=f"{instances}x{degree}", replicas=replicas)
    nodes = {f"node{at}": room for at, room in enumerate(rooms)}
    try:
        made = lay_out(config, "GPU", nodes)
    except InvalidValue as error:
        assert f"replicas={replicas} need {instances * degree} GPU each" in str(error)
        assert sum(room // (instances * degree) for room in rooms) < replicas  # not even without spanning
        return
    assert [sum(shares) for shares in made] == [instances * degree] * replicas
    assert all(len(set(shares)) == 1 for shares in made)
    assert sum(map(sum, made)) <= sum(rooms)
    assert instances == 1 or all(len(shares) == 1 for shares in made)


@pytest.mark.parametrize(
    ("mesh", "replicas", "rooms", "shares"),
    [
        ("2x2", 2, (4, 4), [(4,), (4,)]),
        ("2x2", 2, (8,), [(4,), (4,)]),
        ("1x8", 1, (4, 4), [(4, 4)]),
        ("1x8", 2, (4, 4, 8), [(8,), (4, 4)]),
        ("1x8", 1, (3, 2, 2, 2), [(2, 2, 2, 2)]),
        (None, 2, (1, 1), [(1,), (1,)]),
    ],
)
def test_layouts(mesh: str | None, replicas: int, rooms: tuple[int, ...], shares: list[tuple[int, ...]]) -> None:
    config = ServeConfig(mesh=mesh, replicas=replicas)
    assert lay_out(config, "GPU", dict(enumerate(rooms))) == shares  # type: ignore[arg-type]


def test_what_is_lacking_is_named() -> None:
    with pytest.raises(InvalidValue, match=r"replicas=3 need 2 GPU each on one node \(mesh=2x1\), and the Ray cluster "
                       r"has 5 \(4 on a, 1 on b\), enough for 2: add nodes"):  # fmt: skip
        lay_out(ServeConfig(mesh="2x1", replicas=3), "GPU", {"a": 4, "b": 1})
    with pytest.raises(InvalidValue, match=r"only meshes of one instance \(1xT\) span nodes"):
        lay_out(ServeConfig(mesh="4x2"), "GPU", {"a": 4, "b": 4})
    with pytest.raises(InvalidValue, match=r"has 0 \(none\)"):
        lay_out(ServeConfig(), "TPU", {})


def test_devices_of_a_replica() -> None:
    assert devices_of(ServeConfig()) == 1
    assert devices_of(ServeConfig(mesh="4x2")) == prod((4, 2))
    assert devices_of(ServeConfig(mesh="4x2", share_devices=True)) == 2
