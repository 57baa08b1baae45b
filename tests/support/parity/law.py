"""The law "no schedule changes the tokens", up to rounding in float32.

A request alone on 1x1 is the reference. Another schedule must give the same tokens up to the first
position at which the reference's two best scores (after keyed Gumbel noise, if it samples) differ by
less than `CLOSE`: there, rounding may decide, and the comparison of that request stops. If more than
one comparison in a hundred stops, the law is broken.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.engine.memory import kv
from jaxserve.engine.memory.calibrate import with_kv_scales
from jaxserve.engine.programs import sampling
from jaxserve.engine.programs.inputs import Limits as Shapes
from jaxserve.engine.programs.inputs import SlotTable
from jaxserve.engine.programs.mesh import plan_mesh
from jaxserve.engine.programs.processors import Processor
from jaxserve.engine.programs.sampling import MOST_COUNTED, SEEN_IN_PROMPT, Column, SamplingRows
from jaxserve.engine.runtime.executor import JaxExecutor
from jaxserve.engine.startup import build
from jaxserve.models import registry
from jaxserve.models.spec import ModelSpec
from jaxserve.sched import policies, routing
from jaxserve.sched.api.log import Log, no_log
from jaxserve.sched.api.new_request import STANDARD, NewRequest, Progress
from jaxserve.sched.api.params import SamplingParams
from jaxserve.sched.api.plan import GIVEN_UP, Begin, Delta, StepPlan
from jaxserve.sched.api.policy import Limits, Policy, Role
from jaxserve.sched.api.request import Request
from jaxserve.sched.api.slo import SLO
from jaxserve.sched.cluster.cluster import Cluster, Instance
from jaxserve.sched.instance.scheduler import Scheduler
from jaxserve.sched.journal import Journal
from jaxserve.sched.perf.model import Coefficients
from jaxserve.sched.perf.recipe import Recipe
from jaxserve.structured.compiler import Compiler
from jaxserve.structured.constraint import Constraint
from jaxserve.structured.token_filter import TokenFilter, Words, words
from pallas_kernels.attention.api import attention
from pallas_kernels.layout import Ragged
from tests.support.structured.bytes import END, tokenizer_json

CLOSE = 1e-3
LENGTH, PAGE, ROWS = 256, 16, 6
PERF = Coefficients(fixed=2e-3, prefill=2e-5, decode=1e-4, quadratic=0.0, longest=1e-6, context=0.0)
SPEC: ModelSpec = registry.spec_from_config(
    {
        "architectures": ["Qwen3ForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 16, "intermediate_size": 96, "vocab_size": 256,
        "max_position_embeddings": LENGTH, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False,
        "hidden_act": "silu", "eos_token_id": 7,
    }
)  # fmt: skip


assert SPEC.eos == (END,)
COMPILER = Compiler(tokenizer_json, SPEC.vocab, SPEC.eos)


@dataclass(frozen=True)
class Model:
    """A model and its numerical accuracy: scores closer than `close` may swap by rounding."""

    spec: ModelSpec = SPEC
    dtype: str = "float32"
    close: float = CLOSE
    kv: str = "auto"  # kv_cache_dtype

    @property
    def stored(self) -> Any:
        return kv.pool_dtype(self.kv, self.dtype)


TINY = Model()


def weights(spec: ModelSpec, dtype: Any, meshes: Sequence[Any]) -> list[Any]:
    """Return random weights with a decisive head, so that scores are spread like those of a trained model."""
    trees = build.random_init(3)(spec, dtype, meshes)
    return [{**tree, "head": jax.tree.map(lambda leaf: leaf * 25.0, tree["head"])} for tree in trees]


@dataclass(frozen=True)
class Ask:
    """One request of a parity test."""

    prompt: tuple[int, ...]
    params: SamplingParams
    after: float = 0.0  # seconds
    cancel: bool = False  # halfway through
    tier: str = STANDARD
    progress: Progress | None = None  # what another engine has done for it


def state_bytes(spec: ModelSpec) -> int:
    """Return the bytes of a request's state."""
    return 0 if spec.cache.state is None else spec.cache.state.slot_bytes()


