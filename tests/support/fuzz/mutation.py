"""Nearly valid request bodies: valid ones with one to four mutations of their JSON or bytes."""

from __future__ import annotations

import copy
import json
import random
from typing import Any, NamedTuple

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What does os.path.join do?"}]
SAMPLED = {
    "max_tokens": 3, "temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "presence_penalty": 0.5, "seed": 7,
    "frequency_penalty": 0.5, "repetition_penalty": 1.1, "n": 2, "stop": ["\n", "ab"], "stop_token_ids": [5, 6],
    "ignore_eos": True, "min_tokens": 1, "logit_bias": {"5": 1.5}, "stream": True, "user": "u", "priority": 1,
    "stream_options": {"include_usage": True}, "service_tier": "default", "ttft_slo_ms": 500, "tpot_slo_ms": 50,
    "tbt_slo_ms": 200.5, "stage_slo": {"answer": {"tpot_slo_ms": 20}}, "pace_tokens": False, "cache_salt": "s",
    "request_id": "r", "skip_special_tokens": False, "include_stop_str_in_output": True, "model": "jaxserve-demo",
}  # fmt: skip
DRAWN = {
    "temperature": 0.7, "top_p": 0.9, "seed": 7, "stream": True, "bad_words": ["ab", " c"], "ttft_slo_ms": 500,
    "allowed_token_ids": [5, 6, 7, 8], "truncate_prompt_tokens": 20, "metadata": {"a": "b"}, "model": "jaxserve-demo",
}  # fmt: skip
ITEMS = [
    {"role": "developer", "content": "Be brief."},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "What?"}]},
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "That."}]},
    {"role": "user", "content": "Why?"},
]
BLOCKS = [
    {"role": "user", "content": [{"type": "text", "text": "What?", "cache_control": {"type": "ephemeral"}}]},
    {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm."}, {"type": "text", "text": "That."}]},
    {"role": "user", "content": "Why?"},
]
SCHEMA = {"type": "json_schema", "schema": {"type": "object"}}
OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": OBJECT}}
CALL = {"id": "call_0123456789abcdef", "type": "function", "function": {"name": "f", "arguments": '{"a": '}}
TURNS = [
    {"role": "user", "content": "What?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning": "Hm."},
    {"role": "tool", "tool_call_id": CALL["id"], "content": [{"type": "text", "text": "3"}]},
    {"role": "developer", "content": "In French."},
    {"role": "assistant", "content": "Yes.", "tool_calls": []},
    {"role": "user", "content": [{"type": "input_text", "text": "So?"}]},
]
CUSTOM = {"type": "custom", "name": "p", "format": {"type": "grammar", "syntax": "lark", "definition": "start: /a/"}}
NAMESPACE = {
    "type": "namespace",
    "name": "n",
    "tools": [{"type": "function", "name": "f", "parameters": OBJECT}, CUSTOM],
}
AGENT = {
    "input": [
        *ITEMS,
        {"type": "function_call", "call_id": "c", "name": "f", "namespace": "n", "arguments": '{"a'},
        {"type": "custom_tool_call", "call_id": "d", "name": "p", "input": "a"},
        {"type": "local_shell_call", "call_id": "e", "action": {"type": "exec", "command": ["ls"], "env": {}}},
        {"type": "web_search_call", "id": "w", "action": {"type": "search", "query": "x"}},
        {"type": "function_call_output", "call_id": "c", "output": "3"},
        {"type": "custom_tool_call_output", "call_id": "d", "output": [{"type": "input_text", "text": "b"}]},
        {"type": "local_shell_call_output", "id": "e", "output": "c"},
    ],
    "tools": [NAMESPACE, CUSTOM, {"type": "web_search"}, {"type": "local_shell"}],
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "custom", "name": "p"}]},
    "include": ["reasoning.encrypted_content"],
    "reasoning": {"effort": "low", "summary": "auto"},
    "max_output_tokens": 3,
}
AGENTS: tuple[tuple[str, dict[str, Any]], ...] = (
    (
        "/v1/chat/completions",
        {
            "messages": TURNS,
            "tools": [FUNCTION],
            "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [FUNCTION]}},
            "thinking": {"type": "disabled"},
            "enable_thinking": True,
            "max_tokens": 3,
            "regex": "a+",
        },
    ),
    ("/v1/responses", AGENT),
    ("/v1/responses/input_tokens", AGENT),
    (
        "/v1/messages",
        {
            "messages": [
                {"role": "user", "content": [{"type": "document", "source": {"type": "text", "data": "Rain."}}]},
                {"role": "assistant", "content": [{"type": "server_tool_use", "id": "s", "name": "w", "input": {}}]},
                {"role": "system", "content": [{"type": "text", "text": "Now."}]},
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "c",
                            "content": [{"type": "tool_reference", "tool_name": "f"}],
                        }
                    ],
                },
            ],
            "tools": [{"type": "web_search_20250305", "name": "w"}, {"name": "f", "input_schema": OBJECT}],
            "output_config": {"effort": "low"},
            "thinking": {"type": "adaptive"},
            "max_tokens": 3,
        },
    ),
)
OFTEN = ("max_tokens", "max_output_tokens")  # kept in most bodies, so that they end soon
SEEDS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/completions", {"prompt": "def main(", **SAMPLED, "logprobs": 2, "echo": True}),
    ("/v1/completions", {"prompt": ["def", "class A:"], **SAMPLED}),
    ("/v1/completions", {"prompt": [5, 6, 7], **SAMPLED, "prompt_logprobs": 1, "stream": False}),
    ("/v1/completions", {"prompt": [[5, 6], [7]], "max_tokens": 2}),
    ("/v1/chat/completions", {"messages": CHAT, **SAMPLED, "logprobs": True, "top_logprobs": 2}),
    ("/v1/chat/completions", {"messages": CHAT, "max_completion_tokens": 3, "chat_template_kwargs": {"a": 1}}),
    (
        "/v1/responses",
        {
            "input": ITEMS,
            **DRAWN,
            "max_output_tokens": 3,
            "instructions": "Well?",
            "store": True,
            "text": {"format": {**SCHEMA, "name": "a", "strict": True}},
            "reasoning": {"effort": "low"},
            "include": ["message.output_text.logprobs"],
            "top_logprobs": 2,
            "parallel_tool_calls": True,
        },
    ),
    ("/v1/responses", {"input": "What?", "max_output_tokens": 3, "previous_response_id": "resp_1", "stream": False}),
    (
        "/v1/messages",
        {
            "messages": BLOCKS,
            **DRAWN,
            "max_tokens": 3,
            "system": [{"type": "text", "text": "Be brief."}],
            "stop_sequences": ["ab"],
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "output_config": {"format": SCHEMA},
            "top_k": 5,
        },
    ),
    ("/v1/messages", {"messages": CHAT[1:], "max_tokens": 3, "system": "Be brief."}),
    (
        "/v1/messages",
        {
            "messages": [
                {"role": "user", "content": "What?"},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "3"}]},
            ],
            "max_tokens": 3,
            "tools": [{"name": "f", "input_schema": OBJECT}],
            "tool_choice": {"type": "any"},
        },
    ),
    (
        "/v1/responses",
        {
            "input": [
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "3"},
            ],
            "tools": [{"type": "function", "name": "f", "parameters": OBJECT}],
            "tool_choice": "required",
            "max_output_tokens": 3,
        },
    ),
    *AGENTS,
    ("/v1/messages/count_tokens", {"messages": BLOCKS, "system": "Be brief."}),
    ("/tokenize", {"prompt": "def main(", "add_special_tokens": False, "return_token_strs": True}),
    ("/tokenize", {"messages": CHAT, "add_generation_prompt": False}),
    ("/detokenize", {"tokens": [5, 6, 7]}),
    ("/v1/admin/roles", {"roles": ["mixed"]}),
    ("/v1/admin/roles", {"instance": 0, "role": "mixed"}),
)
LONG = "Q" * 3000
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 63, 64, 65, 2**31 - 1, 2**31, 2**63, -(2**63), 10**30, 0.0, -0.0, 0.5, 1e-300,
    1e308, float("inf"), float("nan"), "", "a", "\x00", "\ud800", "é🎉", LONG, " " * 500, "1", "inf", "null", "default",
    "best_effort", [], [[]], [None], [0], [5] * 70, ["a"] * 70, ["a"] * 1100, [LONG], {}, {"": ""}, {"a": {"b": [1]}},
    {"5": 1e308}, {LONG: LONG}, "x" * 5000, [[[[1]]]], [1, "a"], [True], [-1], [10**30], "{{ 7*7 }}", "%s%n", "../..",
)  # fmt: skip
NAMES = (
    *SAMPLED, "prompt", "messages", "logprobs", "top_logprobs", "echo", "max_completion_tokens", "tools",
    "tool_choice",
    "response_format", "best_of", "suffix", "lora_request", "chat_template", "chat_template_kwargs",
    "add_special_tokens",
    "continue_final_message", "prompt_logprobs", "roles", "role", "instance", "tokens", "unknown", "", "__class__",
    *DRAWN, "input", "instructions", "text", "reasoning", "system", "thinking", "store", "previous_response_id",
    "enable_thinking", "regex", "ebnf", "grammar", "json_schema", "ttft_slo", "truncation_side", LONG,
)  # fmt: skip
HEADERS = (
    "anthropic-version",
    "x-api-key",
    "x-slo-ttft-ms",
    "x-llm-d-slo-ttft-ms",
    "x-slo-tpot-ms",
    "x-request-id",
    "authorization",
    "content-type",
)


