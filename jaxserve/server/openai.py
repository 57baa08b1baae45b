"""Request bodies of OpenAI's API with vLLM's extensions: which fields are parsed, refused or ignored."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, ClassVar, TypeVar

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from jaxserve.errors import ECHO, InvalidValue, short
from jaxserve.generation.sharing import check_salt
from jaxserve.sched.api.params import MAX_LOGPROBS, SamplingParams
from jaxserve.server.failures import wrong

logger = logging.getLogger("jaxserve.server")

EXPLAINED = 1 << 20  # characters of a body of which is said what is wrong where
MAX_TOKENS = 1 << 20  # that one request may ask to detokenize; the context is shorter

M = TypeVar("M", bound="Body")


class Part(BaseModel):
    """A body, or an object within one. A field that is null counts as left out, as with OpenAI's API."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        needed = {name for name, field in cls.model_fields.items() if field.is_required()}
        return {name: value for name, value in given.items() if value is not None or name in needed}


class StreamOptions(Part):
    """The `stream_options` field."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class StageSLO(Part):
    """The objective of one stage of the output."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    tpot_slo_ms: float


class Body(Part):
    """The base of all request bodies. Unknown fields are ignored, with one warning per name."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)
    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {}  # further fields, with the values that change nothing
    model: str | None = None


class Timed(Body):
    """The latency objectives of a request, and its end user."""

    priority: int | None = None
    service_tier: str | None = None
    ttft_slo_ms: float | None = None
    tpot_slo_ms: float | None = None
    tbt_slo_ms: float | None = None
    stage_slo: dict[str, StageSLO] | None = None
    pace_tokens: bool | None = None  # streams only
    # accepted without effect
    user: str | None = None


class Scheduled(Timed):
    """The fields that all requests for the engine share."""

    add_special_tokens: bool | None = None
    session_id: str | None = None  # the pages of a session wait for its next turn in the prefix cache
    cache_salt: str | None = None  # as in vLLM: cached prefixes are shared among requests with equal salts
    request_id: str | None = None


class Drawn(Scheduled):
    """How tokens are sampled: fields that all APIs share."""

    min_tokens: int = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    truncate_prompt_tokens: int | None = None
    logits_processors: list[str | dict[str, Any]] | None = None  # names, or objects with `name` and `argument`
    # structured outputs: vLLM's field, and the older names of vLLM
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    # the same, as SGLang and llama.cpp name them
    regex: str | None = None
    json_schema: dict[str, Any] | str | None = None
    ebnf: str | None = None
    grammar: str | None = None


class Sampled(Drawn):
    """The fields that chat and text completions share."""

    max_tokens: int | None = None
    n: int | None = None
    best_of: int | None = None
    stop: str | list[str] | None = None
    prompt_logprobs: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = None
    # accepted without effect
    metadata: dict[str, Any] | None = None
    store: bool | None = None

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class ChatBody(Sampled):
    """The body of `POST /v1/chat/completions`."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool = True
    enable_thinking: bool | None = None  # as Qwen's API has it
    thinking: dict[str, Any] | bool | None = None  # as DeepSeek's and Anthropic's have it

    @property
    def template_arguments(self) -> dict[str, Any]:
        """The variables of the chat template that the request sets."""
        arguments: dict[str, Any] = {}
        if (effort := self.reasoning_effort) is not None:
            if effort not in EFFORTS:
                allowed = ", ".join(EFFORTS)
                raise wrong("reasoning_effort", effort, f"must be one of {allowed}")
            arguments = {"reasoning_effort": effort, **(thinking_arguments(False) if effort == "none" else {})}
        for given in (self.enable_thinking, self.thinking):
            arguments |= {} if given is None else thinking_arguments(given)
        arguments |= {"documents": self.documents} if self.documents else {}
        return arguments | (self.chat_template_kwargs or {})


class CompletionBody(Sampled):
    """The body of `POST /v1/completions`."""

    prompt: Any
    logprobs: int | None = None
    echo: bool = False


