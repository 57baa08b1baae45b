"""Replicas of one machine share no GPU."""

from __future__ import annotations

from typing import Any

import pytest

from jaxserve.config import ServeConfig
from jaxserve.errors import InvalidValue
from jaxserve.fleet.nodes import visible


@pytest.mark.parametrize(
    ("settings", "gpus", "given", "expected"),
    [
        ({"replicas": 1}, 8, None, [None]),
        ({"replicas": 2}, 0, None, [None, None]),
        ({"replicas": 2}, 8, None, ["0,1,2,3", "4,5,6,7"]),
        ({"replicas": 3}, 8, None, ["0,1", "2,3", "4,5"]),
        ({"replicas": 2, "mesh": "2x1"}, 8, None, ["0,1", "2,3"]),
        ({"replicas": 2, "mesh": "2x1", "share_devices": True}, 2, None, ["0", "1"]),
        ({"replicas": 2, "mesh": "1x2"}, 8, "7,GPU-a,3,2", ["7,GPU-a", "3,2"]),
        ({"replicas": 2}, 8, "", [None, None]),
    ],
)
def test_each_replica_has_gpus_of_its_own(
    settings: dict[str, Any], gpus: int, given: str | None, expected: list[str | None]
) -> None:
    assert visible(ServeConfig.load(**settings), gpus, given) == expected


@pytest.mark.parametrize(
    ("settings", "gpus", "why"),
    [
        ({"replicas": 3}, 2, "replicas=3 need a GPU each, and this process may use 2"),
        ({"replicas": 2, "mesh": "2x2"}, 4, r"replicas=2 need 4 GPUs each \(mesh=2x2\), and this process may use 4"),
    ],
)
def test_too_few_gpus_are_named(settings: dict[str, Any], gpus: int, why: str) -> None:
    with pytest.raises(InvalidValue, match=why):
        visible(ServeConfig.load(**settings), gpus, None)
