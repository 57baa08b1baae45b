"""Bounds on what a chat template may do: a program that a request's content can make slow, or that has no end.

Jinja has no hook in a loop, so a step is counted by a call at the beginning of each body of a loop or macro.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")

EVERY = 16  # steps between two looks at the clock: each may call filters that take milliseconds


class Budget(NamedTuple):
    """What one rendering may take: far more than any conversation that fits into a context."""

    steps: int = 1_000_000  # iterations and calls of macros
    characters: int = 1 << 26  # that are written, in macros too
    seconds: float = 10.0  # of the thread's CPU time


class OverBudget(Exception):
    """A rendering was ended."""


class _Meter:
    """What is left to one rendering. Writer: its thread."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._steps, self._characters = budget.steps, budget.characters
        self._end = time.thread_time() + budget.seconds

    def step(self) -> None:
        self._steps -= 1
        if self._steps < 0:
            raise OverBudget(f"it takes more than {self._budget.steps} steps, and may loop without end")
        if self._steps % EVERY == 0 and time.thread_time() > self._end:
            raise OverBudget(f"it takes more than {self._budget.seconds:g} s of CPU time")

    def write(self, size: int) -> None:
        self._characters -= size
        if self._characters < 0:
            raise OverBudget(f"it writes more than {self._budget.characters} characters")


_METER: ContextVar[_Meter | None] = ContextVar("meter", default=None)


def within(budget: Budget, work: Callable[[], T]) -> T:
    """Return what `work` does. Raises OverBudget if the templates that it renders take more than `budget`."""
    before = _METER.set(_Meter(budget))
    try:
        return work()
    finally:
        _METER.reset(before)


def _step() -> None:
    if meter := _METER.get():
        meter.step()


def _written(value: Any) -> Any:
    if isinstance(value, str) and (meter := _METER.get()):
        meter.write(len(value))
    return value


def metered(source: str) -> None:
    """Let the template that transformers keeps for `source` count what it does."""
    from jinja2 import nodes  # imported late, for --help
    from transformers.utils import chat_template_utils

    template = chat_template_utils._compile_jinja_template(source)
    if getattr(template, "metered", False):
        return
    environment = template.environment
    tree = environment.parse(source)
    for node in tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
        call = nodes.Call(nodes.EnvironmentAttribute("step"), [], [], None, None)
        node.body.insert(0, nodes.ExprStmt(call, lineno=node.lineno))
    tree.set_environment(environment)
    environment.step, environment.finalize = _step, _written
    counted = environment.from_string(tree)
    template.root_render_func, template.blocks = counted.root_render_func, counted.blocks
    template.metered = True