class TokenizeBody(Body):
    """The body of `POST /tokenize`: a prompt, or the messages of a conversation."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    return_token_strs: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None

    @property
    def template_arguments(self) -> dict[str, Any]:
        """The variables of the chat template that the request sets."""
        return {**({"documents": self.documents} if self.documents else {}), **(self.chat_template_kwargs or {})}


class DetokenizeBody(Body):
    """The body of `POST /detokenize`."""

    tokens: list[int] = Field(max_length=MAX_TOKENS)


class RolesBody(Body):
    """The body of `POST /v1/admin/roles`: the roles of all instances in order, or the role of one."""

    roles: list[str] | None = None
    instance: int | None = None
    role: str | None = None


class RestartBody(Body):
    """The body of `POST /v1/admin/replicas/restart`: seconds in which each replica may finish its requests."""

    drain_timeout: float | None = None  # None: --drain-timeout


class ScaleBody(Body):
    """The body of `POST /v1/admin/replicas/scale`: the number of replicas, or null: as the load needs."""

    replicas: int | None


# Known fields that change the output and are not supported, with the values that have no effect.
# Any other value is refused.
NOTHING: tuple[Any, ...] = (None, [], {}, "", False)
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "functions": NOTHING,
    "function_call": (*NOTHING, "none", "auto"),
    "modalities": (*NOTHING, ["text"]),
    "audio": NOTHING,
    "images": NOTHING,
    "prediction": NOTHING,
    "web_search_options": (None,),
    "suffix": NOTHING,
    "lora": NOTHING,
    "lora_name": NOTHING,
    "lora_path": NOTHING,
    "lora_request": NOTHING,
    "adapter_id": NOTHING,
    "use_beam_search": NOTHING,
    "length_penalty": (None, 1, 1.0),
    "return_token_ids": NOTHING,
    "return_tokens_as_token_ids": NOTHING,
    "truncation_side": (None, "left"),
    "prompt_embeds": NOTHING,
    "chat_template": NOTHING,  # clients must not run their own templates; the server has --chat-template
}

# The older form of tools is ignored if the client says that none of them may be called.
_CHOICES = {"functions": "function_call"}

# Objectives under other names, as in `ttft_slo`, `max_tpot` and `e2eLatencyMs`. Ignoring them would promise nothing.
_OBJECTIVE = re.compile(r"(?<![a-z])(ttft|tpot|tbt|itl|e2el?|slos?)(?![a-z])|time_?to_?first|time_?per_?output", re.I)
_OBJECTIVES = {"ttft": "ttft_slo_ms", "tpot": "tpot_slo_ms", "tbt": "tbt_slo_ms", "itl": "tbt_slo_ms"}

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
MAX_REQUEST_ID = 1024  # characters

_warned: set[str] = set()
_MAX_WARNED = 1000  # texts; bounds log and memory if a client invents field names


def parse(raw: bytes, kind: type[M]) -> M:
    """Parse a request body as `kind`. Raises InvalidValue that names the field, its value and what is allowed."""
    try:
        text = raw.decode("utf-8-sig")  # strict: `json.loads` on bytes accepts encoded surrogates
        data = _decoded(text)
    except InvalidValue:
        raise
    except (ValueError, RecursionError) as error:
        reason = f"byte {error.start} is not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
        raise InvalidValue(f"the body is not valid JSON: {reason[:200]}") from error
    if not isinstance(data, dict):
        raise InvalidValue(f"the body must be a JSON object, not {type(data).__name__}")
    return validated(data, kind)


def validated(data: dict[str, Any], kind: type[M]) -> M:
    """Return a body of `kind` from its fields. Raises InvalidValue as `parse` does."""
    unsupported = _UNSUPPORTED | kind.unsupported
    for name, neutral in unsupported.items():
        if name in kind.model_fields or name not in data:
            continue
        if data[name] not in neutral and data.get(_CHOICES.get(name, "")) != "none":
            raise InvalidValue(f"{name} is not supported by this server: leave it out", name)
    try:
        body = kind.model_validate(data)
    except ValidationError as error:
        raise _readable(error) from error
    for name in body.model_extra or ():
        if isinstance(body, Timed):
            _check_objective(name)
        if name not in unsupported:
            warn_once(f"ignoring the unknown request field {name[:100]!r}")
    return body


def _check_objective(name: str) -> None:
    """Raise InvalidValue for a field that looks like an objective, but is none."""
    if (match := _OBJECTIVE.search(re.sub("([a-z])([A-Z])", r"\1_\2", name[:100]))) is not None:
        known = _OBJECTIVES.get((match[1] or "").lower(), "ttft_slo_ms, tpot_slo_ms, tbt_slo_ms and stage_slo")
        raise InvalidValue(f"{name[:100]} is no field of a request: objectives in milliseconds are {known}", name[:100])


def thinking_arguments(given: dict[str, Any] | bool) -> dict[str, Any]:
    """Return the variables of chat templates for `thinking`. Raises InvalidValue."""
    kind = given.get("type") if isinstance(given, dict) else "enabled" if given else "disabled"
    if kind not in ("enabled", "adaptive", "auto", "disabled"):
        raise wrong("thinking.type", kind, "must be enabled, adaptive or disabled")
    return {"enable_thinking": kind != "disabled", "thinking": kind != "disabled"}


def warn_once(text: str) -> None:
    """Log what is ignored of a request, the first time."""
    if text not in _warned and len(_warned) < _MAX_WARNED:
        _warned.add(text)
        logger.warning("%s (logged once)", text)


def _check_unicode(data: Any) -> None:
    """Raise InvalidValue, naming the field, for text with an unpaired surrogate, which UTF-8 cannot encode."""
    waiting: list[tuple[str, Any]] = [("", data)]
    while waiting:
        where, value = waiting.pop()
        if isinstance(value, str):
            try:
                value.encode()
            except UnicodeEncodeError as error:
                half = f"\\u{ord(value[error.start]):04x}"
                where = where[:ECHO]  # the client chose this name
                message = f"{where or 'the body'} contains half of a surrogate pair ({half}), which is not text"
                raise InvalidValue(message, where or None) from None
        elif isinstance(value, dict):
            waiting += [(where, key) for key in value]
            waiting += [(where or key, inner) for key, inner in value.items()]
        elif isinstance(value, list):
            waiting += [(where, inner) for inner in value]


def _decoded(text: str) -> Any:
    """Return the value of a JSON text. Raises ValueError, RecursionError, or InvalidValue for half a surrogate pair.

    msgspec holds other threads up for less time than `json` (docs/log.md), and refuses halves of surrogate pairs;
    `json` explains what is wrong.
    """
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        if len(text) > EXPLAINED:
            raise
    data = json.loads(text, parse_constant=_no_constant)
    _check_unicode(data)
    return data


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _readable(error: ValidationError) -> InvalidValue:
    """Return the first validation error, with the field's path and value."""
    first = error.errors(include_url=False)[0]
    path = [part for part in first["loc"] if not (isinstance(part, str) and ("[" in part or part in _TYPES))]
    name = ".".join(map(str, path))[:100]
    if first["type"] == "missing":
        return InvalidValue(f"{name} is missing", name)
    return InvalidValue(f"{name}={short(first['input'])}: {first['msg']}", name)


