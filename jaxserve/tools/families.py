"""Which parsers a model needs: by name, or by what its chat template writes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import NamedTuple

from jaxserve.errors import InvalidValue, short
from jaxserve.tools import json_calls
from jaxserve.tools.definitions import Tools
from jaxserve.tools.events import Event, Maker, Parser
from jaxserve.tools.forced import Named, Required
from jaxserve.tools.harmony import CHANNEL, Harmony
from jaxserve.tools.llama import OLMO, TAG, glm4, llama3_json, olmo3, pythonic
from jaxserve.tools.prompt import knows_tools
from jaxserve.tools.reasoning import GRANITE, MISTRAL, RESPONSE, THINK, Chain, Plain, Tags, Thinking
from jaxserve.tools.tagged import KEY, MINIMAX, Coder, glm45, minimax_m2

TOOL_PARSERS: dict[str, Maker] = {
    "hermes": json_calls.hermes,
    "qwen3_coder": Coder,
    "llama3_json": llama3_json,
    "pythonic": pythonic,
    "mistral": json_calls.mistral,
    "deepseek_v3": json_calls.deepseek_v3,
    "minimax_m2": minimax_m2,
    "gpt_oss": lambda schemas: Harmony(),
    "granite": json_calls.granite,
    "phi4_mini": json_calls.phi4_mini,
    "phi4_mini_json": json_calls.phi4_mini_json,
    "olmo3": olmo3,
    "glm4": glm4,
    "glm45": glm45,
}
REASONING_TAGS: dict[str, Tags] = {
    "deepseek_r1": THINK,
    "deepseek_v3": THINK,
    "qwen3": THINK,
    "minimax_m2": THINK,
    "mistral": MISTRAL,
    "granite": GRANITE,
    "granite_3_3": THINK,
}
REASONING_PARSERS = (*REASONING_TAGS, "gpt_oss")
# Their markers are special tokens, which the text must keep for them.
SPECIAL = frozenset({"llama3_json", "pythonic", "mistral", "deepseek_v3", "gpt_oss", "granite", "phi4_mini"})


class Parsers(NamedTuple):
    """The parsers of a model; None: text is passed on as it is."""

    tools: str | None
    reasoning: str | None

    @classmethod
    def of(cls, tools: str, reasoning: str, template: str) -> Parsers:
        """Choose by name; `auto` is by the model's chat template. Raises InvalidValue for an unknown name."""
        for field, name, known in (
            ("tool_call_parser", tools, tuple(TOOL_PARSERS)),
            ("reasoning_parser", reasoning, REASONING_PARSERS),
        ):
            if name not in ("auto", "none", *known):
                raise InvalidValue(f"{field}={short(name)} must be auto, none, or one of {', '.join(known)}", field)
        chosen = next((name for name, fits in _TOOLS if fits(template)), "hermes") if tools == "auto" else tools
        thinking = _reasoning_family(template) if reasoning == "auto" else reasoning
        return cls(None if chosen == "none" else chosen, None if thinking == "none" else thinking)

    def reads(self, tools: Tools | None) -> bool:
        """Whether outputs with these tools need a parser."""
        return self.reasoning is not None or (tools is not None and (tools.mode != "auto" or self.tools is not None))

    def keeps_special(self, tools: Tools | None) -> bool:
        """Whether the text must keep special tokens."""
        auto = tools is not None and tools.mode == "auto" and self.tools in SPECIAL
        return auto or self.reasoning in ("gpt_oss", "mistral")

    @property
    def tags(self) -> Tags | None:
        """The tags around the thinking; None if it is not told from the answer."""
        if self.reasoning == "gpt_oss":
            return Tags((f"{CHANNEL}analysis",), (f"{CHANNEL}final",))
        return REASONING_TAGS[self.reasoning] if self.reasoning is not None else None

    def start(self, tools: Tools | None, prompt: str) -> Parser:
        """Return a parser for one output after `prompt`."""
        harmony = self.reasoning == "gpt_oss" or (
            self.tools == "gpt_oss" and tools is not None and tools.mode == "auto"
        )
        second: Parser | None = None
        if tools is not None:
            if tools.mode == "required":
                second = Required()
            elif tools.mode == "named":
                assert tools.name is not None
                second = Named(tools.name)
            elif self.tools is not None and not (harmony and self.tools == "gpt_oss"):
                second = TOOL_PARSERS[self.tools](tools.schemas)
            if not tools.parallel:
                second = FirstCall(second or Plain())
        first: Parser | None = None
        if harmony:
            first = Harmony()
            if tools is not None and not tools.parallel:
                first = FirstCall(first)
        elif self.reasoning is not None:
            around = RESPONSE if self.reasoning == "granite_3_3" else None
            first = Thinking(REASONING_TAGS[self.reasoning], prompt, around)
        if first is not None and second is not None:
            return Chain(first, second)
        return first or second or Plain()


class FirstCall:
    """Drops all calls but the first, for requests without parallel calls."""

    def __init__(self, inner: Parser) -> None:
        self._inner = inner
        self._calls = 0

    def feed(self, text: str) -> list[Event]:
        return self._first(self._inner.feed(text))

    def finish(self) -> list[Event]:
        return self._first(self._inner.finish())

    def _first(self, events: list[Event]) -> list[Event]:
        first = []
        for event in events:
            self._calls += event.kind == "call"
            if event.kind not in ("call", "arguments") or self._calls < 2:
                first.append(event)
        return first


ROLE = "<|start_of_role|>"  # of Granite; 4.0 writes calls as Hermes
# What the templates of a family contain. The first that fits is taken.
_TOOLS: tuple[tuple[str, Callable[[str], bool]], ...] = (
    ("gpt_oss", lambda text: CHANNEL in text and "<|call|>" in text),
    ("minimax_m2", lambda text: MINIMAX.opening in text or "minimax:tool_call" in text),
    ("deepseek_v3", lambda text: json_calls.DEEPSEEK.opening in text),
    ("mistral", lambda text: json_calls.MISTRAL.opening in text),
    ("glm45", lambda text: KEY.opening in text),
    ("granite", lambda text: ROLE in text and (json_calls.PHI.opening in text or "</tool_call>" not in text)),
    ("olmo3", lambda text: OLMO.opening in text),
    ("phi4_mini_json", lambda text: json_calls.FUNCTOOLS.opening in text),
    ("phi4_mini", lambda text: "<|tool|>" in text),
    ("glm4", lambda text: "observation" in text and "metadata" in text),
    ("qwen3_coder", lambda text: "<tool_call>" in text and "<function=" in text),
    ("hermes", lambda text: "<tool_call>" in text or not knows_tools(text)),
    ("pythonic", lambda text: "<|header_start|>" in text),
    ("llama3_json", lambda text: TAG in text or "<|start_header_id|>" in text),
)


def _reasoning_family(template: str) -> str:
    if CHANNEL in template and "analysis" in template:
        return "gpt_oss"
    if ROLE in template and all(tag in template for tag in chain(*RESPONSE)):
        return "granite_3_3"
    for name, tags in (("mistral", MISTRAL), ("granite", GRANITE), ("qwen3", THINK)):
        if any(tag in template for tag in chain(*tags)):  # some begin the thinking, and never write its end
            return name
    return "none"
