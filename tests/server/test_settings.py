"""Settings of a server that cannot be meant are refused with what is allowed."""

from __future__ import annotations

from typing import Any

import pytest

from jaxserve.config import ServeConfig
from jaxserve.errors import InvalidValue

BOTH = {"prefill_replicas": 1, "decode_replicas": 1}
REFUSED: tuple[tuple[dict[str, Any], str], ...] = (
    # prefill and decode replicas
    ({"prefill_replicas": 1}, r"prefill_replicas=1 and decode_replicas=None: both must be at least 1"),
    ({"decode_replicas": 2}, r"prefill_replicas=None and decode_replicas=2: both must be at least 1"),
    ({"prefill_replicas": 0, "decode_replicas": 1}, "prefill_replicas=0 must be at least 1"),
    ({**BOTH, "replicas": 2}, "replicas=2 must be left out"),
    ({**BOTH, "enable_prefix_caching": False}, "must be True"),
    ({**BOTH, "mode": "disaggregated"}, "mode='disaggregated' must be left"),
    ({"kv_transfer": "rdma"}, "kv_transfer='rdma' must be one of auto, direct, host"),
    ({"kv_transfer": "auto"}, "kv_transfer='auto' needs several engines: give --replicas, or leave it out"),
    ({"kv_transfer": "host", "replicas": 2, "ray": "local"}, "kv_transfer='host' must be left out with ray='local'"),
    ({"kv_transfer": "host", "replicas": 2, "enable_prefix_caching": False}, "needs enable_prefix_caching"),
    # a changing number of replicas
    ({"min_replicas": 2}, "min_replicas=2 needs max_replicas"),
    ({"replicas": 3, "max_replicas": 2}, r"replicas=3 at the start must be min_replicas=1 to max_replicas=2"),
    ({"min_replicas": 2, "max_replicas": 4}, "replicas=1 at the start must be min_replicas=2 to max_replicas=4"),
    ({"max_replicas": 2, "mesh": "2x1"}, "max_replicas=2 needs instances that prefill and decode"),
    ({"max_replicas": 2, **BOTH}, "max_replicas=2 must be left out with"),
    ({"scaling": "nothing"}, "'nothing'; choose one of budget, requests"),
    # HTTP
    ({"allowed_origins": ("chat.example.com",)}, "must be \\* or SCHEME://HOST"),
    ({"allowed_origins": ("https://chat.example.com/",)}, "without a path"),
    ({"allowed_origins": ('["https://a.example"',)}, "not valid JSON"),
    ({"allowed_origins": ("[1]",)}, "list of strings"),
    ({"allowed_origins": ("*",), "allow_credentials": True}, "name the origins"),
    ({"allowed_methods": ("post",)}, "capital letters"),
    ({"allowed_headers": ("a b",)}, "names of headers"),
    ({"metrics_prefix": "vllm-"}, "metrics_prefix='vllm-' must be"),
    ({"metrics_prefix": ""}, "metrics_prefix='' must be"),
    ({"ssl_keyfile": "key.pem"}, "needs ssl_certfile"),
    ({"ssl_cert_reqs": 3}, "0 \\(CERT_NONE\\), 1 \\(CERT_OPTIONAL\\), 2 \\(CERT_REQUIRED\\)"),
    ({"ssl_cert_reqs": 2, "ssl_certfile": "x"}, "needs ssl_ca_certs"),
    *(
        ({"otlp_traces_endpoint": url}, "otlp_traces_endpoint=.* must be http://HOST")
        for url in ("localhost:4317", "grpc://a:4317", "http://", "http://a:x/", "http://a:99999")
    ),
)


@pytest.mark.parametrize(("given", "why"), REFUSED, ids=str)
def test_bad_settings_name_what_is_allowed(given: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidValue, match=why):
        ServeConfig(**given)
