"""The errors of jaxserve, for callers outside `sched`: one tree, caught broadly (`JaxserveError`) or narrowly."""

from jaxserve.sched.errors import InvalidValue, JaxserveError, QueueFull, StepFailed, short

__all__ = ["InvalidValue", "JaxserveError", "QueueFull", "StepFailed", "short"]
