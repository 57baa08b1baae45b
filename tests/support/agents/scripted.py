"""A model that follows a script behind the real server: it reads the rendered prompt, and calls tools as text.

The demo model cannot write calls. Everything but the choice of tokens is the real thing: HTTP, bodies, tokenizer,
the template with tools, detokenization, parsers, streams.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxserve.config import ServeConfig
from jaxserve.sched.api.plan import Delta
from jaxserve.sched.api.request import Request
from jaxserve.server.service import Service
from jaxserve.tokenizer import Tokenizer
from tests.support.server.double import Double
from tests.support.server.live import Live

CONTEXT = 400_000  # tokens: an agent's first prompt has tens of thousands, at two characters each
COMMAND = ("command", "cmd", "commands", "script")  # names of the argument of a tool that runs a shell command
PATH = ("file_path", "filePath", "path", "absolute_path", "filepath")
MOST_TURNS = 12  # in all: an agent whose tool does not work would go on for ever
NEXT = re.compile(r"The value is in the file (\S+\.txt)")
RESULT = re.compile(r"<tool_response>\n(.*?)\n</tool_response>", re.S)
VALUE = re.compile(r"The value is (\d+)")


class Scripted(Double):
    """An engine double that writes what `script` returns for the text of the prompt."""

    def __init__(self, tokenizer: Tokenizer, script: Callable[[str], str], context: int = CONTEXT) -> None:
        super().__init__(vocab_size=len(tokenizer), max_model_len=context)
        self._tokenizer, self._script = tokenizer, script
        self.unlucky = None

    def _run(self, request: Request, tell: Callable[[Delta], None]) -> None:
        prompt = self._tokenizer.decode(request.prompt, skip_special_tokens=False)
        written = self._tokenizer.encode(self._script(prompt), add_special_tokens=False)
        room = min(request.params.max_tokens or CONTEXT, self.info.max_model_len - request.prompt_length)
        request.scheduled_at = time.monotonic()
        for count, token in enumerate(written, 1):
            if request.id in self.cancelled:
                self._end(request, self.cancelled[request.id])
                tell(Delta(request.id, finish_reason=request.finish_reason))
                return
            request.output.append(token)
            request.token_times.append(time.monotonic())
            request.first_token_at = request.token_times[0]
            reason = "stop" if count == len(written) else "length" if count >= room else None
            if reason is not None:
                self._end(request, reason)
            tell(Delta(request.id, (token,), finish_reason=reason))
            if reason is not None:
                return


class Treasure:
    """Two files in a folder: the first names the second, which holds a value that nothing else does."""

    def __init__(self, folder: Path, *, mentions: bool = False, padding: str = "") -> None:
        """folder: is made.

        mentions: the model calls no tool, but mentions a file, as an agent without tools expects.
        padding: the rest of the first file.
        """
        folder.mkdir()
        salt = f"{time.time_ns() % 10**9:09d}"
        self.folder, self.value, self._mentions = folder, salt[::-1], mentions
        self.first, second = folder / "first.txt", folder / f"second-{salt[:4]}.txt"
        self.first.write_text(f"The value is in the file {second.name}.\n{padding}")
        second.write_text(f"The value is {self.value}\n")
        self.task = "Read first.txt, follow what it says, and tell me the value."
        if mentions:
            self.task = "Ask for the files that you need, and tell me the value."  # a name in it would add the file
        self.turns = list[str]()  # what the model wrote, but for titles and the like

    def script(self, prompt: str) -> str:
        """Return what the model writes: a call that reads a file, or the value that the last result holds."""
        tools = tools_of(prompt)
        if not tools and not self._mentions:
            return "A short task"
        results = prompt if self._mentions else "\n".join(RESULT.findall(prompt))
        if len(self.turns) >= MOST_TURNS:
            return "I give up."
        self.turns.append(self._turn(tools, results))
        return self.turns[-1]

    def _turn(self, tools: list[dict[str, Any]], results: str) -> str:
        if value := VALUE.search(results):
            return f"The value is {value[1]}, as the second file says."
        second = NEXT.search(results)
        path = self.folder / (second[1] if second else self.first.name)
        if self._mentions:
            return f"Please add {path.name} to the chat."
        again = any(path.name in turn for turn in self.turns)
        return f"I read a file.\n<tool_call>\n{json.dumps(reading(tools, path, begins=again))}\n</tool_call>"


def tools_of(prompt: str) -> list[dict[str, Any]]:
    """Return the tools that a prompt describes."""
    lines = re.search(r"^<tools>\n(.*?)\n</tools>$", prompt, re.S | re.M)
    return [json.loads(line) for line in lines[1].splitlines()] if lines else []


def reading(tools: list[dict[str, Any]], path: Path, *, begins: bool) -> dict[str, Any]:
    """Return a call of one of the tools that shows a file; of a tool that is not offered if none does.

    begins: shows the first line only, if the tool runs commands: the whole did not help.
    """
    for names, as_command in ((COMMAND, True), (PATH, False)):
        for tool in tools:
            properties = tool.get("parameters", {}).get("properties", {})
            name = next((name for name in names if name in properties), None)
            if name is None or re.search(r"write|edit|create|delete|patch|notebook|kill", tool["name"], re.I):
                continue
            words = ["head", "-n", "1", str(path)] if begins else ["cat", str(path)]
            value: Any = " ".join(words) if as_command else str(path)
            if as_command and properties[name].get("type") == "array":
                value = [" ".join(words)] if name == "commands" else words
            needed = set(tool["parameters"].get("required", ())) - {name}
            return {
                "name": tool["name"],
                "arguments": {name: value, **{one: _plain(properties[one]) for one in needed}},
            }
    return {"name": "none", "arguments": {"offered": [tool["name"] for tool in tools]}}


def _plain(schema: dict[str, Any]) -> Any:
    """Return a value of a schema that changes nothing."""
    if "enum" in schema:
        return schema["enum"][0]
    kind = schema.get("type", "string")
    kinds: dict[str, Any] = {"boolean": False, "integer": 1, "number": 1, "array": [], "object": {}}
    return kinds.get(kind if isinstance(kind, str) else kind[0], "reading a file")


def serving(tokenizer: Tokenizer, treasure: Treasure, context: int = CONTEXT, **settings: Any) -> Live:
    """Return a server of the scripted model. context: tokens."""
    config = ServeConfig.load(
        None, **{"tool_call_parser": "hermes", "max_body_size": "64MiB", "disable_log_stats": True, **settings}
    )
    return Live(Service(Scripted(tokenizer, treasure.script, context), tokenizer, config))