class Case(NamedTuple):
    """One request, and the number of answer chunks after which its client disconnects (None: never)."""

    path: str
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()
    leaves: int | None = None

    def __repr__(self) -> str:
        shown = self.body if len(self.body) < 2000 else self.body[:2000] + b"..."
        return f"Case({self.path!r}, {shown!r}, {self.headers!r}, {self.leaves!r})"


def case(draw: random.Random) -> Case:
    """Make a case from `draw` alone: the same seed gives the same case."""
    path, seed = draw.choice(SEEDS)
    body: Any = copy.deepcopy(seed)
    for name in list(body):
        if draw.random() < (0.02 if name in OFTEN else 0.5) and len(body) > 2:
            del body[name]
    for _ in range(draw.choice((0, 1, 1, 1, 2, 3))):
        body = mutated(body, draw)
    raw = json.dumps(body, ensure_ascii=draw.random() < 0.5).encode("utf-8", "surrogatepass")
    if draw.random() < 0.1:
        raw = torn(raw, draw)
    headers = []
    if draw.random() < 0.1:
        headers.append((draw.choice(HEADERS), draw.choice(("", "0", "-1", "nan", "inf", "1e999", "500", "a", LONG))))
    if path.startswith("/v1/admin"):
        headers += [("authorization", "Bearer boss"), ("content-type", "application/json")]
    return Case(path, raw, tuple(headers), draw.choice((0, 1, 3)) if draw.random() < 0.1 else None)