_TYPES = ("str", "int", "float", "bool")  # pydantic adds the union's member to the path


_APART = {"max_tokens", "logprobs", "structured_outputs"}  # they differ between chat and text completions
_ALIKE = [
    field.name for field in fields(SamplingParams) if field.name in Sampled.model_fields and field.name not in _APART
]


def params_of(body: Sampled, vocab_size: int, defaults: Mapping[str, Any] | None = None) -> SamplingParams:
    """Return the sampling parameters of a request. defaults: of those that it leaves out, by name.

    Raises InvalidValue that names the field.
    """
    if body.best_of is not None and body.best_of > (body.n or 1):
        raise wrong("best_of", body.best_of, f"above n={short(body.n or 1)} is not supported: use n")
    check_names(body)
    given: dict[str, Any] = {name: getattr(body, name) for name in _ALIKE}
    given["logit_bias"] = _logit_bias(body.logit_bias or {}, vocab_size)
    given = {**(defaults or {}), **{name: value for name, value in given.items() if value is not None}}
    if isinstance(body, ChatBody):
        given |= _of_chat(body)
    elif isinstance(body, CompletionBody):
        given |= _of_completion(body)
    for name in ("stop_token_ids", "allowed_token_ids"):
        for token in {min(given[name]), max(given[name])} if given.get(name) else ():
            check_token(token, vocab_size, name)
    return SamplingParams(**given)


def check_names(body: Scheduled) -> None:
    """Raise InvalidValue for a `cache_salt` or `request_id` that is too long, empty, or not printable."""
    if body.cache_salt is not None:
        check_salt(body.cache_salt)
    if body.request_id is not None and not 1 <= len(body.request_id) <= MAX_REQUEST_ID:
        what = f"request_id has {len(body.request_id)} characters: 1 to {MAX_REQUEST_ID} are allowed"
        raise InvalidValue(what, "request_id")
    if body.request_id is not None and not body.request_id.isprintable():  # it comes into logs
        raise wrong("request_id", body.request_id, "must have no control characters")


def _of_chat(body: ChatBody) -> dict[str, Any]:
    name, value = "max_completion_tokens", body.max_completion_tokens
    if value is None:
        name, value = "max_tokens", body.max_tokens
    if value is not None and value < 1:
        raise wrong(name, value, "must be at least 1")
    if body.top_logprobs and not body.logprobs:
        raise wrong("top_logprobs", body.top_logprobs, "needs logprobs to be true")
    if not 0 <= (body.top_logprobs or 0) <= MAX_LOGPROBS:
        raise wrong("top_logprobs", body.top_logprobs, f"must be 0 to {MAX_LOGPROBS}")
    return {"max_tokens": value, "logprobs": (body.top_logprobs or 0) if body.logprobs else None}


def _of_completion(body: CompletionBody) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "max_tokens": 16 if body.max_tokens is None else body.max_tokens,
        "logprobs": body.logprobs,
    }
    if body.echo and body.max_tokens == 0:
        fields["max_tokens"] = 1  # the engine generates at least one token; `Answer.score_only` hides it
    if body.echo and body.logprobs is not None:
        fields["prompt_logprobs"] = body.logprobs if body.prompt_logprobs is None else body.prompt_logprobs
    return fields


def _logit_bias(bias: Mapping[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    pairs = []
    for key, value in bias.items():
        try:
            token = int(key)
        except ValueError as error:  # includes numbers of more than 4,300 digits
            raise InvalidValue(f"logit_bias key {short(key)} must be a token id", "logit_bias") from error
        check_token(token, vocab_size, "logit_bias")
        if not -100.0 <= value <= 100.0:
            raise InvalidValue(f"logit_bias[{short(key)}]={value} must be between -100 and 100", "logit_bias")
        pairs.append((token, value))
    return tuple(pairs)


def check_token(token: int, vocab_size: int, name: str) -> None:
    """Raise InvalidValue for a token id outside the vocabulary."""
    if not 0 <= token < vocab_size:
        raise InvalidValue(f"{name}: token id {short(token)} must be 0 to {vocab_size - 1}", name)
