"""Request formats of servers, by the values of `--backend`, and the choice among them."""

from __future__ import annotations

from typing import Any, NamedTuple

AUTO = "auto"


class Backend(NamedTuple):
    """The prompts and fields that a server accepts."""

    chat: bool = False  # /v1/chat/completions
    text: bool = False  # prompts as text, even without a tokenizer
    ignore_eos: bool = True  # default of --ignore-eos
    objectives: bool = False  # ttft_slo_ms and other objectives


BACKENDS = {
    "jaxserve": Backend(objectives=True),
    "jaxserve-chat": Backend(chat=True, text=True, objectives=True),
    "openai": Backend(text=True, ignore_eos=False),  # only what OpenAI's API has
    "openai-chat": Backend(chat=True, text=True, ignore_eos=False),
    "vllm": Backend(),
    "vllm-chat": Backend(chat=True, text=True),
    "sglang": Backend(),
    "sglang-chat": Backend(chat=True, text=True),
}
OWNERS = ("jaxserve", "vllm", "sglang")  # names that these servers give in /v1/models


def choose(model: dict[str, Any], completions: bool, chat: bool = False) -> str:
    """Return the backend of a server that is not named, from its entry in /v1/models.

    A server that does not say what it is gets standard fields only. completions: it has /v1/completions. chat: the
    load is conversations, for which /v1/chat/completions is used.
    """
    owner = str(model.get("owned_by", "")).lower()
    if owner in OWNERS:
        return f"{owner}-chat" if chat else owner
    return "openai" if completions and not chat else "openai-chat"
