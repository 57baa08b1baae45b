"""The one tree of errors. Callers catch it broadly (`JaxserveError`) or narrowly."""


class JaxserveError(Exception):
    """Anything jaxserve raises on purpose. Its message names the value and what is allowed."""


class InvalidValue(JaxserveError, ValueError):
    """A value given by a person (flag, config key, request field) is not allowed. `param` names the field."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class QueueFull(JaxserveError):
    """The bounded queue is full; retry after `retry_after` seconds."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Unavailable(JaxserveError):
    """What would serve a request does not respond at present; retry after `retry_after` seconds."""

    def __init__(self, message: str, retry_after: float = 5.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class StepFailed(JaxserveError):
    """A step raised on the device, or what was asked needs the KV pool that was lost with it."""


ECHO = 80  # characters of a value that an error repeats


def short(value: object, most: int = ECHO) -> str:
    """Return `repr(value)`, cut to `most` characters: an error must not repeat a whole request body."""
    if isinstance(value, str | bytes | list | tuple) and len(value) > most:
        value = value[:most]  # repr of the whole value may be megabytes
        text = repr(value)[: most - 1]
    elif isinstance(value, int) and value.bit_length() > 8 * most:
        return f"an integer of {value.bit_length()} bits"  # str() refuses integers above 4,300 digits
    else:
        text = repr(value)
        if len(text) <= most:
            return text
    return text[: most - 1] + "…"
