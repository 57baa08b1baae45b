"""Prompts from files: custom JSON lines, ShareGPT, a Hugging Face dataset's file, conversations."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from jaxserve.bench.load import Call, Message, Objective
from jaxserve.errors import InvalidValue

T = TypeVar("T")
Count = Callable[[str], int]  # tokens of a text

CUSTOM = ("prompt", "output_tokens", "ttft_slo_ms", "tpot_slo_ms", "tbt_slo_ms", "service_tier", "class")
ROLES = {"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant"}
ROLES |= {"system": "system", "developer": "system"}
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

    def custom(self, count: int, default_output: int) -> list[Call]:
        """Read objects with a `prompt`, and optional `output_tokens`, objectives, `service_tier` and `class`.

        They keep their order and repeat if there are fewer than `count`. Raises InvalidValue naming the line.
        """
        made: list[Call] = []
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
            made.append(Call(0.0, row["prompt"], 0, output, slo))
        return _repeat(made, count, self.path)

    def sharegpt(self, count: int, seed: int) -> list[Call]:
        """Draw first questions of ShareGPT's conversations, with the length of the first answer to generate."""
        made: list[Call] = []
        for row, where in _shuffled(read_rows(self.path), seed):
            turns = conversation(row, where)
            if not turns:
                continue
            prompt, output = self.tokens(turns[0].prompt), self._output(turns[0])
            if prompt < SHORTEST or (self.output_len is None and output < SHORTEST):
                continue
            if self.max_len is not None and (2 * prompt > self.max_len or prompt + output > self.max_len):
                continue
            made.append(Call(0.0, turns[0].prompt, 0, output, history=turns[0].system))
            if len(made) == count:
                break
        return _repeat(made, count, self.path)

    def hugging_face(self, count: int, seed: int, default_output: int) -> list[Call]:
        """Draw rows of a dataset's file: the prompt is a column of texts or conversations.

        The output column has texts, which give the length to generate, or numbers of tokens.
        """
        made: list[Call] = []
        for row, where in _shuffled(read_rows(self.path), seed):
            turns = self._turns_of(row, where)
            output = self.output_len or self._length(row, where) or (self._output(turns[0]) or default_output)
            prompt = self.tokens(turns[0].prompt)
            if self.max_len is None or prompt + output <= self.max_len:
                made.append(Call(0.0, turns[0].prompt, 0, output, history=turns[0].system))
            if len(made) == count:
                break
        return _repeat(made, count, self.path)

    def conversations(self, count: int, seed: int) -> list[Call]:
        """Draw conversations: each question is sent when the one before has its answer, which becomes its history.

        Before each further question passes its own `delay`, or a time drawn from an exponential distribution of
        mean `think_time`, in seconds.
        """
        chosen: list[list[Turn]] = []
        for row, where in _shuffled(read_rows(self.path), seed):
            if turns := self._fitting(conversation(row, where)[: self.max_turns]):
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

    def _output(self, turn: Turn) -> int:
        return self.output_len or (self.tokens(turn.reply) if turn.reply else 0)

    def _fitting(self, turns: Sequence[Turn]) -> list[Turn]:
        """Return the leading turns that stay within `max_len` tokens."""
        total, made = 0, []
        for turn in turns:
            total += self.tokens(turn.prompt) + (self._output(turn) or 1)
            if self.max_len is not None and total > self.max_len:
                break
            made.append(turn)
        return made

    def _turns_of(self, row: Mapping[str, Any], where: str) -> list[Turn]:
        if self.prompt_column not in row:
            raise InvalidValue(
                f"{where}: no column {self.prompt_column!r}; there is {', '.join(map(repr, row))}", "prompt_column"
            )
        value = row[self.prompt_column]
        if isinstance(value, str):
            return [Turn(value)]
        turns = conversation({"messages": value}, where) if isinstance(value, list) else []
        if not turns:
            raise InvalidValue(
                f"{where}: column {self.prompt_column!r} must be a text or a list of messages", "prompt_column"
            )
        return turns

    def _length(self, row: Mapping[str, Any], where: str) -> int:
        """Return the tokens of the output column, 0 without one."""
        if self.output_column is None:
            return 0
        value = row.get(self.output_column)
        if isinstance(value, str):
            return self.tokens(value)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
        raise InvalidValue(
            f"{where}: column {self.output_column!r} is {value!r}; it must be a text or a positive number of tokens",
            "output_column",
        )


