"""Chat templates that check and drop as those of published models do."""

from __future__ import annotations

from functools import cache

import jaxserve.demo
from jaxserve.tokenizer import Tokenizer

RAISE = "{{ raise_exception('%s') }}"
# Llama 3: any role becomes a header. Only those that the model was trained with may reach it.
HEADERS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ tools }}"
# Qwen 2.5 and 3: other roles than these vanish.
DROPS = (
    "{% if messages[0].role != 'system' %}<default>{% endif %}{% for m in messages %}"
    "{% if m.role in ('system', 'user', 'assistant', 'tool') %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
    "{{ tools }}"
)
# Qwen 3.5: the system message is the first one, and other roles are errors.
FIRST = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first or m.role == 'developer' %}"
    + RAISE % "unexpected role"
    + "{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ tools }}"
)
# gpt-oss: it knows the developer, and reads instructions in the first message only.
HARMONY = (
    "{% for m in messages %}{% if m.role in ('developer', 'system') %}{% if loop.first %}"
    "<developer>{{ m.content }}{% endif %}{% else %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}{{ tools }}"
)
# Gemma 3: user and model alternate after the system message, and there are no tools.
ALTERNATES = (
    "{% set first = '' %}{% set rest = messages %}{% if messages[0].role == 'system' %}"
    "{% set first = messages[0].content %}{% set rest = messages[1:] %}{% endif %}{% for m in rest %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    + RAISE % "roles must alternate"
    + "{% endif %}<{{ m.role }}>{{ first if loop.first }}{{ m.content }}{% endfor %}"
)
# Gemma 2 and the first Mistral: there is no system message at all.
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}" + RAISE % "no system role" + "{% endif %}" + ALTERNATES
)  # fmt: skip
# Mistral v0.3: ids of calls have nine letters and digits. One call at a time, as with Llama 3.1.
SHORT_IDS = (
    "{% for m in messages %}{% if m.tool_calls is defined and m.tool_calls is not none %}"
    "{% if m.tool_calls | length != 1 %}" + RAISE % "one call at a time" + "{% endif %}{% for c in m.tool_calls %}"
    "{% if c.id is not defined or c.id | length != 9 %}" + RAISE % "ids have 9 characters" + "{% endif %}"
    "<call {{ c.id }}>{% endfor %}{% elif m.role == 'tool' %}"
    "{% if m.tool_call_id | length != 9 %}" + RAISE % "ids have 9 characters" + "{% endif %}"
    "<result {{ m.tool_call_id }}>{% else %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}{{ tools }}"
)  # fmt: skip


# Mistral v0.3 counts neither calls nor results when it checks that roles alternate.
COUNTS = (
    "{% set ns = namespace(at=0) %}{% for m in messages %}{% if m.role != 'tool' and not m.tool_calls %}"
    "{% if (m.role == 'user') != (ns.at % 2 == 0) %}" + RAISE % "roles must alternate" + "{% endif %}"
    "{% set ns.at = ns.at + 1 %}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ tools }}"
)  # fmt: skip
# Llama 3.1: one call in a message.
ONE_CALL = (
    "{% for m in messages %}{% if m.tool_calls is defined %}{% if m.tool_calls | length != 1 %}"
    + RAISE % "one call at a time"
    + "{% endif %}<call {{ m.tool_calls[0].function.name }}>{% else %}<{{ m.role }}>{{ m.content }}"
    "{% endif %}{% endfor %}{{ tools }}"
)


@cache
def tokenizer_of(template: str) -> Tokenizer:
    """Return the demo's tokenizer with a template."""
    return Tokenizer.load(jaxserve.demo.model_path(), chat_template=template)
