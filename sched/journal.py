"""A log of every input of every scheduling decision, as JSON lines. Replay must give equal plans.

A journal holds lengths, SLOs, sampling parameters, results and digests of pages, but no prompts:
the digests are all that prefix sharing needs. Record kinds: `instance` (how to create one), `add`
(with the predicted TTFT, on which no plan depends), `cancel`, `plan` (with the clock that the
policy saw), `planned` (the resulting plan), `digest`, `settle`, `interrupts`, `suspend`, `recover`,
`reserve`, `unreserve`, `release`, `accept`, `reserve_write_back`, `finish_write_back`,
`decode_in_place`, `leave`, `set_role`, `hang`, `adopt`, `reset_prefix_cache`, `end_session`, `unhold`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import IO, Any, NamedTuple, Protocol

from . import policies
from .api.errors import InvalidValue, short
from .api.log import Log, no_log
from .api.new_request import NewRequest
from .api.params import SamplingParams
from .api.perf import Load, PerfModel
from .api.plan import StepPlan, StepResult, Suspended
from .api.policy import Limits, Role
from .api.request import Request
from .api.slo import SLO
from .api.thinking import ThinkingEnd
from .instance.scheduler import Scheduler

VERSION = 8  # of the records; a journal of another version is refused
LONGEST = 1e12  # seconds on any clock; more, or NaN, is no time
FOUND_AGAIN = ("demoted",)  # kinds that a replay logs anew, which a journal leaves out
REHEARSAL = "rehearsal"  # key of the requests that an engine runs before it is ready


class Journal:
    """A writer of records to a text file, one per line. Writer: the event loop of the Cluster.

    If the file cannot be written, for example because the disk is full, the journal stops and
    `stopped` is called once. Serving goes on without it.
    """

    def __init__(self, file: IO[str], stopped: Callable[[OSError], None] = lambda error: None) -> None:
        self.errors = 0  # 1 after it has stopped
        self._file = file
        self._stopped = stopped

    def instance(
        self,
        name: str,
        *,
        policy: str,
        limits: Limits,
        role: Role,
        prefix_caching: bool,
        perf: Mapping[str, Any],
        options: Mapping[str, Any] | None = None,
    ) -> Log:
        """Return the log of one instance, after writing a record of how to create the instance.

        `perf` is what `replay` passes to its factory of step-time models. `options` are simulation
        options (sim.Options) for a setup like this server, if they are not the defaults.
        """
        setup = {
            "version": VERSION,
            "policy": policy,
            "limits": asdict(limits),
            "role": role.value,
            "prefix_caching": prefix_caching,
        }
        self._write(name, "instance", {**setup, "perf": perf, "options": options or {}})

        def log(kind: str, **fields: Any) -> None:
            if kind not in FOUND_AGAIN:
                self._write(name, kind, {key: _plain(value) for key, value in fields.items()})

        return log

    def _write(self, instance: str, kind: str, fields: Mapping[str, Any]) -> None:
        if self.errors:
            return
        try:
            self._file.write(json.dumps({"at": instance, "kind": kind, **fields}, separators=(",", ":")) + "\n")
        except OSError as error:
            self._stop(error)

    def _stop(self, error: OSError) -> None:
        self.errors += 1
        self._stopped(error)
        with suppress(OSError):  # closing flushes the buffer and may fail again
            self._file.close()

    def close(self) -> None:
        if self._file.closed:
            return
        try:
            self._file.close()
        except OSError as error:
            self._stop(error)


def _plain(value: Any) -> Any:
    if isinstance(value, Request):
        return _request(value)
    if isinstance(value, StepPlan):
        return _plan(value)
    if isinstance(value, StepResult):
        ends = list(value.failed.items()), list(value.ended.items())
        held = [sorted(value.held)] if value.held else []
        return [value.step, value.started, value.finished, value.tokens, *ends, *held]
    return value.hex() if isinstance(value, bytes) else value


def result_of(record: Mapping[str, Any]) -> StepResult:
    """Return the result that a `settle` record holds."""
    step, started, finished, tokens, failed, ended, *held = record["result"]
    tokens = tuple(map(tuple, tokens))
    return StepResult(step, started, finished, tokens, dict(failed), ended=dict(ended), held=frozenset(*held))


def _request(request: Request) -> dict[str, Any]:
    return {
        "id": request.id,
        "prompt_length": request.prompt_length,
        "asked": _fields(request.asked),
        "arrival": request.arrival,
        "seed": request.seed,
        "tier": request.tier,  # it may have been demoted
        "class_": request.class_,
        "eos": sorted(request.eos),
        "thinking": request.thinking and [request.thinking.markers, request.thinking.seen],
        "limit": request.limit,
        # what another engine has done for it; `thinking` is from after that
        "resumed": [request.output, request.token_times, request.budget, request.scored] if request.output else None,
    }


def _fields(asked: NewRequest) -> dict[str, Any]:
    """Return what was asked, without tokens of the prompt."""
    described = asked.described()
    return described | {"params": asdict(asked.params), "slo": asdict(asked.slo)}


def _plan(plan: StepPlan) -> list[Any]:
    """Return a plan as plain values, without the tokens."""
    return [
        plan.step,
        [
            [
                s.request,
                s.slot,
                s.start,
                s.length,
                list(s.new_pages),
                len(s.tokens),
                s.draft,
                s.samples,
                s.begin is None,
            ]
            for s in plan.spans
        ],
        plan.preemptible,
        plan.resume,
        *[[list(group.spans), group.pages] for group in plan.shared],
    ]


class Difference(NamedTuple):
    """A plan that differs in the replay."""

    line: int
    instance: str
    recorded: Any
    replayed: Any


class Step(NamedTuple):
    """A step that was executed."""

    instance: str
    load: Load
    seconds: float  # measured
    ended: float
    predicted: float  # in seconds, when it was planned


@dataclass
class Replay:
    """The result of a replay."""

    plans: int = 0
    differences: list[Difference] = field(default_factory=list)
    instances: dict[str, dict[str, Any]] = field(default_factory=dict)  # as recorded; `policy` as replayed
    requests: dict[int, Request] = field(default_factory=dict)  # in their final state, with the times of their tokens
    thoughts: dict[int, int] = field(default_factory=dict)  # thinking tokens of the requests that began with thinking
    steps: list[Step] = field(default_factory=list)
    moves: list[float] = field(default_factory=list)  # seconds from the first token to the next plan of the target

    @property
    def timed(self) -> list[tuple[Load, float]]:
        """The load and the measured seconds of each step, as perf.fit takes them."""
        return [(step.load, step.seconds) for step in self.steps]


class Watcher(Protocol):
    """What is told of a replay as it goes; a `Recorder` (recorded/) makes timelines of it."""

    requests: dict[int, Request]

    def instance(self, name: str, limits: Limits, now: Callable[[], float], then: Log) -> Log: ...
    def attach(self, name: str, scheduler: Scheduler) -> None: ...


# Records that are replayed by one call of a scheduler method.
_CALLS: dict[str, Callable[[Scheduler, dict[str, Any]], object]] = {
    "cancel": lambda scheduler, record: scheduler.cancel(record["id"], record["reason"], record["error"]),
    "release": lambda scheduler, record: scheduler.release(record["id"]),
    "hang": lambda scheduler, record: scheduler.hang(record["hung"]),
    "finish_write_back": lambda scheduler, record: scheduler.finish_write_back(record["id"], record["arrived"]),
    "leave": lambda scheduler, record: scheduler.leave(record["id"]),
    "reserve_write_back": lambda scheduler, record: scheduler.reserve_write_back(
        record["id"], [bytes.fromhex(digest) for digest in record["digests"]]
    ),
    "unhold": lambda scheduler, record: scheduler.unhold(record["id"], record["slot"]),
    "recover": lambda scheduler, _: scheduler.recover(),
    "end_session": lambda scheduler, record: scheduler.end_session(record["session"]),
    "reset_prefix_cache": lambda scheduler, _: scheduler.reset_prefix_cache(),
    "decode_in_place": lambda scheduler, record: scheduler.decode_in_place(record["id"], record["first_token_at"]),
    "suspend": lambda scheduler, record: scheduler.suspend(Suspended(*record["result"])),
    "set_role": lambda scheduler, record: scheduler.set_role(Role(record["role"]), record["first_token_at"]),
    "unreserve": lambda scheduler, record: scheduler.unreserve_id(record["id"]),
}


class _Replayer:
    """The state of a replay: new schedulers, fed record by record. Writer of the Replay it returns."""

    def __init__(
        self,
        perf: Callable[[Mapping[str, Any]], PerfModel],
        digests: Mapping[int, list[bytes]],
        watcher: Watcher | None,
        policy: str | None,
    ) -> None:
        self._perf = perf
        self._policy = policy
        self._digests = digests
        self._watcher = watcher
        self._now = 0.0  # time of the record
        self._schedulers: dict[str, Scheduler] = {}
        self._last: dict[str, StepPlan | None] = {}
        self._moved: dict[str, list[Request]] = {}  # accepted since the instance last planned
        self._thinking: dict[int, tuple[list[Any], int]] = {}  # as recorded, and after how many tokens
        self.outcome = Replay()
        if watcher is not None:
            watcher.requests = self.outcome.requests

    def feed(self, line: int, record: dict[str, Any], now: float) -> None:
        self._now = now
        at, kind = record["at"], record["kind"]
        if kind == "instance":
            self._begin(record | {"policy": self._trusted(line, record["policy"])})
            return
        scheduler = self._schedulers[at]
        if kind in _CALLS:
            _CALLS[kind](scheduler, record)
        elif kind == "add":
            predicted = record.get("predicted")  # older journals have none
            request = self._moved_here(record["request"]["id"]) or self._made(record["request"])
            scheduler.add(request, None if predicted is None else float(predicted))
        elif kind == "plan":
            if self._last.get(at) is not None:
                self._compare(line, at, None)  # the replay made a plan, but the journal has none
            for moved in self._moved.pop(at, ()):
                self.outcome.moves.append(record["now"] - (moved.first_token_at or record["now"]))
            scheduler.set_kv_waiting(record["kv_waiting"])
            self._last[at] = scheduler.plan(record["now"], record["start"])
        elif kind == "planned":
            self._compare(line, at, record["plan"])
        elif kind == "settle":
            result = result_of(record)
            if (oldest := scheduler.oldest) is not None:
                took = oldest.ran + result.finished - result.started
                self.outcome.steps.append(Step(at, oldest.load, took, result.finished, oldest.seconds))
            scheduler.settle(result)
        elif kind == "interrupts":
            scheduler.set_ends(record["ends"])
            scheduler.set_kv_waiting(record["kv_waiting"])
            scheduler.interrupts(record["now"])
        elif kind == "accept":
            request = self.outcome.requests[record["id"]]
            scheduler.accept(request, record["first_token_at"])
            self._moved.setdefault(at, []).append(request)
        elif kind == "adopt":
            scheduler.adopt(self._perf(record["recipe"]), tuple(record["stairs"]), record["recipe"])
            self.outcome.instances[at] |= {"perf": record["recipe"]}
        elif kind == "reserve":
            scheduler.reserve(self.outcome.requests[record["id"]])
        elif kind != "digest":
            raise InvalidValue(f"journal line {line}: unknown kind {kind!r}")

    def _begin(self, record: dict[str, Any]) -> None:
        """Create the scheduler of an instance."""
        name, watcher = record["at"], self._watcher
        limits = Limits(**record["limits"] | {"stairs": tuple(record["limits"]["stairs"])})
        scheduler = self._schedulers[name] = Scheduler(
            policies.make(record["policy"]),
            self._perf(record["perf"]),
            limits,
            Role(record["role"]),
            prefix_caching=record["prefix_caching"],
            log=no_log if watcher is None else watcher.instance(name, limits, lambda: self._now, no_log),
        )
        if watcher is not None:
            watcher.attach(name, scheduler)
        self.outcome.instances[name] = record

    def _trusted(self, line: int, recorded: str) -> str:
        """Return the policy to replay: a journal is data, so only the caller can name a file that runs as code."""
        if not policies.from_files(recorded):
            return recorded
        if self._policy is None:
            raise InvalidValue(
                f"journal line {line}: policy {recorded!r} is code from a file, which only runs if you name it: "
                f"jaxserve replay --policy {recorded!r}",
                "policy",
            )
        return self._policy

    def _moved_here(self, id: int) -> Request | None:
        """Return a request that moved here from another instance, or None for a new one."""
        request = self.outcome.requests.get(id)
        if request is not None:
            request.wait_anew()
        return request

    def _made(self, fields: dict[str, Any]) -> Request:
        asked, thinking, resumed = dict(fields["asked"]), fields["thinking"], fields["resumed"]
        asked["params"] = SamplingParams(**{name: _tupled(value) for name, value in asked["params"].items()})
        asked["slo"] = SLO(**{name: _tupled(value) for name, value in asked["slo"].items()})
        request = Request(
            fields["id"],
            NewRequest(range(fields["prompt_length"]), **asked),
            fields["arrival"],
            seed=fields["seed"],
            eos=frozenset(fields["eos"]),
            thinking=thinking and ThinkingEnd(*thinking),
            limit=fields["limit"],
            class_=fields["class_"],
        )
        request.tier = fields["tier"]
        if resumed is not None:
            request.output, request.token_times, request.budget, request.scored = resumed
            request.first_token_at = request.token_times[0]
        request.digests = list(self._digests.get(request.id, ()))
        self.outcome.requests[request.id] = request
        if thinking:
            self._thinking[request.id] = thinking, len(request.output)
        return request

    def ended(self) -> Replay:
        """Return the result, after the last record."""
        for id, (thinking, begun) in self._thinking.items():
            later = self.outcome.requests[id].output[begun:]
            self.outcome.thoughts[id] = begun + _thoughts(ThinkingEnd(*thinking), later)
        return self.outcome

    def _compare(self, line: int, at: str, recorded: Any) -> None:
        plan = self._last.pop(at)
        replayed = None if plan is None else _plan(plan)
        self.outcome.plans += 1
        if replayed != recorded:
            self.outcome.differences.append(Difference(line, at, recorded, replayed))


def _thoughts(end: ThinkingEnd, output: Sequence[int]) -> int:
    """Count the tokens up to the end of thinking; all of them if it does not end."""
    return next((count for count, token in enumerate(output, 1) if end.feed(token)), len(output))


def _tupled(value: Any) -> Any:
    return tuple(map(_tupled, value)) if isinstance(value, list) else value


def _time_of(record: Mapping[str, Any]) -> float | None:
    """Return the executor's clock that a record tells, or None."""
    match record["kind"]:
        case "plan" | "interrupts":
            return float(record["now"])
        case "settle":
            return result_of(record).finished
        case "suspend":
            return Suspended(*record["result"]).at
        case "add":
            return float(record["request"]["arrival"])
    return None