class Turn(NamedTuple):
    """A question of a conversation, the answer in the file, and the pause before the question in seconds."""

    prompt: str
    reply: str = ""
    delay: float | None = None
    system: tuple[Message, ...] = ()  # before the first question


def conversation(row: Mapping[str, Any], where: str) -> list[Turn]:
    """Return the turns of ShareGPT's `conversations` ({from, value}) or of `messages` ({role, content}).

    An answer before the first question is left out. Raises InvalidValue.
    """
    told = row.get("conversations", row.get("messages", row.get("conversation")))
    if not isinstance(told, list):
        raise InvalidValue(f"{where}: no list `conversations` or `messages`", "dataset_path")
    turns: list[Turn] = []
    system: tuple[Message, ...] = ()
    for message in told:
        role = message.get("from", message.get("role")) if isinstance(message, dict) else None
        text = message.get("value", message.get("content")) if isinstance(message, dict) else None
        if not isinstance(text, str) or not isinstance(role, str):
            raise InvalidValue(
                f"{where}: a message must be {{role, content}} or {{from, value}}, texts", "dataset_path"
            )
        known = ROLES.get(role)
        if known == "user":
            turns.append(Turn(text, delay=_number(message, "delay", where, least=0.0), system=system))
            system = ()
        elif known == "assistant" and turns:
            turns[-1] = turns[-1]._replace(reply=text)
        elif known == "system" and not turns:
            system = (*system, ("system", text))
    return turns


def read_rows(path: Path) -> Iterator[Row]:
    """Read the objects of a JSON list, of JSON lines, or of a parquet file (needs pyarrow). Raises InvalidValue."""
    if not path.is_file():
        raise InvalidValue(f"dataset_path={str(path)!r} is not a file", "dataset_path")
    if path.suffix == ".parquet":
        return _parquet(path)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InvalidValue(f"{path} is not UTF-8 text: {error}", "dataset_path") from error
    return _listed(path, text) if text.lstrip().startswith("[") else _lines(path, text)


def _listed(path: Path, text: str) -> Iterator[Row]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise InvalidValue(f"{path}: not JSON: {error}", "dataset_path") from error
    for index, row in enumerate(found):
        if not isinstance(row, dict):
            raise InvalidValue(f"{path}[{index}]: {str(row)[:40]!r} must be an object", "dataset_path")
        yield Row(row, f"{path}[{index}]")


def _lines(path: Path, text: str) -> Iterator[Row]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise InvalidValue(f"{path}:{number}: not JSON: {error}", "dataset_path") from error
        if not isinstance(row, dict):
            raise InvalidValue(f"{path}:{number}: the line must be an object", "dataset_path")
        yield Row(row, f"{path}:{number}")


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


def _shuffled(rows: Iterable[Row], seed: int) -> list[Row]:
    found = list(rows)
    return [found[index] for index in np.random.default_rng([seed, 3]).permutation(len(found))]


def _repeat(made: Sequence[T], count: int, path: Path) -> list[T]:
    if not made:
        raise InvalidValue(f"{path} has no requests that can be sent", "dataset_path")
    return [made[index % len(made)] for index in range(count)]


def _number(row: Mapping[str, Any], name: str, where: str, least: float | None = None) -> float | None:
    value = row.get(name)
    if value is None:
        return None
    allowed = "positive" if least is None else f"at least {least:g}"
    good = isinstance(value, int | float) and not isinstance(value, bool)
    if not good or not (value > 0 if least is None else value >= least):
        raise InvalidValue(f"{where}: {name}={value!r} must be a number, {allowed}", "dataset_path")
    return float(value)


def _text(row: Mapping[str, Any], name: str, where: str) -> str | None:
    value = row.get(name)
    if value is None or isinstance(value, str):
        return value
    raise InvalidValue(f"{where}: {name}={value!r} must be a text", "dataset_path")
