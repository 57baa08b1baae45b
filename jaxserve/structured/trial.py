"""Processes in which constraints are compiled before they are compiled in the server.

llguidance bounds neither the time nor the stack of every compilation (`multipleOf`, intersections of expressions,
chains of rules), and a thread of Rust cannot be ended; a process can. One process stays, and forks
another one when that dies.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from time import thread_time
from typing import IO

import msgspec
import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from jaxserve.errors import InvalidValue
from jaxserve.sched.api.errors import Unavailable
from jaxserve.sched.api.structured_outputs import StructuredOutputs
from jaxserve.structured.bounds import check_bounds
from jaxserve.structured.grammar import grammar_of
from jaxserve.structured.token_filter import words

STACK = 512 << 20  # bytes of a thread that compiles: about 16 KiB are needed for each object of a chain
MEMORY = 1 << 30  # bytes of a trial, besides its stack
NICE = 10  # what is compiled gets a tenth of a core that steps want too
SLOW = 0.02  # CPU seconds of a mask that is made again
TOLD = 200  # most characters of llguidance's explanations that are repeated
# Bounds of one step of the parser: about 15 ms, after which the request ends with an error.
LIMITS = LLParserLimits(verbose_errors=False)


class Ask(msgspec.Struct, array_like=True):
    """A constraint, and the CPU seconds that it may take."""

    wanted: StructuredOutputs
    seconds: float


class Reply(msgspec.Struct, array_like=True):
    """The grammar of a constraint that compiles, or why it does not: an error, or the signal that ended its process."""

    grammar: str = ""
    error: str = ""
    param: str | None = None
    signal: int = 0


class TooSlow(Exception):
    """A compilation took more CPU time than it may."""


class Trial:
    """A process whose fork compiles one constraint at a time; started with the first."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._end: Callable[[], object] = lambda: None  # ends the process; the end of this object does too
        self._closed = False

    def grammar(self, wanted: StructuredOutputs, seconds: float) -> str:
        """Return the grammar of a constraint that compiles within `seconds` of CPU time, and the stack and memory.

        Raises TooSlow, InvalidValue that says why it does not compile, or Unavailable.
        """
        try:
            process = self._process = self._process or self._start()
            if self._closed:  # perhaps before `close` could see the process
                raise EOFError
            assert process.stdin is not None and process.stdout is not None
            _write(process.stdin, msgspec.msgpack.encode(Ask(wanted, seconds)))
            reply = msgspec.msgpack.decode(_read(process.stdout), type=Reply)
        except (EOFError, OSError, ValueError) as error:  # it cannot start, is dead, or closed
            self._process = None
            self._end()
            why = "the server is shutting down" if self._closed else f"no process to compile in: {error!r}"
            raise Unavailable(why) from error
        if reply.signal == signal.SIGPROF:
            raise TooSlow
        if reply.signal:
            raise InvalidValue(f"{wanted.kind} takes too much memory to compile: simplify it", wanted.kind)
        if reply.error:
            raise InvalidValue(reply.error, reply.param)
        return reply.grammar

    def close(self) -> None:
        """End the process; what it compiles fails."""
        self._closed = True
        self._end()

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "jaxserve.structured.trial"]
        null = subprocess.DEVNULL
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=null, start_new_session=True
        )  # a session of its own: Ctrl-C is for the server
        self._end = weakref.finalize(self, _end, process)
        return process


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its forks, and close its pipes."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with suppress(OSError):  # it has not read all
            pipe.close()


def _write(pipe: IO[bytes], frame: bytes) -> None:
    pipe.write(len(frame).to_bytes(4, "big") + frame)
    pipe.flush()


def _read(pipe: IO[bytes]) -> bytes:
    head = pipe.read(4)
    frame = pipe.read(int.from_bytes(head, "big"))
    if not frame:
        raise EOFError
    return frame


def compiled(tokenizer: LLTokenizer, grammar: str, kind: str) -> LLMatcher:
    """Compile a grammar, and make its first mask, so that steps do not wait for what that takes.

    Raises InvalidValue, with the reason of llguidance, or if a mask takes more than SLOW seconds even then.
    """
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
    if not matcher.is_error():
        first_mask(matcher, tokenizer)
        copied, took = first_mask(matcher, tokenizer)
        if took > SLOW:
            raise InvalidValue(f"{kind} takes {took * 1e3:.0f} ms for each token: simplify it", kind)
        matcher = copied if copied.is_error() else matcher
    if matcher.is_error():
        why = " ".join(matcher.get_error().split())
        why = why if len(why) <= TOLD else why[: TOLD - 1] + "…"
        raise InvalidValue(f"{kind} cannot be enforced: {why}", kind)
    return matcher


def first_mask(matcher: LLMatcher, tokenizer: LLTokenizer) -> tuple[LLMatcher, float]:
    """Make the first mask with a copy of a matcher; what it finds is shared. Returns the copy, and its CPU seconds."""
    copied, mask = matcher.deep_copy(), np.empty(words(tokenizer.vocab_size), np.int32)
    began = thread_time()
    copied.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    return copied, thread_time() - began


def _replied(tokenizer: LLTokenizer, ask: Ask) -> Reply:
    try:
        check_bounds(ask.wanted)
        grammar = grammar_of(ask.wanted)
        compiled(tokenizer, grammar, ask.wanted.kind)
        return Reply(grammar)
    except InvalidValue as error:
        return Reply(error=str(error), param=error.param)


def _serve(tokenizer: LLTokenizer) -> None:
    with suppress(EOFError):
        while True:
            ask = msgspec.msgpack.decode(_read(sys.stdin.buffer), type=Ask)
            signal.setitimer(signal.ITIMER_PROF, ask.seconds)  # of CPU; SIGPROF ends the process
            reply = _replied(tokenizer, ask)
            signal.setitimer(signal.ITIMER_PROF, 0)
            _write(sys.stdout.buffer, msgspec.msgpack.encode(reply))


def _forked(tokenizer: LLTokenizer) -> int:
    """Compile what comes in a fork; return the signal that ended it, or 0 if the server is gone."""
    fork = os.fork()
    if fork == 0:
        threading.stack_size(STACK * 3 // 4)  # what fits here fits in the server's thread
        thread = threading.Thread(target=_serve, args=(tokenizer,))
        thread.start()
        thread.join()
        os._exit(0)
    return os.WTERMSIG(os.waitpid(fork, 0)[1])


def main() -> None:
    """Compile what comes, until the server is gone."""
    os.nice(NICE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (STACK + MEMORY, STACK + MEMORY))
    tokenizer = LLTokenizer("byte")  # how long a grammar compiles depends little on the tokenizer
    while ended := _forked(tokenizer):
        _write(sys.stdout.buffer, msgspec.msgpack.encode(Reply(signal=ended)))


if __name__ == "__main__":
    main()
