"""The exceptions of jaxserve, one tree. Callers catch all (`JaxserveError`) or one."""


class JaxserveError(Exception):
    """Base class of the errors that jaxserve raises. The message names the value and what is allowed."""


class InvalidValue(JaxserveError, ValueError):
    """A value from a user (flag, config key, request field) that is not allowed. `param` names the field."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextOverflow(InvalidValue):
    """A prompt and its output exceed the context of a model.

    The message is OpenAI's, since clients know a request to shorten by it. `prompt` and `output` are numbers of
    tokens; with `least` the prompt has at least that many. `param`: the field that has the prompt.
    """

    def __init__(self, context: int, prompt: int, output: int, param: str = "prompt", *, least: bool = False) -> None:
        more, asked = "at least " * least, short(prompt + output)
        super().__init__(
            f"This model's maximum context length is {context} tokens. However, you requested {more}{asked} tokens "
            f"({more}{prompt} in the {param}, {short(output)} in the completion). Please reduce the length of the "
            f"{param} or completion.",
            param,
        )
        self.context, self.prompt, self.output, self.least = context, prompt, output, least


class QueueFull(JaxserveError):
    """The bounded queue is full. Retry after `retry_after` seconds."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Unavailable(JaxserveError):
    """The instances that could serve the request do not respond. Retry after `retry_after` seconds."""

    def __init__(self, message: str, retry_after: float = 5.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class StepFailed(JaxserveError):
    """A step raised on the device, or an operation needs the KV pool that was lost with it."""


class PolicyError(JaxserveError, AssertionError):
    """A policy broke its contract: it raised, returned no Decision, or named a request or step not in its view."""


ECHO = 80  # most characters of a value that an error message repeats


def short(value: object, most: int = ECHO) -> str:
    """Return `repr(value)` cut to `most` characters, so that an error never repeats a whole request body."""
    if isinstance(value, str | bytes | list | tuple) and len(value) > most:
        value = value[:most]  # the repr of the whole value may take megabytes
        text = repr(value)[: most - 1]
    elif isinstance(value, int) and value.bit_length() > 8 * most:
        return f"an integer of {value.bit_length()} bits"  # str() raises for integers above 4,300 digits
    else:
        text = repr(value)
        if len(text) <= most:
            return text
    return text[: most - 1] + "…"
