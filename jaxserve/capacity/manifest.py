"""The Kubernetes manifest of an answer: the server that `jaxserve plan` found, as deploy/kubernetes.yaml runs one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxserve.version import __version__

PORT = 8000
DRAIN, NOTICE, CLOSING = 120, 10, 20  # seconds: to end requests, until no endpoint list names the pod, to close
RESOURCES = {"gpu": "nvidia.com/gpu", "tpu": "google.com/tpu"}


def manifest(command: Sequence[str], platform: str, devices: int) -> list[dict[str, Any]]:
    """Return a Deployment and its Service for `jaxserve serve ...` on `devices` devices of a platform."""
    labels = {"app": "jaxserve"}
    health = {"path": "/health", "port": "http"}
    container = {
        "name": "jaxserve",
        "image": f"registry.example.com/jaxserve:{__version__}",
        "command": list(command[:2]),
        "args": [*command[2:], "--host=0.0.0.0", f"--port={PORT}", f"--drain-timeout={DRAIN}s"],
        "env": [
            {
                "name": "JAXSERVE_API_KEY",
                "valueFrom": {"secretKeyRef": {"name": "jaxserve", "key": "api-key"}},
            },
            {"name": "JAXSERVE_CACHE_DIR", "value": "/cache/xla"},
            {"name": "HF_HOME", "value": "/cache/huggingface"},
        ],
        "ports": [{"name": "http", "containerPort": PORT}],
        "startupProbe": {"httpGet": health, "periodSeconds": 5, "failureThreshold": 360},
        "readinessProbe": {"httpGet": health, "periodSeconds": 2, "failureThreshold": 1},
        "livenessProbe": {"tcpSocket": {"port": "http"}, "periodSeconds": 10},
        "lifecycle": {"preStop": {"sleep": {"seconds": NOTICE}}},
        "resources": {
            "requests": {"cpu": "8", "memory": "64Gi"},
            **({"limits": {RESOURCES[platform]: str(devices)}} if platform in RESOURCES else {}),
        },
        "volumeMounts": [{"name": "cache", "mountPath": "/cache"}],
    }
    pod = {
        "terminationGracePeriodSeconds": DRAIN + NOTICE + CLOSING,
        "containers": [container],
        "volumes": [{"name": "cache", "emptyDir": {}}],
    }
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "jaxserve", "labels": labels},
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": labels},
            "strategy": {"rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "jaxserve", "labels": labels},
        "spec": {"selector": labels, "ports": [{"name": "http", "port": 80, "targetPort": "http"}]},
    }
    return [deployment, service]
