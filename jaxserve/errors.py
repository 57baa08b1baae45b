"""The errors of jaxserve, for callers outside `sched`: one tree, caught broadly (`JaxserveError`) or narrowly."""

from jaxserve.sched.api.errors import ECHO, InvalidValue, JaxserveError, QueueFull, StepFailed, short

__all__ = ["ECHO", "InvalidValue", "JaxserveError", "QueueFull", "StepFailed", "short"]
