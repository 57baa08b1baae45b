"""Prompts from files: custom JSON lines, ShareGPT, a Hugging Face dataset's file, conversations.

Published files have rows that cannot be used: these are skipped, counted and told at the end. In a custom file,
which is the reader's own, they are errors.
"""

from __future__ import annotations

import csv
import gzip
import importlib
import io
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from jaxserve.bench.load import Call, Message, Objective, warn
from jaxserve.errors import InvalidValue
from jaxserve.sched.sim.traces.skipped import Skipped, Unusable

T = TypeVar("T")
Count = Callable[[str], int]  # tokens of a text

CUSTOM = ("prompt", "output_tokens", "ttft_slo_ms", "tpot_slo_ms", "tbt_slo_ms", "service_tier", "class")
ROLES = dict.fromkeys(("human", "user", "prompter"), "user")
ROLES |= dict.fromkeys(("gpt", "chatgpt", "assistant", "bing", "bard", "bot", "chatbot", "model"), "assistant")
ROLES |= dict.fromkeys(("system", "developer"), "system")
LISTS = ("conversations", "messages", "conversation", "items")  # columns that have the messages
SHORTEST = 4  # tokens: shorter prompts and answers of ShareGPT are skipped, as in vLLM


def estimate(text: str) -> int:
    """Return a rough number of tokens, for runs without a tokenizer: one for four characters."""
    return max(1, round(len(text) / 4))


