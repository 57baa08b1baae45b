"""The body of `POST /v1/responses`, and the chat request that it stands for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.errors import InvalidValue, short
from jaxserve.sched.api.params import MAX_LOGPROBS
from jaxserve.server.failures import wrong
from jaxserve.server.openai import ChatBody, Drawn, Part, validated
from jaxserve.server.responses.items import Message
from jaxserve.server.responses.tools import Tool, choice_of
from jaxserve.server.translated import chunked, shared_fields

NAMES = {  # of the fields of chat, in errors
    r"messages": "input",
    r"max_(completion_)?tokens": "max_output_tokens",
    r"response_format(\.json_schema)?": "text.format",
    r"reasoning_effort": "reasoning.effort",
    r"tools\[(\d+)\]\.function": r"tools[\1]",
    r"tool_choice\.function": "tool_choice",
}
LOGPROBS = "message.output_text.logprobs"
INCLUDED = (
    LOGPROBS,
    "reasoning.encrypted_content",  # always empty
    # of tools that only OpenAI runs, and which never are in an answer here
    "web_search_call.results",
    "web_search_call.action.sources",
    "file_search_call.results",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "message.input_image.image_url",
)
MAX_METADATA, MAX_KEY, MAX_VALUE = 16, 64, 512  # OpenAI's: pairs, and characters


class TextOptions(Part):
    """The `text` field."""

    format: dict[str, Any] | None = None
    verbosity: str | None = None  # without effect


class ReasoningOptions(Part):
    """The `reasoning` field."""

    effort: str | None = None
    summary: str | None = None  # without effect: reasoning is given in full


class ResponsesBody(Drawn):
    """The body of `POST /v1/responses`."""

    input: str | list[Any]
    instructions: str | None = None
    max_output_tokens: int | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None  # without effect
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    previous_response_id: str | None = None
    store: bool | None = None  # None: true if this server stores responses
    metadata: dict[str, Any] | None = None
    truncation: str | None = None
    background: bool | None = None
    conversation: Any = None
    prompt: Any = None
    stop: str | list[str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # accepted without effect
    max_tool_calls: int | None = None  # of built-in tools
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None

    @property
    def wants_logprobs(self) -> bool:
        return self.top_logprobs is not None or LOGPROBS in (self.include or ())


def check_body(body: ResponsesBody) -> None:
    """Raise InvalidValue for what this server does not do, naming the field."""
    for name, value, neutral, remedy in (
        ("background", body.background, (None, False), "wait for the answer, or stream it"),
        ("conversation", body.conversation, (None,), "use previous_response_id, or send the items"),
        ("prompt", body.prompt, (None,), "send the text as instructions or input"),
        ("truncation", body.truncation, (None, "disabled"), "leave it out, or use truncate_prompt_tokens"),
    ):
        if value not in neutral:
            raise wrong(name, value, f"is not supported by this server: {remedy}")
    for at, name in enumerate(body.include or ()):
        if name not in INCLUDED:
            raise InvalidValue(f"include[{at}]={short(name)} is not supported: {', '.join(INCLUDED)} are", "include")
    if not 0 <= (body.top_logprobs or 0) <= MAX_LOGPROBS:
        raise wrong("top_logprobs", body.top_logprobs, f"must be 0 to {MAX_LOGPROBS}")
    _check_metadata(body.metadata or {})


def _check_metadata(given: dict[str, Any]) -> None:
    if len(given) > MAX_METADATA:
        raise InvalidValue(f"metadata has {len(given)} entries: at most {MAX_METADATA} are allowed", "metadata")
    for key, value in given.items():
        if len(key) > MAX_KEY:
            raise InvalidValue(f"metadata has a key of {len(key)} characters: at most {MAX_KEY}", "metadata")
        if not isinstance(value, str) or len(value) > MAX_VALUE:
            what = f"metadata.{key}={short(value)} must be a text of at most {MAX_VALUE} characters"
            raise InvalidValue(what, "metadata")


def chat_of(body: ResponsesBody, messages: Sequence[Message], tools: Mapping[str, Tool]) -> ChatBody:
    """Return the chat request of a body. messages: of the input, and of what comes before it. tools: of the body.

    Raises InvalidValue that names a field of the body.
    """
    first = [{"role": "system", "content": body.instructions}] if body.instructions is not None else []
    fields: dict[str, Any] = {**shared_fields(body), "model": body.model, "messages": [*first, *messages]}
    fields |= {
        name: value
        for name, value in (
            ("max_completion_tokens", body.max_output_tokens),
            ("stop", body.stop),
            ("chat_template_kwargs", body.chat_template_kwargs),
            ("response_format", _format(body.text.format if body.text is not None else None)),
            ("reasoning_effort", body.reasoning and body.reasoning.effort),
            ("tools", [{"type": "function", "function": tool.function} for tool in tools.values()] or None),
            ("tool_choice", choice_of(body.tool_choice, tools)),
            ("parallel_tool_calls", body.parallel_tool_calls),
        )
        if value is not None
    }
    if body.wants_logprobs:
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    return validated(fields | chunked(body.stream), ChatBody)


def _format(given: dict[str, Any] | None) -> dict[str, Any] | None:
    if given is None or given.get("type") != "json_schema":
        return given
    if given.get("schema") is None:
        raise InvalidValue("text.format.schema is missing: a json_schema needs one", "text.format.schema")
    return {"type": "json_schema", "json_schema": {name: value for name, value in given.items() if name != "type"}}
