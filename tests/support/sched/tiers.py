"""KV tiers behind simulated instances."""

from __future__ import annotations

from hypothesis import strategies as st

from jaxserve.sched.sim.tiers import Tiers
from tests.support.sched.harness import KV_BYTES

PAGE = 4 * KV_BYTES
FAST = {"host_bandwidth": 1e12, "disk_bandwidth": 2e11, "host_latency": 1e-6, "disk_latency": 1e-6}
TIERS = st.builds(
    lambda host, disk: Tiers(host * PAGE, disk * PAGE, **FAST),
    host=st.sampled_from([0, 1, 5, 1000]),
    disk=st.sampled_from([0, 2, 1000]),
)