class Setup:
    """Executors of one shape for varying runs."""

    slo = SLO(1.0, 0.02)  # of every request

    def __init__(
        self, mesh: str, tokens: int, pages: int, mode: str = "auto", model: Model = TINY, **options: Any
    ) -> None:
        """Create executors; `options` are those of an ExecutorConfig."""
        plan = plan_mesh(mesh, mode=mode)
        config = build.ExecutorConfig(
            spec=model.spec, load=weights, mesh=plan, max_num_seqs=ROWS, max_num_batched_tokens=tokens,
            max_model_len=LENGTH, dtype=model.dtype, kv_cache_dtype=model.kv, page_size=PAGE,
            kv_cache_memory=sum(
                (kv.page_bytes(spec.for_tp(plan.tp), PAGE, model.stored) * pages + ROWS * state_bytes(spec))
                * plan.instances
                for spec in (model.spec, options.get("draft"))
                if spec is not None
            ),
            **{"warm": False, "compiler": COMPILER if model.spec.vocab == 256 else None, **options},
        )  # fmt: skip
        self.tokens = tokens
        self.patience = 1500 if config.interpret else 240  # seconds: interpreted kernels take minutes
        self.spec = model.spec
        self.roles: tuple[Role, ...] = plan.roles
        self.executors: list[JaxExecutor] = build.build_executors(config)
        self.pages = self.executors[0].pages  # that the schedulers have

    def narrowed(self, mesh: str, tokens: int, pages: int) -> Setup:
        """Return a setup of the same executors, or the first of them, whose schedulers see less."""
        plan, narrow = plan_mesh(mesh), copy(self)
        narrow.roles, narrow.executors = plan.roles, self.executors[: plan.instances]
        narrow.tokens, narrow.pages = min(tokens, self.tokens), min(pages, self.pages)
        return narrow

    def run(
        self,
        asks: Sequence[Ask],
        policy: str | Callable[[], Policy] = "distserve",
        watch: Callable[[StepPlan], None] | None = None,
        journal: Journal | None = None,
        place: str = "auto",
        disturb: Callable[[Cluster], None] | None = None,
    ) -> tuple[list[Request], Cluster]:
        """Serve the requests, each at its time, and return them finished, in order, with their cluster.

        `watch` sees every plan before it runs; `disturb` is called soon after each.
        """
        return asyncio.run(self._run(asks, policy, watch, journal, place, disturb))

    def each(self, asks: Sequence[Ask]) -> tuple[Request, ...]:
        """Serve each request alone, as a reference."""
        return tuple(self.run([ask])[0][0] for ask in asks)

    def _cluster(
        self, policy: str | Callable[[], Policy], over: list[Request], journal: Journal | None, place: str
    ) -> Cluster:
        recipe = Recipe("general", coefficients=PERF)
        first = self.executors[0]
        drafted = first.state.programs.limits.draft
        limits = Limits(
            self.tokens, ROWS, self.pages, PAGE,
            preemptible=first.preemptible, stopping=first.stopping, draft=drafted, history=drafted > 0,
            cascade=first.state.programs.limits.cascade,
        )  # fmt: skip
        instances = []
        for executor, role in zip(self.executors, self.roles, strict=True):
            log: Log = no_log
            if journal is not None and isinstance(policy, str):
                log = journal.instance(
                    executor.name,
                    policy=policy,
                    limits=limits,
                    role=role,
                    prefix_caching=self.spec.cache.state is None,
                    perf=recipe.record(),
                )
            scheduler = Scheduler(
                policies.make(policy) if isinstance(policy, str) else policy(),
                recipe.make(),
                limits,
                role,
                log=log,
                prefix_caching=self.spec.cache.state is None,
            )
            instances.append(Instance(executor.name, scheduler, executor))
        named = policy if isinstance(policy, str) else "distserve"
        return Cluster(instances, routing.make(policies.routing(named, place)), finished=over.append)

    async def _run(
        self,
        asks: Sequence[Ask],
        policy: str | Callable[[], Policy],
        watch: Callable[[StepPlan], None] | None,
        journal: Journal | None,
        place: str,
        disturb: Callable[[Cluster], None] | None,
    ) -> tuple[list[Request], Cluster]:
        over: list[Request] = []
        cluster, loop = self._cluster(policy, over, journal, place), asyncio.get_running_loop()

        def planned(plan: StepPlan) -> None:
            if disturb is not None:
                loop.call_soon_threadsafe(disturb, cluster)
            if watch is not None:
                watch(plan)

        for executor in self.executors:
            executor.fault = planned
        machine = asyncio.ensure_future(cluster.run())
        await asyncio.sleep(0)
        for id, ask in enumerate(asks):
            await asyncio.sleep(ask.after)
            request = Request(
                id, NewRequest(ask.prompt, ask.params, self.slo, tier=ask.tier), self.executors[0].now(),
                seed=ask.params.seed or 0, eos=frozenset(self.spec.eos),
                limit=min(ask.params.max_tokens or LENGTH, LENGTH - len(ask.prompt)),
            )  # fmt: skip
            if ask.progress is not None:
                request.resume(ask.progress, self.executors[0].now())
            cluster.submit(request, _cancelling(cluster, id) if ask.cancel else _nothing)
        drained = asyncio.ensure_future(cluster.drained())
        await asyncio.wait([drained, machine], timeout=self.patience, return_when=asyncio.FIRST_COMPLETED)
        if machine.done():
            machine.result()
        assert drained.done(), [list(core.scheduler) for core in cluster.cores]
        while len(cluster.kv_transfers) or any(core.scheduler.in_flight for core in cluster.cores):
            await asyncio.sleep(0.01)  # surplus rows and transfers
        for _ in range(1000):  # an abandoned transfer releases its pages when the KV in flight has arrived
            if not any(core.scheduler.blocks.held for core in cluster.cores):
                break
            await asyncio.sleep(0.01)
        cluster.check()
        assert all(core.scheduler.blocks.held == 0 for core in cluster.cores)
        machine.cancel()
        await asyncio.wait([machine])
        return sorted(over, key=lambda request: request.id), cluster