def mutated(body: Any, draw: random.Random) -> Any:
    """Mutate one value, at the top level or nested."""
    if not isinstance(body, dict) or draw.random() < 0.02:
        return copy.deepcopy(draw.choice(VALUES))
    holder: Any = body
    while draw.random() < 0.3:
        inner = [one for one in (holder.values() if isinstance(holder, dict) else holder) if one and _is_holder(one)]
        if not inner:
            break
        holder = draw.choice(inner)
    value = copy.deepcopy(draw.choice(VALUES))
    if isinstance(holder, list):
        holder[draw.randrange(len(holder))] = value
    elif holder is body and draw.random() < 0.3:
        holder[draw.choice(NAMES)] = value
    elif holder:
        holder[draw.choice(list(holder))] = value
    return body


def torn(raw: bytes, draw: random.Random) -> bytes:
    """Mutate the bytes of a body, which may then be invalid JSON."""
    at = draw.randrange(len(raw)) if raw else 0
    return draw.choice(
        (
            raw[:at],
            raw[:at] + bytes([draw.randrange(256)]) + raw[at + 1 :],
            raw[:at] + raw[at : at + 50] * 3 + raw[at:],
            b"[" * 10_000 + raw,
            raw + raw,
            raw.replace(b"0", b"9" * 5000),
            b"\xef\xbb\xbf" + raw,
            raw.decode("utf-8", "replace").encode("utf-16"),
            b" " * 300_000,
        )
    )


def _is_holder(value: Any) -> bool:
    return isinstance(value, dict | list)
