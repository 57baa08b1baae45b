"""Compiles structured outputs for the tokenizer of a model, once each."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from concurrent.futures import TimeoutError as TookTooLong
from contextlib import suppress

from llguidance import LLMatcher, LLTokenizer

from jaxserve.errors import InvalidValue
from jaxserve.sched.api.errors import Unavailable
from jaxserve.sched.api.structured_outputs import StructuredOutputs
from jaxserve.structured.trial import STACK, TooSlow, Trial, compiled

KEPT = 256  # compiled constraints
PENDING = 64  # constraints that may wait to be compiled
PATIENCE = 10.0  # seconds that a request waits for its constraint
QUICK = 0.2  # CPU seconds of the first try, so that no constraint waits long for others
SECONDS = 2.0  # CPU seconds of the last one


class Lane:
    """A thread that compiles constraints one after the other, each after its trial."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.trial = Trial()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="jaxserve-grammar")

    def submit(self, work: Callable[..., None], *given: object) -> None:
        before = threading.stack_size(STACK)  # submit starts the thread
        try:
            self._thread.submit(work, *given)
        finally:
            threading.stack_size(before)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        self.trial.close()


class Compiler:
    """Compiles constraints in threads, and keeps the last KEPT of them. May be used from any thread.

    One that takes more than QUICK seconds begins again in a second lane, where only such ones wait.
    """

    def __init__(self, tokenizer: Callable[[], str], vocab: int, eos: Iterable[int]) -> None:
        """tokenizer: reads the tokenizer, as the text of its tokenizer.json; called with the first constraint.

        vocab: number of logits; eos: ids that end an output.
        """
        self._read = tokenizer
        self._vocab = vocab
        self._eos = sorted(eos)
        self._tokenizer: LLTokenizer | None = None
        self._lock = threading.RLock()
        self._reading = threading.Lock()
        self._made: OrderedDict[StructuredOutputs, Future[LLMatcher]] = OrderedDict()
        self._pending = set[Future[LLMatcher]]()
        self._quick, self._slow = Lane(QUICK), Lane(SECONDS)

    def compile(self, wanted: StructuredOutputs) -> Future[LLMatcher]:
        """Begin to compile, or return what was begun before. The result is shared: call `matcher` to use it.

        The future raises InvalidValue, naming the field, if the constraint is not valid, and Unavailable if too
        many wait.
        """
        with self._lock:
            result = self._made.get(wanted)
            if result is not None:
                self._made.move_to_end(wanted)
                return result
            result = Future[LLMatcher]()
            result.set_running_or_notify_cancel()  # shared: its callers cannot cancel it
            if len(self._pending) >= PENDING:
                result.set_exception(Unavailable(f"{PENDING} structured outputs wait to be compiled: try again later"))
                return result
            self._made[wanted] = result
            if len(self._made) > KEPT:
                self._made.popitem(last=False)
            self._pending.add(result)
            result.add_done_callback(self._pending.discard)
            self._begin(wanted, result, self._quick)
            return result

    def check(self, wanted: StructuredOutputs) -> LLMatcher:
        """Wait until a constraint is compiled. Raises as `compile` does, and Unavailable if it takes too long."""
        try:
            return self.compile(wanted).result(PATIENCE)
        except TookTooLong as error:
            raise late(wanted.kind) from error

    def matcher(self, wanted: StructuredOutputs) -> LLMatcher:
        """Return a matcher at the beginning of an output, of which the caller is the only writer.

        Waits and raises like `check`.
        """
        return self.check(wanted).deep_copy()

    def close(self) -> None:
        """End the threads and their trials. What waits fails."""
        for lane in (self._quick, self._slow):
            lane.close()
        with self._lock:
            for compiled in tuple(self._pending):
                _settle(compiled, Unavailable("the server is shutting down"))

    def _begin(self, wanted: StructuredOutputs, result: Future[LLMatcher], lane: Lane) -> None:
        try:
            lane.submit(self._compile, wanted, result, lane)
        except RuntimeError as error:  # without memory no thread starts
            with self._lock:
                self._made.pop(wanted, None)
            _settle(result, Unavailable(f"no thread to compile in ({error}): try again later"))

    def _compile(self, wanted: StructuredOutputs, result: Future[LLMatcher], lane: Lane) -> None:
        try:
            grammar = lane.trial.grammar(wanted, lane.seconds)
            _settle(result, compiled(self._loaded(), grammar, wanted.kind))
        except TooSlow:
            if lane is self._quick:
                self._begin(wanted, result, self._slow)
            else:
                told = f"{wanted.kind} takes more than {SECONDS:g} s to compile: simplify it"
                _settle(result, InvalidValue(told, wanted.kind))
        except BaseException as error:
            if not isinstance(error, InvalidValue):
                with self._lock:
                    self._made.pop(wanted, None)  # it may compile the next time
            _settle(result, error)

    def _loaded(self) -> LLTokenizer:
        with self._reading:
            if self._tokenizer is None:
                text = self._read()
                try:
                    try:
                        self._tokenizer = LLTokenizer(text, n_vocab=self._vocab, eos_token=self._eos)
                    except Exception:  # perhaps it has more tokens than the model
                        self._tokenizer = LLTokenizer(cut(text, self._vocab), n_vocab=self._vocab, eos_token=self._eos)
                except Exception as error:  # of the kind that llguidance found
                    raise InvalidValue(
                        f"structured outputs need a tokenizer of the tokenizers library: {str(error)[:200]}",
                        "structured_outputs",
                    ) from error
            return self._tokenizer


def cut(text: str, vocab: int) -> str:
    """Return a tokenizer.json without the tokens that a model with `vocab` logits cannot sample."""
    tokenizer = json.loads(text)
    tokenizer["added_tokens"] = [token for token in tokenizer.get("added_tokens", ()) if token["id"] < vocab]
    model = tokenizer["model"]
    if isinstance(model["vocab"], list):
        model["vocab"] = model["vocab"][:vocab]
    else:
        kept = model["vocab"] = {piece: id for piece, id in model["vocab"].items() if id < vocab}
        pairs = [pair.split(" ", 1) if isinstance(pair, str) else pair for pair in model.get("merges", ())]
        model["merges"] = [[a, b] for a, b in pairs if a in kept and b in kept and a + b in kept]
    return json.dumps(tokenizer)


def late(what: str) -> Unavailable:
    """Return the error of a request that has waited PATIENCE seconds for its constraint."""
    return Unavailable(f"{what} is not compiled after {PATIENCE:g} s: other structured outputs are first")


def _settle(future: Future[LLMatcher], result: LLMatcher | BaseException) -> None:
    with suppress(InvalidStateError):  # `close` was first
        if isinstance(result, BaseException):
            future.set_exception(result)
        else:
            future.set_result(result)
