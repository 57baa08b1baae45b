"""The errors of jaxserve, for code outside `sched`; all derive from `JaxserveError`."""

from jaxserve.sched.api.errors import ECHO, ContextOverflow, InvalidValue, JaxserveError, QueueFull, StepFailed, short

__all__ = ["ECHO", "ContextOverflow", "InvalidValue", "JaxserveError", "QueueFull", "StepFailed", "short"]
