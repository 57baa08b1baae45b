"""No constraint ends the process, or keeps a thread from those of others."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from jaxserve.sched.api.errors import InvalidValue, JaxserveError, Unavailable
from jaxserve.sched.api.structured_outputs import MAX_CHOICES, StructuredOutputs
from jaxserve.structured import compiler as under_test
from jaxserve.structured import trial
from jaxserve.structured.bounds import MAX_ALTERNATIVES, MAX_NODES, MAX_RULES
from jaxserve.structured.compiler import Compiler
from tests.support.structured.bytes import END, bits, tokenizer_json


@pytest.fixture
def compiler() -> Iterator[Compiler]:
    made = Compiler(tokenizer_json, 256, [END])
    yield made
    made.close()


@pytest.fixture(scope="module")
def shared() -> Iterator[Compiler]:
    """A compiler, with its process, for tests that leave both as they are."""
    made = Compiler(tokenizer_json, 256, [END])
    yield made
    made.close()


def schemas(link: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[int], dict[str, Any]]:
    """Return schemas of n definitions, each of which needs the next one."""

    def chain(n: int) -> dict[str, Any]:
        defs = {f"d{at}": link({"$ref": f"#/$defs/d{at + 1}"}) for at in range(n - 1)}
        return {"json": {"$defs": {**defs, f"d{n - 1}": {"type": "integer"}}, "$ref": "#/$defs/d0"}}

    return chain


def properties(n: int) -> dict[str, Any]:
    """Return a schema without definitions: n/2 objects, each of which needs the next one."""
    n //= 2
    each = {
        f"p{at}": {"type": "object", "properties": {"a": {"$ref": f"#/properties/p{at + 1}"}}, "required": ["a"]}
        for at in range(n // 2)
    }
    return {"json": {"type": "object", "properties": {**each, f"p{n // 2}": {"type": "integer"}}, "required": ["p0"]}}


def rules(form: str, last: str) -> Callable[[int], dict[str, Any]]:
    """Return grammars of n rules, each of which needs the next one."""

    def chain(n: int) -> dict[str, Any]:
        return {"grammar": "\n".join([*(form.format(at, at + 1) for at in range(n - 1)), last.format(n - 1)])}

    return chain


CHAINS = {
    "items": schemas(lambda to: {"type": "array", "items": to}),
    "object": schemas(lambda to: {"type": "object", "properties": {"a": to}, "required": ["a"]}),
    "ref": schemas(lambda to: to),
    "anyOf": schemas(lambda to: {"anyOf": [to, {"type": "string"}]}),
    "allOf": schemas(lambda to: {"allOf": [to, {"minimum": 1}]}),
    "lark": lambda n: rules("r{0}: r{1}", 'r{0}: "1"\nstart: r0')(n - 1),
    "tokens": lambda n: rules('R{0}: R{1} | "b"', 'R{0}: "1"\nstart: R0')(n - 1),
    "gbnf": lambda n: rules("r{0} ::= r{1}", 'r{0} ::= "1"\nroot ::= r0')(n - 1),
}
DIVISOR = {"type": "integer", "multipleOf": 99999989}
BOMBS: dict[str, dict[str, Any]] = {
    "multipleOf": {"json": DIVISOR},
    "common multiple": {"json": {"allOf": [{**DIVISOR, "multipleOf": 9973}, {**DIVISOR, "multipleOf": 9967}]}},
    "patterns": {"json": {"allOf": [{"type": "string", "pattern": f"a.{{{at}}}b"} for at in range(1, 200)]}},
    "in a grammar": {"grammar": 'start: %json {"type": "integer", "multipleOf": 99999989}'},
    "in a tag": {"structural_tag": {"structures": [{"begin": "<a", "schema": DIVISOR, "end": ">"}], "triggers": ["<"]}},
}


@pytest.mark.parametrize("kind", CHAINS)
def test_long_chains_are_refused_with_the_limit(shared: Compiler, kind: str) -> None:
    with pytest.raises(InvalidValue, match=f"has 4000 .*: at most {MAX_RULES} are allowed"):
        shared.check(StructuredOutputs(**CHAINS[kind](4000)))


@pytest.mark.parametrize("kind", CHAINS)
def test_chains_at_the_bound_fit_the_stack(shared: Compiler, kind: str) -> None:
    matcher = shared.matcher(StructuredOutputs(**CHAINS[kind](MAX_RULES)))
    matcher.unsafe_compute_mask_ptr((mask := np.zeros(8, np.int32)).ctypes.data, mask.nbytes)  # on a usual stack
    assert mask.any() and not matcher.is_error()


def test_chains_without_definitions_are_refused_or_compiled(shared: Compiler) -> None:
    shared.check(StructuredOutputs(**properties(2_000)))
    with pytest.raises(InvalidValue):
        shared.check(StructuredOutputs(**properties(MAX_NODES)))
    with pytest.raises(InvalidValue, match=f"objects and lists: at most {MAX_NODES} are allowed"):
        shared.check(StructuredOutputs(**properties(2 * MAX_NODES)))


def test_alternatives_are_bounded(shared: Compiler) -> None:
    with pytest.raises(InvalidValue, match=f"has 79999 alternatives: at most {MAX_ALTERNATIVES} are allowed"):
        shared.check(StructuredOutputs(grammar="root ::= " + " | ".join(f'"w{at}"' for at in range(80_000))))


def doubled(n: int) -> dict[str, Any]:
    """Return a schema of objects that each have the next one twice."""
    each = {"type": "object", "additionalProperties": False, "required": ["a", "b"]}
    defs = {f"d{at}": {**each, "properties": {k: {"$ref": f"#/$defs/d{at + 1}"} for k in "ab"}} for at in range(n)}
    return {"$ref": "#/$defs/d0", "$defs": {**defs, f"d{n}": {"const": 1}}}


ROOT = "#/$defs/d0"
LONG: dict[str, dict[str, Any]] = {
    "choice": {"choice": ["b" * 262_144]},
    "regex": {"regex": "b" * 1_000_000},
    "repetition": {"regex": "(b{300}){300}"},
    "nested repetition": {"regex": "((b{9}){9}){9}" * 4},
    "grammar": {"grammar": f'start: "a" "{"b" * 1_000_000}"'},
    "forcing grammar": {"grammar": f'%llguidance {{"no_forcing": false}}\nstart: "a" "{"b" * 65_000}"'},
    "recursion": {"grammar": 'start: "b" start'},
    "doubling": {"grammar": "start: r0\n" + "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(18)) + '\nr18: "b"'},
    "gbnf": {"grammar": f'root ::= "a" "{"b" * 65_000}"'},
    "const": {"json": {"type": "object", "properties": {"a": {"const": "b" * 65_000}}, "required": ["a"]}},
    "pattern": {"json": {"type": "string", "pattern": "^b{60000}$"}},
    "items": {"json": {"type": "array", "minItems": 5_000, "items": {"const": 1}}},
    "references": {"json": doubled(14)},
    "endless": {"json": {**doubled(0), "$defs": {"d0": {"type": "array", "minItems": 1, "items": {"$ref": ROOT}}}}},
    "escaped": {"json": json.dumps(doubled(14)).replace("$ref", "\\u0024ref")},
    "whitespace": {"json": {"const": [1, 2]}, "whitespace_pattern": " {9000}"},
    "tag": {"structural_tag": {"structures": [{"begin": "<a", "schema": {"const": "b" * 65_000}, "end": ">"}],
                               "triggers": ["<"]}},
}  # fmt: skip


@pytest.mark.parametrize("kind", LONG)
def test_masks_do_not_read_long_texts_that_are_the_only_ones_allowed(shared: Compiler, kind: str) -> None:
    matcher, mask = shared.matcher(StructuredOutputs(**LONG[kind])), np.zeros(8, np.int32)
    for _ in range(3):
        assert not matcher.compute_ff_tokens()
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        assert matcher.consume_token(min(bits(mask)))


@pytest.mark.parametrize(
    ("given", "before"),
    [
        ({"regex": "[ab](the same)"}, "a"),
        ({"choice": ["alpha", "alphabet"]}, "al"),
        ({"json": {"type": "object", "properties": {"name": {"type": "integer"}}, "required": ["name"]}}, '{"'),
        ({"json_object": True}, ""),
        ({"json": {**doubled(3), "description": "short"}}, '{"'),
        ({"regex": "a(b{3}c){5}"}, "a"),
    ],
)
def test_short_texts_that_are_the_only_ones_allowed_are_found(
    shared: Compiler, given: dict[str, Any], before: str
) -> None:
    matcher = shared.matcher(StructuredOutputs(**given))
    assert matcher.consume_tokens(list(before.encode())) and matcher.compute_ff_tokens()


def test_a_constraint_is_ready_once_it_has_made_a_mask(monkeypatch: pytest.MonkeyPatch, compiler: Compiler) -> None:
    """What the first mask finds is shared by all matchers of a constraint, so that no step waits for that."""
    inner, threads = trial.first_mask, []

    def recorded(matcher: LLMatcher, tokenizer: LLTokenizer) -> tuple[LLMatcher, float]:
        threads.append(threading.current_thread().name)
        return inner(matcher, tokenizer)

    monkeypatch.setattr(trial, "first_mask", recorded)
    compiler.check(StructuredOutputs(regex="[a-z]{3}"))
    assert threads and all(name.startswith("jaxserve-grammar") for name in threads)


def test_slow_masks_and_first_masks_that_fail_are_refused(monkeypatch: pytest.MonkeyPatch, compiler: Compiler) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(trial, "LIMITS", LLParserLimits(max_lexer_states=3))
        with pytest.raises(InvalidValue, match="regex cannot be enforced: lexer error: too many states"):
            compiler.check(StructuredOutputs(regex="(ab|[c-x]{3}y)*z"))
    monkeypatch.setattr(trial, "SLOW", 0.0)
    with pytest.raises(InvalidValue, match=r"regex takes \d+ ms for each token: simplify it"):
        compiler.check(StructuredOutputs(regex="[a-z]{3}"))


def test_as_many_choices_as_are_allowed_can_be_sampled(shared: Compiler) -> None:
    matcher = shared.matcher(StructuredOutputs(choice=tuple(f"{at} of them" for at in range(MAX_CHOICES))))
    assert matcher.consume_tokens(list(b"9999 of them")) and matcher.is_accepting()


@pytest.mark.parametrize("kind", BOMBS)
def test_a_compilation_ends_with_its_cpu_time(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(under_test, "SECONDS", 0.3)
    compiler = Compiler(tokenizer_json, 256, [END])
    try:
        with pytest.raises(InvalidValue, match=r"takes more than 0\.3 s to compile"):
            compiler.compile(StructuredOutputs(**BOMBS[kind])).result(60)
        compiler.compile(StructuredOutputs(regex="[a-z]{3}")).result(60)
    finally:
        compiler.close()


def test_others_do_not_wait_for_what_takes_long(compiler: Compiler) -> None:
    bombs = [StructuredOutputs(json={**DIVISOR, "multipleOf": 99999989 - at}) for at in (0, 18, 30, 42)]
    slow = [compiler.compile(one) for one in bombs]
    compiler.compile(StructuredOutputs(regex="[a-z]{3}")).result(60)
    assert not slow[-1].done(), "each of them may take seconds"


def test_too_many_constraints_are_refused_for_a_while(monkeypatch: pytest.MonkeyPatch, compiler: Compiler) -> None:
    monkeypatch.setattr(under_test, "PENDING", 1)
    slow = compiler.compile(StructuredOutputs(json=DIVISOR))  # type: ignore[arg-type]
    with pytest.raises(Unavailable, match="wait to be compiled: try again later"):
        compiler.check(StructuredOutputs(regex="x"))
    monkeypatch.setattr(under_test, "PATIENCE", 0.01)
    with pytest.raises(Unavailable, match="is not compiled after"):
        compiler.check(StructuredOutputs(json=DIVISOR))  # type: ignore[arg-type]
    compiler.close()
    with pytest.raises(JaxserveError, match="shutting down"):
        slow.result(60)


def test_the_death_of_a_trial_refuses_its_constraint_alone(compiler: Compiler) -> None:
    compiler.check(StructuredOutputs(regex="first"))
    process = compiler._quick.trial._process
    assert process is not None
    os.killpg(process.pid, signal.SIGKILL)
    with pytest.raises(Unavailable, match="no process to compile in"):
        compiler.check(StructuredOutputs(regex="second"))
    compiler.check(StructuredOutputs(regex="second"))


def test_other_threads_keep_their_stack(compiler: Compiler) -> None:
    compiler.check(StructuredOutputs(regex="x"))
    assert threading.stack_size() == 0 and trial.STACK > 1 << 28


@pytest.mark.parametrize("lane", ["quick", "slow"])
def test_without_memory_for_a_thread_a_constraint_is_refused_for_a_while(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch, lane: str
) -> None:
    """It must neither fail the thread that asks, nor keep all later requests with the same constraint waiting."""
    wanted = StructuredOutputs(regex="[a-z]{3}")
    with monkeypatch.context() as patch:
        if lane == "slow":
            compiler.check(StructuredOutputs(regex="x"))  # starts the thread of the other lane
            patch.setattr(compiler._quick.trial, "grammar", lambda wanted, seconds: _raise(trial.TooSlow()))
        patch.setattr(threading.Thread, "start", lambda self: _raise(RuntimeError("can't start new thread")))
        for _ in range(2):
            with pytest.raises(Unavailable, match="no thread to compile in"):
                compiler.compile(wanted).result(under_test.PATIENCE)
    compiler.check(wanted)


def _raise(error: Exception) -> None:
    raise error
