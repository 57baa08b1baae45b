"""Compiles structured outputs for the tokenizer of a model, once each."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as TookTooLong

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from jaxserve.errors import InvalidValue
from jaxserve.sched.api.structured_outputs import StructuredOutputs
from jaxserve.structured.grammar import grammar_of

KEPT = 256  # compiled constraints
PATIENCE = 10.0  # seconds that a request waits for its constraint; llguidance's own limits end a compilation earlier
TOLD = 400  # most characters of llguidance's explanations that are repeated
# Bounds of one step of the parser: about 15 ms, after which the request ends with an error.
LIMITS = LLParserLimits(verbose_errors=False)


class Compiler:
    """Compiles constraints in threads, and keeps the last KEPT of them. May be used from any thread."""

    def __init__(self, tokenizer: Callable[[], str], vocab: int, eos: Iterable[int]) -> None:
        """tokenizer: reads the tokenizer, as the text of its tokenizer.json; called with the first constraint.

        vocab: number of logits; eos: ids that end an output.
        """
        self._read = tokenizer
        self._vocab = vocab
        self._eos = sorted(eos)
        self._tokenizer: LLTokenizer | None = None
        self._lock = threading.Lock()
        self._reading = threading.Lock()
        self._made: OrderedDict[StructuredOutputs, Future[LLMatcher]] = OrderedDict()
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="jaxserve-grammar")

    def compile(self, wanted: StructuredOutputs) -> Future[LLMatcher]:
        """Begin to compile, or return what was begun before. The result is shared: call `matcher` to use it.

        The future raises InvalidValue, naming the field, if the constraint is not valid.
        """
        with self._lock:
            made = self._made.get(wanted)
            if made is None:
                made = self._made[wanted] = self._threads.submit(self._compile, wanted)
                if len(self._made) > KEPT:
                    self._made.popitem(last=False)
            else:
                self._made.move_to_end(wanted)
            return made

    def check(self, wanted: StructuredOutputs) -> None:
        """Wait until a constraint is compiled. Raises InvalidValue as `compile` does, and if it takes too long."""
        self._waited(wanted)

    def matcher(self, wanted: StructuredOutputs) -> LLMatcher:
        """Return a matcher at the beginning of an output, of which the caller is the only writer.

        Waits and raises like `check`.
        """
        return self._waited(wanted).deep_copy()

    def _waited(self, wanted: StructuredOutputs) -> LLMatcher:
        try:
            return self.compile(wanted).result(PATIENCE)
        except TookTooLong as error:
            raise InvalidValue(
                f"{wanted.kind} took more than {PATIENCE:g} s to compile: simplify it", wanted.kind
            ) from error

    def close(self) -> None:
        """End the threads, after what they compile."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _compile(self, wanted: StructuredOutputs) -> LLMatcher:
        matcher = LLMatcher(self._loaded(), grammar_of(wanted), log_level=0, limits=LIMITS)
        if matcher.is_error():
            why = " ".join(matcher.get_error().split())
            why = why if len(why) <= TOLD else why[: TOLD - 1] + "…"
            raise InvalidValue(f"{wanted.kind} cannot be enforced: {why}", wanted.kind)
        return matcher

    def _loaded(self) -> LLTokenizer:
        with self._reading:
            if self._tokenizer is None:
                text = self._read()
                try:
                    self._tokenizer = LLTokenizer(text, n_vocab=self._vocab, eos_token=self._eos)
                except Exception as error:  # of the kind that llguidance found
                    raise InvalidValue(
                        f"structured outputs need a tokenizer of the tokenizers library: {str(error)[:200]}",
                        "structured_outputs",
                    ) from error
            return self._tokenizer