def _nothing(delta: Delta) -> None:
    """Ignore the delta: tokens are read from the finished request."""


def _cancelling(cluster: Cluster, id: int) -> Callable[[Delta], None]:
    def heard(delta: Delta) -> None:
        if delta.finish_reason is None:
            asyncio.get_running_loop().call_soon(cluster.cancel, id)

    return heard


def compare(
    asks: Sequence[Ask],
    served: Sequence[Request],
    reference: Sequence[Request],
    model: Model = TINY,
    processors: Mapping[str, Processor] | None = None,
) -> int:
    """Assert the law for each request; return the number of comparisons that stopped at a close call."""
    stopped = 0
    for ask, mine, alone in zip(asks, served, reference, strict=True):
        if mine.finish_reason != alone.finish_reason:  # some masks leave no token, however they are scheduled
            assert mine.finish_reason not in GIVEN_UP, f"{ask}: {mine.finish_reason}: {mine.error}"
        tokens, expected = mine.output, alone.output
        if ask.cancel and mine.finish_reason == "abort":
            expected = expected[: len(tokens)]
        if tokens == expected:
            continue
        first = next(i for i, (a, b) in enumerate(zip([*tokens, -1], [*expected, -1], strict=False)) if a != b)
        gap = margins(ask, alone.output, model, processors)[first]
        assert gap < model.close, (
            f"{ask}: token {first} differs, though the best scores are {gap} apart: {mine} {alone}"
        )
        stopped += 1
    return stopped


@cache
def alone(model: Model, requests: tuple[Ask, ...], pages: int) -> tuple[Request, ...]:
    """Serve each request alone on 1x1 as the reference."""
    return alone_on(Setup("1x1", 64, pages, model=model), model, requests)


def alone_on(setup: Setup, model: Model, requests: Sequence[Ask]) -> tuple[Request, ...]:
    """Serve each request alone with a setup."""
    assert {str(part.dtype) for pool in setup.executors[0].state.kv for part in pool} == {str(model.stored)}
    return setup.each(requests)


def hold(
    model: Model, requests: Sequence[Ask], mesh: str, chunk: int, pages: int, roomy: int, *, narrow: bool = False
) -> None:
    """Assert the law for requests served together with `pages`, each compared to itself alone with `roomy` pages.

    narrow: use the programs of the reference, whose schedulers see fewer pages and smaller chunks, which compiles half
    as many. The mesh has one device per instance.
    """
    if narrow:
        setup = Setup(mesh, 64, roomy, model=model)
        reference = alone_on(setup.narrowed("1x1", 64, roomy), model, requests)
        setup = setup.narrowed(mesh, chunk, pages)
    else:
        setup, reference = Setup(mesh, chunk, pages, model=model), alone(model, tuple(requests), roomy)
    served, cluster = setup.run(requests, "unified")
    assert all(request.finish_reason in ("stop", "length") for request in served)
    if not mesh.startswith("1x"):
        assert cluster.kv_transfers.transfers > 0, "no KV was transferred"
    assert compare(requests, served, reference, model) <= 1


# the reference's scores