def _times(records: Sequence[tuple[int, dict[str, Any]]]) -> Iterator[float]:
    """Yield the time of each record. One without a clock has that of the last one before it.

    KV that arrives wakes the planning of its instance: `accept` has the time of the next record with a clock.
    """
    following: list[float | None] = []
    later: float | None = None
    for number, record in reversed(records):
        with _named(number, record):
            at = _time_of(record)
            if at is not None and not abs(at) < LONGEST:
                raise ValueError(f"{at:g} is no time")
        later = later if at is None else at
        following.append(later if at is not None or record["kind"] == "accept" else None)
    now = 0.0
    for at in reversed(following):
        now = max(now, at or 0.0)  # a step's end is written after what happened while it was read
        yield now


@contextmanager
def _named(number: int, record: Mapping[str, Any]) -> Iterator[None]:
    """Raise InvalidValue with the line number if a record cannot be read, or does not fit those before it."""
    try:
        yield
    except InvalidValue:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        kind, what = short(str(record["kind"])), short(str(error))
        message = f"journal line {number}: the record {kind} cannot be replayed ({type(error).__name__}: {what})"
        raise InvalidValue(message, "journal") from error


def replay(
    lines: Iterable[str],
    perf: Callable[[Mapping[str, Any]], PerfModel],
    watcher: Watcher | None = None,
    policy: str | None = None,
) -> Replay:
    """Replay a journal and compare every plan. `perf` creates a step-time model from its record.

    policy: the policy of instances whose recorded policy comes from a file; without it, they are refused.

    An incomplete last line, as a killed process or a full disk leaves it, is ignored. Raises
    InvalidValue with the line number if another record cannot be read.
    """
    records: list[tuple[int, dict[str, Any]]] = []
    cut: InvalidValue | None = None
    for number, line in enumerate(lines, 1):
        if cut is not None:
            raise cut
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            cut = InvalidValue(f"journal line {number} is not JSON: {error}")
            continue
        if not (isinstance(record, dict) and {"at", "kind"} <= record.keys()):
            raise InvalidValue(f"journal line {number} is no record; a server writes a journal with --journal FILE")
        if record["kind"] == "instance" and (version := record.get("version", 1)) != VERSION:
            message = f"journal line {number}: version={version!r} must be {VERSION}; record the journal again"
            raise InvalidValue(message, "journal")
        records.append((number, record))
    if cut is not None and not records:
        raise cut
    digests: dict[int, list[bytes]] = {}
    for number, record in records:
        if record["kind"] == "digest":
            with _named(number, record):
                digests.setdefault(record["id"], []).append(bytes.fromhex(record["digest"]))
    replayer = _Replayer(perf, digests, watcher, policy)
    for (number, record), now in zip(records, _times(records), strict=True):
        with _named(number, record):
            replayer.feed(number, record, now)
    return replayer.ended()