class Row(NamedTuple):
    """An object of a file, and its place for messages."""

    value: Mapping[str, Any]
    where: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How to read a file of prompts, with the names of the flags.

    output_len: tokens to generate, instead of those of the file's answers. max_len: skip a request, or end a
    conversation, whose prompt and output together have more tokens. think_time: in seconds.
    """

    output_len: int | None = None
    max_len: int | None = None
    prompt_column: str = "prompt"
    output_column: str | None = None
    think_time: float = 0.0
    max_turns: int | None = None


@dataclass(frozen=True, slots=True)
class Source(Reading):
    """A file of prompts, and how to read it."""

    path: Path
    tokens: Count = estimate
    tell: Callable[[str], None] = warn

    def custom(self, count: int, default_output: int) -> list[Call]:
        """Read objects with a `prompt`, and optional `output_tokens`, objectives, `service_tier` and `class`.

        They keep their order and repeat if there are fewer than `count`. Raises InvalidValue naming the line.
        """
        calls: list[Call] = []
        for row, where in read_rows(self.path):
            if not isinstance(row.get("prompt"), str):
                raise InvalidValue(f"{where}: the line must be an object with a string `prompt`", "dataset_path")
            if unknown := set(row) - set(CUSTOM):
                raise InvalidValue(f"{where}: unknown {sorted(unknown)}; allowed: {sorted(CUSTOM)}", "dataset_path")
            times = [_number(row, name, where) for name in ("ttft_slo_ms", "tpot_slo_ms", "tbt_slo_ms")]
            tier, name = (_text(row, name, where) for name in ("service_tier", "class"))
            slo = Objective(times[0], times[1], name or "", times[2], tier)
            given = _number(row, "output_tokens", where)
            output = self.output_len or int(given or default_output)
            calls.append(Call(0.0, row["prompt"], 0, output, slo))
        return _repeat(calls, count, self.path)

    def sharegpt(self, count: int, seed: int) -> list[Call]:
        """Draw first questions of ShareGPT's conversations, with the length of the first answer to generate."""
        calls: list[Call] = []
        for turns in self._usable(conversation, seed):
            if not turns:
                continue
            prompt, output = self.tokens(turns[0].prompt), self._output(turns[0])
            if prompt < SHORTEST or (self.output_len is None and output < SHORTEST):
                continue
            if self.max_len is not None and (2 * prompt > self.max_len or prompt + output > self.max_len):
                continue
            calls.append(Call(0.0, turns[0].prompt, 0, output, history=turns[0].system))
            if len(calls) == count:
                break
        return _repeat(calls, count, self.path)

    def hugging_face(self, count: int, seed: int, default_output: int) -> list[Call]:
        """Draw rows of a dataset's file: the prompt is a column of texts or conversations.

        The output column has texts, which give the length to generate, or numbers of tokens.
        """
        calls: list[Call] = []
        for turn, length in self._usable(self._first_turn, seed):
            output = self.output_len or length or (self._output(turn) or default_output)
            prompt = self.tokens(turn.prompt)
            if self.max_len is None or prompt + output <= self.max_len:
                calls.append(Call(0.0, turn.prompt, 0, output, history=turn.system))
            if len(calls) == count:
                break
        return _repeat(calls, count, self.path)

    def conversations(self, count: int, seed: int) -> list[Call]:
        """Draw conversations: each question is sent when the one before has its answer, which becomes its history.

        Before each further question passes its own `delay`, or a time drawn from an exponential distribution of
        mean `think_time`, in seconds.
        """
        chosen: list[list[Turn]] = []
        for read in self._usable(conversation, seed):
            if turns := self._fitting(read[: self.max_turns]):
                chosen.append(turns)
            if len(chosen) == count:
                break
        pauses = np.random.default_rng([seed, 2])
        calls: list[Call] = []
        for turns in _repeat(chosen, count, self.path):
            for number, turn in enumerate(turns):
                drawn = float(pauses.exponential(self.think_time)) if number and self.think_time else 0.0
                calls.append(
                    Call(
                        0.0,
                        turn.prompt,
                        0,
                        self._output(turn) or 1,
                        history=turn.system,
                        after=len(calls) - 1 if number else None,
                        delay=0.0 if not number else drawn if turn.delay is None else turn.delay,
                        grows=number > 0,
                    )
                )
        return calls

    def _usable(self, read: Callable[[Mapping[str, Any], str], T], seed: int) -> Iterator[T]:
        """Yield what `read` makes of each row, in drawn order; skip, count and tell rows that cannot be used."""
        skipped = Skipped(self.path, "dataset_path")
        rows = list(read_rows(self.path, skipped))
        try:
            for index in np.random.default_rng([seed, 3]).permutation(len(rows)):
                with skipped:
                    yield read(*rows[index])
            skipped.check()
        finally:  # also where the caller has enough
            if sentence := skipped.sentence():
                self.tell(sentence)

    def _first_turn(self, row: Mapping[str, Any], where: str) -> tuple[Turn, int]:
        return self._turns_of(row, where)[0], self._length(row, where)

    def _output(self, turn: Turn) -> int:
        return self.output_len or (self.tokens(turn.reply) if turn.reply else 0)

    def _fitting(self, turns: Sequence[Turn]) -> list[Turn]:
        """Return the leading turns that stay within `max_len` tokens."""
        total, fitting = 0, []
        for turn in turns:
            total += self.tokens(turn.prompt) + (self._output(turn) or 1)
            if self.max_len is not None and total > self.max_len:
                break
            fitting.append(turn)
        return fitting

    def _turns_of(self, row: Mapping[str, Any], where: str) -> list[Turn]:
        if self.prompt_column not in row:
            there = ", ".join(map(repr, row))
            raise _unusable(where, f"no column {self.prompt_column!r}; there is {there}", "prompt_column")
        value = row[self.prompt_column]
        if isinstance(value, str):
            return [Turn(value)]
        turns = conversation({"messages": value}, where) if isinstance(value, list) else []
        if not turns:
            text = f"column {self.prompt_column!r} must be a text or a list of messages"
            raise _unusable(where, text, "prompt_column")
        return turns

    def _length(self, row: Mapping[str, Any], where: str) -> int:
        """Return the tokens of the output column, 0 without one."""
        if self.output_column is None:
            return 0
        value = row.get(self.output_column)
        if isinstance(value, str):
            return self.tokens(value)
        if isinstance(value, int | float) and not isinstance(value, bool) and 1 <= value < inf:
            return int(value)
        named = f"column {self.output_column!r} is {repr(value)[:40]}"
        raise _unusable(where, f"{named}; it must be a text or a positive number of tokens", "output_column")


class Turn(NamedTuple):
    """A question of a conversation, the answer in the file, and the pause before the question in seconds."""

    prompt: str
    reply: str = ""
    delay: float | None = None
    system: tuple[Message, ...] = ()  # before the first question


def conversation(row: Mapping[str, Any], where: str) -> list[Turn]:
    """Return the turns of ShareGPT's `conversations` ({from, value}) or of `messages` ({role, content}).

    Messages may also be pairs {human, assistant}. An answer before the first question is left out. Raises Unusable.
    """
    told = next((row[name] for name in LISTS if name in row), None)
    if not isinstance(told, list):
        raise _unusable(where, "no list `conversations` or `messages`")
    turns: list[Turn] = []
    system: tuple[Message, ...] = ()
    for message, role, text in _messages(told):
        if not isinstance(role, str):
            raise _unusable(where, _MESSAGE)
        known = ROLES.get(role.strip().lower())
        if known and not isinstance(text, str):
            raise _unusable(where, _MESSAGE)
        if known == "user":
            turns.append(Turn(text, delay=_number(message, "delay", where, least=0.0), system=system))
            system = ()
        elif known == "assistant" and turns:
            turns[-1] = turns[-1]._replace(reply=text)
        elif known == "system" and not turns:
            system = (*system, ("system", text))
    return turns