@cache
def _model(model: Model) -> tuple[Any, Any]:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("tp",))
    spec = replace(model.spec, kv_scales=kv.scaled(model.kv))
    trees = weights(spec, jnp.dtype(model.dtype), [mesh])
    if spec.kv_scales:
        trees = with_kv_scales(spec, trees, [mesh], model.stored)
    return trees[0], jax.jit(partial(_forward, replace(model, spec=spec)))


def _forward(model: Model, tree: Any, tokens: jax.Array, length: jax.Array) -> jax.Array:
    """Return the logits [T, V] of one request computed in one step with fresh pages."""
    total, pages = tokens.shape[0], LENGTH // PAGE
    index = jnp.arange(total, dtype=jnp.int32)
    real = index < length
    ragged = Ragged(
        jnp.where(real, index, 0), jnp.where(real, 0, 1), jnp.where(real, index, pages * PAGE),
        jnp.zeros(1, jnp.int32), length[None], length[None], jnp.arange(pages, dtype=jnp.int32)[None],
    )  # fmt: skip
    cache = model.spec.cache
    states = () if cache.state is None else cache.state.shapes(1, cache.heads_first)
    pools = cache.pools(jnp.zeros(cache.shape(pages, PAGE), model.stored), [jnp.zeros(shape) for shape in states])
    hidden, _ = registry.forward(model.spec, tree, pools, tokens, ragged, attention=attention())
    return registry.logits(model.spec, tree, hidden)


def masks_of(ask: Ask, output: Sequence[int], spec: ModelSpec = SPEC) -> Words:
    """Return the masks [n, W] of the positions of an output of n tokens."""
    wanted = ask.params.structured_outputs
    make = None if wanted is None else partial(COMPILER.matcher, wanted)
    one = Constraint(make, prompt=ask.prompt, output=(), ends=spec.eos, least=ask.params.min_tokens,
                     tokens=TokenFilter.of(ask.params, spec.vocab))  # fmt: skip
    masks = np.zeros((len(output), words(spec.vocab)), np.int32)
    for mask, token in zip(masks, output, strict=True):
        one.fill(mask)
        one.tell((token,))
    return masks


def assert_allowed(ask: Ask, output: Sequence[int]) -> None:
    """Assert that the masks of a request allow every token of its output."""
    bits = np.unpackbits(masks_of(ask, output).view(np.uint8), axis=1, bitorder="little")
    for at, token in enumerate(output):
        assert bits[at, token], f"{ask}: token {at} is {token}"


def margins(
    ask: Ask, output: Sequence[int], model: Model = TINY, processors: Mapping[str, Processor] | None = None
) -> list[float]:
    """Return the distance of the two best scores at each output position, as the sampler sees them."""
    spec = model.spec
    tree, forward = _model(model)
    tokens = np.zeros(LENGTH, np.int32)
    known = [*ask.prompt, *output][:LENGTH]
    tokens[: len(known)] = known
    n, prompt = len(output), len(ask.prompt)
    logits = forward(tree, tokens, np.int32(len(known)))[prompt - 1 : prompt - 1 + n]  # [G, V]
    slots = SlotTable(Shapes(slots=n, tokens=16, pages=1, page_size=PAGE, row_pages=1, vocab=spec.vocab))
    counts = np.zeros((n, spec.vocab), np.int16)
    for row in range(n):
        slots.begin(row, Begin(ask.params, ask.params.seed or 0, ask.prompt, (), prompt, spec.eos))
        counts[row] = np.minimum(np.bincount(np.array(output[:row], int), minlength=spec.vocab), MOST_COUNTED)
        counts[row, list(set(ask.prompt))] |= SEEN_IN_PROMPT
    columns = slots.columns[:n].copy()
    columns[:, Column.POSITION] = prompt + np.arange(n)
    rows = SamplingRows(jnp.asarray(columns))
    for name, argument in ask.params.logits_processors:
        logits = (processors or {})[name](logits, jnp.full(n, argument, jnp.float32))
    if ask.params.constrained:
        logits = sampling.only_allowed(logits, jnp.asarray(masks_of(ask, output, spec)))
    x = sampling._penalized(logits, jnp.asarray(counts), rows)
    if ask.params.temperature > 0:
        x = sampling.heated_and_cut(x, rows) + sampling.gumbel(rows, spec.vocab)
    best = np.sort(np.asarray(x), axis=1)
    gaps: list[float] = (best[:, -1] - best[:, -2]).tolist()
    return gaps