_MESSAGE = "a message must be {role, content} or {from, value}, texts"


def _messages(told: Iterable[Any]) -> Iterator[tuple[Mapping[str, Any], Any, Any]]:
    """Yield each message with its role and text. Parts of a content become one text, if all are texts."""
    for message in told:
        if not isinstance(message, dict):
            yield {}, None, None
        elif {"human", "assistant"} <= set(message):
            yield from ((message, role, message[role]) for role in ("human", "assistant"))
        else:
            text = message.get("value", message.get("content"))
            if isinstance(text, list):
                parts = [part.get("text") if isinstance(part, dict) else None for part in text]
                text = "\n".join(map(str, parts)) if all(isinstance(part, str) for part in parts) else None
            yield message, message.get("from", message.get("role")), text


def _unusable(where: str, reason: str, param: str = "dataset_path") -> Unusable:
    return Unusable(f"{where}: {reason}", param, reason)


def read_rows(path: Path, skipped: Skipped | None = None) -> Iterator[Row]:
    """Read the objects of a JSON list, JSON lines, a CSV, each also gzipped, or a parquet file (needs pyarrow).

    skipped: counts what is no object; None: that is an error. Raises InvalidValue.
    """
    if not path.is_file():
        raise InvalidValue(f"dataset_path={str(path)!r} is not a file", "dataset_path")
    if path.suffix == ".parquet":
        return _parquet(path)
    return _objects(_text_rows(path), skipped)


def _objects(rows: Iterable[Row | Unusable], skipped: Skipped | None) -> Iterator[Row]:
    for row in rows:
        if not isinstance(row, Unusable):
            yield row
        elif skipped is None:
            raise row
        else:
            skipped.add(row)


def _text_rows(path: Path) -> Iterator[Row | Unusable]:
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if raw.startswith(b"\x1f\x8b") else raw).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidValue(f"{path} is not UTF-8 text: {error}", "dataset_path") from error
    except (OSError, EOFError, zlib.error) as error:
        raise InvalidValue(f"{path}: {error}", "dataset_path") from error
    if ".csv" in path.suffixes:
        return _csv(path, text)
    return _listed(path, text) if text.lstrip().startswith("[") else _lines(path, text)


def _csv(path: Path, text: str) -> Iterator[Row]:
    try:
        for index, row in enumerate(csv.DictReader(io.StringIO(text, newline=""))):
            yield Row(row, f"{path}[{index}]")
    except csv.Error as error:
        raise InvalidValue(f"{path}: not CSV: {error}", "dataset_path") from error


def _listed(path: Path, text: str) -> Iterator[Row | Unusable]:
    try:
        rows = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidValue(f"{path}: not JSON: {error}", "dataset_path") from error
    for index, row in enumerate(rows):
        where = f"{path}[{index}]"
        if isinstance(row, dict):
            yield Row(row, where)
        else:
            yield Unusable(f"{where}: {str(row)[:40]!r} must be an object", "dataset_path", "an object")


def _lines(path: Path, text: str) -> Iterator[Row | Unusable]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            yield Unusable(f"{where}: not JSON: {error}", "dataset_path", "not JSON")
            continue
        yield Row(row, where) if isinstance(row, dict) else _unusable(where, "the line must be an object")


def _parquet(path: Path) -> Iterator[Row]:
    try:
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise InvalidValue(f"{path}: parquet needs the pyarrow package: pip install pyarrow", "dataset_path") from error
    try:
        rows = parquet.read_table(path).to_pylist()
    except (ValueError, OSError) as error:  # pyarrow's own errors derive from these
        raise InvalidValue(f"{path} is not a parquet file: {error}", "dataset_path") from error
    return (Row(row, f"{path}[{index}]") for index, row in enumerate(rows))


def _repeat(items: Sequence[T], count: int, path: Path) -> list[T]:
    if not items:
        raise InvalidValue(f"{path} has no requests that can be sent", "dataset_path")
    return [items[index % len(items)] for index in range(count)]


def _number(row: Mapping[str, Any], name: str, where: str, least: float | None = None) -> float | None:
    value = row.get(name)
    if value is None:
        return None
    allowed = "positive" if least is None else f"at least {least:g}"
    good = isinstance(value, int | float) and not isinstance(value, bool)
    if not good or not (value > 0 if least is None else value >= least):
        raise _unusable(where, f"{name}={repr(value)[:40]} must be a number, {allowed}")
    return float(value)


def _text(row: Mapping[str, Any], name: str, where: str) -> str | None:
    value = row.get(name)
    if value is None or isinstance(value, str):
        return value
    raise InvalidValue(f"{where}: {name}={value!r} must be a text", "dataset_path")
