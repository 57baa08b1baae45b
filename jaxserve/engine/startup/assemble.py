"""Assembly of a machine that is ready to serve: executors, schedulers, a cluster."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxserve.config import ServeConfig
from jaxserve.engine.memory import kv
from jaxserve.engine.programs.inputs import LADDER
from jaxserve.engine.programs.mesh import MeshPlan, plan_of, sub_meshes
from jaxserve.engine.runtime.executor import JaxExecutor
from jaxserve.engine.runtime.flight_recorder import FlightRecorder
from jaxserve.engine.runtime.info import EngineInfo, InstanceInfo
from jaxserve.engine.startup import environment, objectives, processors, profile
from jaxserve.engine.startup.build import ExecutorConfig, LoadWeights, build_early, from_folder, random_init
from jaxserve.engine.startup.calls import Rung
from jaxserve.engine.startup.compiled import CompileCounter, compile_counter
from jaxserve.engine.startup.executables import Shipped
from jaxserve.engine.startup.stateful import fitting
from jaxserve.engine.startup.tiers import KVTiers
from jaxserve.engine.startup.warmup import Ladder, ProgramCounts, Progress
from jaxserve.errors import InvalidValue
from jaxserve.models.score_head import score_head
from jaxserve.models.source import DUMMY, find_model, tokenizer_folder, tokenizer_json
from jaxserve.models.thinking import thinking_markers
from jaxserve.sched import admission, policies, routing
from jaxserve.sched.api.log import Log, no_log
from jaxserve.sched.api.perf import Load
from jaxserve.sched.api.policy import Limits, Role
from jaxserve.sched.api.request import Request
from jaxserve.sched.api.thinking import ThinkingMarkers
from jaxserve.sched.cluster.cluster import Cluster, Instance
from jaxserve.sched.instance.scheduler import Scheduler
from jaxserve.sched.instance.watchdog import Patience
from jaxserve.sched.journal import Journal
from jaxserve.sched.perf.buckets import Padded
from jaxserve.sched.perf.profile import priced, probes
from jaxserve.sched.perf.recipe import DEFAULT, Recipe
from jaxserve.structured.compiler import Compiler
from jaxserve.tokenizer import template_of

log = logging.getLogger(__name__)

TAUGHT = 200  # steps after which a learned model says more than the measurements that it began with
CLOSING = 10.0  # seconds within which work on the devices must end when a machine closes
FLUSHING = 5.0  # seconds of them for pages in host memory to be written to the disk

# Settings that no compiled program depends on, so a machine can serve again with other values.
SCHEDULING = frozenset(
    {
        "policy",
        "routing",
        "admission",
        "prefill",
        "mode",
        "enable_prefix_caching",
        "kv_host_memory",
        "kv_disk",
        "kv_disk_size",
        "journal",
        "dashboard",
        "ttft_slo",
        "tpot_slo",
        "slo_tiers",
        "max_num_queued_reqs",
        "queue_timeout",
    }
)


class Machine:
    """Warm executors and everything needed to schedule them. Writer: the Engine that owns it."""

    def __init__(
        self,
        config: ServeConfig,
        mesh: MeshPlan,
        executors: list[JaxExecutor],
        limits: Limits,
        recipe: Recipe,
        info: EngineInfo,
        compiler: Compiler,
        *,
        ladder: Ladder | None = None,
        lent: bool = False,
    ) -> None:
        """ladder: None: all programs are ready. lent: the executors belong to another machine, which closes them."""
        promised = objectives.promise(config, recipe.make(), limits, info.max_model_len)
        self.info = replace(info, promise=promised)
        self.executors = executors
        self._measured = recipe  # for all programs
        # Creates the step-time model of each new scheduler, for the programs that are ready.
        self.recipe = recipe.padded(profile.buckets_of(executors[0]))
        self.ladder = ladder
        self.profile: profile.ProfileCache | None = None  # for `keep_profile`
        self.compiler = compiler  # of the structured outputs of requests, for all executors
        self.compiled: CompileCounter = compile_counter()
        self.config = config.promising(promised.slo)
        self._mesh = mesh
        self.limits = limits
        self._lent = lent
        self.patience = Patience()
        self.tiers = KVTiers(self.config, executors)
        self._journal: Journal | None = None  # open as long as the machine lives
        if config.journal is not None:
            # Line-buffered: if the process is killed, only the line in progress is lost.
            file = Path(config.journal).open("w", encoding="utf-8", buffering=1)  # noqa: SIM115
            self._journal = Journal(file, _journal_stopped)

    def cluster(self, finished: Callable[[Request], None], recorder: FlightRecorder | None = None) -> Cluster:
        """Create a new cluster over the executors, recorded by `recorder`."""
        config = self.config
        admits = admission.make(config.admission)
        places = routing.make(policies.routing(config.policy, config.routing), admits)
        limits = replace(self.limits, mixed_share=places.mixed_share)
        instances = []
        for executor, role in zip(self.executors, self._mesh.roles, strict=True):
            journal = self._log(executor.name, role, limits)
            scheduler = Scheduler(
                policies.make(config.decides),
                self.recipe.make(),
                limits,
                role,
                prefix_caching=config.enable_prefix_caching,
                log=journal if recorder is None else recorder.instance(executor.name, journal),
            )
            if recorder is not None:
                recorder.attach(executor.name, scheduler)
            instances.append(Instance(executor.name, scheduler, executor))
        return Cluster(
            instances,
            places,
            admits,
            finished=finished,
            patience=self.patience,
            sources=self.tiers.tiers,
            store=self.tiers.first,
        )

    def open(self, rung: Rung, cluster: Cluster) -> None:
        """Use more programs: tell the executors, and the schedulers of `cluster` what steps take now."""
        for executor in self.executors:
            executor.open(rung.buckets, rung.last)
        buckets = profile.buckets_of(self.executors[0])
        if buckets == self.recipe.buckets:
            return
        self.recipe, self.limits = self._measured.padded(buckets), replace(self.limits, stairs=buckets.mixed)
        record = self.recipe.record()
        for core in cluster.cores:
            core.scheduler.adopt(self.recipe.make(), buckets.mixed, record)

    def keep_profile(self, cluster: Cluster) -> None:
        """Store what serving taught about step times for the next start, if this one measured few programs."""
        taught = max((core.scheduler.perf for core in cluster.cores), key=lambda perf: perf.version)
        if self.profile is None or self.programs.ready < self.programs.total or taught.version < TAUGHT:
            return
        loads = (probe.load for probe in probes(self.limits, self.info.max_model_len, self.recipe.buckets))
        self.profile.save(priced(loads, taught.step_time))

    @property
    def programs(self) -> ProgramCounts:
        """How many programs there are, of all instances."""
        return ProgramCounts(0, 0, 0, 0) if self.ladder is None else self.ladder.counts

    @property
    def journal_errors(self) -> int:
        """The number of failures to write the journal: 1 once it has stopped."""
        return 0 if self._journal is None else self._journal.errors

    def _log(self, name: str, role: Role, limits: Limits) -> Log:
        if self._journal is None:
            return no_log
        return self._journal.instance(
            name,
            policy=self.config.decides,
            limits=limits,
            role=role,
            prefix_caching=self.config.enable_prefix_caching,
            perf=self.recipe.record(),
            options=self._options(),
        )

    def _options(self) -> dict[str, Any]:
        """Return the options of a simulation of this server (sched.sim.Options)."""
        return {
            "routing": policies.routing(self.config.policy, self.config.routing),
            "admission": self.config.admission,
            "boundary": self.config.preempt_boundary if self.limits.preemptible else "chunk",
            "segments": self.executors[0].pieces,
            "cascade": self.limits.cascade,
        }

    def now(self) -> float:
        return self.executors[0].now()

    def measure(self) -> None:
        """Measure step times for schedulers created from now on. Nothing else may run."""
        seconds = self.config.profile_time or profile.default_seconds(jax.default_backend())
        points = profile.measured(self.executors[0], self.limits, self.info.max_model_len, self.recipe.buckets, seconds)
        self.recipe = self._measured = replace(self.recipe, points=tuple(points))

    def serving(self, config: ServeConfig, limits: Limits | None = None) -> Machine:
        """Return a machine with the same executors and other scheduling settings (SCHEDULING).

        Nothing is compiled or measured again. Only one of the two may serve at a time; this one stays the
        owner of the executors and closes them. Raises InvalidValue for a setting that the executors were
        built with.

        limits: of the schedulers, tighter than those of the executors. None: the same.
        """
        for name in (field.name for field in fields(config)):
            mine, given = getattr(self.config, name), getattr(config, name)
            if mine != given and name not in SCHEDULING:
                raise InvalidValue(f"{name}={given!r} must be {mine!r}, as built into these executors", name)
        mesh = plan_of(config)
        places = tuple(replace(at, role=role.value) for at, role in zip(self.info.instances, mesh.roles, strict=True))
        info = replace(self.info, instances=places, policy=policies.shown(config.policy), routing=config.routing)
        limits = limits or self.limits
        return Machine(config, mesh, self.executors, limits, self._measured, info, self.compiler, lent=True)

    async def close(self) -> bool:
        """Close the executors; return False if one did not end within CLOSING seconds."""
        if self.ladder is not None and not self._lent:
            await asyncio.to_thread(self.ladder.close, CLOSING / 2)
        began = time.monotonic()
        ending = [executor.rest() if self._lent else executor.close() for executor in self.executors]
        tasks = [asyncio.ensure_future(closing) for closing in ending]
        _, late = await asyncio.wait(tasks, timeout=CLOSING)
        for task in late:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)  # one lost device must not keep the others open
        if not late:
            await self.tiers.flush(min(FLUSHING, CLOSING - (time.monotonic() - began)))
        self.tiers.close()
        if not self._lent:
            self.compiler.close()
        if self._journal is not None:
            self._journal.close()
        return not late


def _journal_stopped(error: OSError) -> None:
    log.error("the journal cannot be written (%s): it stops here, serving continues", error)


class Built(NamedTuple):
    """Warm executors, and what they were built from."""

    config: ExecutorConfig
    path: Path | None  # of the model; None: random weights of a published one
    executors: list[JaxExecutor]
    limits: Limits
    max_model_len: int
    ladder: Ladder | None
    score_head: bytes = b""  # see `EngineInfo`


def assemble(
    config: ServeConfig,
    progress: Progress | None = None,
    *,
    early: bool = False,
    ladder: tuple[int, ...] = LADDER,
    through: Callable[[Built], Built] = lambda built: built,
) -> Machine:
    """Load, compile and measure. Raises JaxserveError with the remedy.

    early: return once every request can be computed; `Machine.ladder` makes the other programs. ladder: sizes of the
    programs that compute prompt tokens; other ones are for benchmarks. through: replaces the executors before they
    are measured (spanning.py).
    """
    began = time.perf_counter()
    early = early and _can_begin_early(config)
    built = through(build(config, progress, ladder, early=early))
    if (plain := fitting(config, built.config.spec)) != config:
        log.info("prefix caching is off: layers of %s keep a state, which pages do not have", config.model_source)
        config = plain
    recipe, measured_here = _recipe(config, built, progress)
    compile_counter().warm()
    seconds = time.perf_counter() - began
    info = _info(config, built, seconds)
    log.info("ready in %.1f s; %s, attention %s", seconds, policies_line(config, built.config.mesh), info.attention)
    compiler = built.config.compiler
    assert compiler is not None
    machine = Machine(
        config, built.config.mesh, built.executors, built.limits, recipe, info, compiler, ladder=built.ladder
    )
    machine.profile = measured_here
    for why in machine.info.promise.broken.values():
        log.warning("%s", why)
    return machine


def _can_begin_early(config: ServeConfig) -> bool:
    """Return whether an engine can serve with few programs.

    KV tiers give pages back in all piece sizes. Few programs determine the general form, but not every table.
    """
    tiers = config.kv_host_memory or config.kv_disk_size
    return not tiers and (config.perf == DEFAULT or config.perf_preset is not None)


def build(
    config: ServeConfig,
    progress: Progress | None = None,
    ladder: tuple[int, ...] = LADDER,
    *,
    early: bool = False,
) -> Built:
    """Load and compile. early: see `assemble`. Raises JaxserveError with the remedy."""
    published, path = find_model(config.model_source, config.revision, config.load_format)
    spec = published.quantized_as(config.quantization)
    head = b""
    if path is not None and config.load_format != DUMMY:
        head = score_head(path, config.overrides, lambda: tokenizer_json(config))
    environment.prepare(config.gpu_memory_utilization)
    mesh = plan_of(config)
    sub_meshes(mesh, share_devices=config.share_devices)  # before jax starts, so that devices can be emulated
    fitting(config, spec)
    platform = jax.default_backend()
    length = config.max_model_len or spec.max_positions
    rows, tokens = config.rows(platform), config.step_tokens(platform)
    page_size = config.block_size or kv.default_page_size(platform)
    built = ExecutorConfig(
        spec=spec.for_length(length),
        load=_weights(config.load_format, config.seed or 0, path, progress),
        mesh=mesh,
        max_num_seqs=rows,
        max_num_batched_tokens=tokens,
        max_model_len=length,
        dtype=config.dtype,
        kv_cache_dtype=config.kv_cache_dtype,
        page_size=page_size,
        kv_cache_memory=config.kv_cache_memory,
        gpu_memory_utilization=config.gpu_memory_utilization,
        share_devices=config.share_devices,
        attention_backend=config.attention_backend,
        experts_backend=config.experts_backend,
        products_backend=config.products_backend,
        sampling_backend=config.sampling_backend,
        mlp_backend=config.mlp_backend,
        cascade_attention=config.cascade_attention,
        preempt_boundary=config.preempt_boundary,
        ladder=ladder,
        exchanges=config.kv_transfer is not None or config.prefill_replicas is not None,
        shipped=None if config.programs is None else Shipped(Path(config.programs), config.digest or ""),
        speculative=config.speculative,
        **_draft(config, length),
        compiler=compiler_of(config, spec.vocab, spec.eos),
        processors=processors.load(config.logits_processors, spec.vocab),
        markers=markers_of(config, path, spec.eos),
    )
    executors, climber = build_early(built, progress, early=early)
    drafted = 0 if config.speculative is None else config.speculative.num_speculative_tokens
    limits = Limits(
        tokens,
        rows,
        executors[0].pages,
        page_size,
        preemptible=executors[0].preemptible,
        stopping=executors[0].stopping,
        stop_within=config.preempt_within,
        draft=drafted,
        history=drafted > 0,
        stairs=profile.buckets_of(executors[0]).mixed,
        cascade=executors[0].state.programs.limits.cascade,
        session_timeout=config.session_timeout,
    )
    return Built(built, path, executors, limits, length, climber, head)


def _weights(load_format: str, seed: int, folder: Path | None, progress: Progress | None = None) -> LoadWeights:
    return random_init(seed) if load_format == DUMMY or folder is None else from_folder(folder, load_format, progress)


def _recipe(config: ServeConfig, built: Built, progress: Progress | None) -> tuple[Recipe, profile.ProfileCache | None]:
    """Return the recipe of the step-time model, and where to store more: None if nothing is missing.

    From a latency preset, or fitted to steps measured now or at an earlier start of the same engine.
    """
    executor = built.executors[0]
    plain = plain_recipe(config, built)
    if config.perf_preset is not None:
        return _from_preset(config, built, plain), None
    ready = profile.buckets_of(executor)
    seconds = config.profile_time or profile.default_seconds(jax.default_backend(), early=ready != plain.buckets)
    kept = profile.ProfileCache(profile.facts(built.config, executor, config.model_source))
    points = kept.load()
    if points is not None and not profile.holds(points, executor, built.limits, built.max_model_len, ready):
        log.warning("step times: the stored ones are off by more than a factor of %g; measuring again", profile.FAR)
        points = None
    if points is None:
        points = profile.measured(executor, built.limits, built.max_model_len, ready, seconds, progress=progress)
        kept.save(points)
        log.info("step times: %d loads measured, stored in %s", len(points), kept.path)
    else:
        log.info("step times: %d loads measured at an earlier start, from %s", len(points), kept.path)
    recipe = replace(plain, kind=config.perf, points=tuple(points))
    recipe.make()  # raises now if the points do not determine the form
    return recipe, kept if {load for load, _ in points} < set(_loads(built, plain)) else None


def plain_recipe(config: ServeConfig, built: Built) -> Recipe:
    """Return the recipe without any measurements."""
    moe = built.config.spec.moe
    return Recipe(
        buckets=profile.buckets_of(built.executors[0], ready=False),
        p_moe=0.0 if moe is None else moe.chosen / moe.experts,
        drafts=built.limits.draft > 0,
        model=config.model or "jaxserve-demo",
        device=profile.device_name(),
    )


def _from_preset(config: ServeConfig, built: Built, plain: Recipe) -> Recipe:
    """Return the recipe of the latency preset. Raises InvalidValue for another model, device or mesh."""
    preset = config.perf_preset
    assert preset is not None
    profile.check_measured_on(config.perf, preset.measured_on.known(), {"model": plain.model, "device": plain.device})
    mesh = built.config.mesh
    if preset.tensor_parallel != mesh.tp:
        raise InvalidValue(
            f"perf={config.perf!r} is for instances of {preset.tensor_parallel} devices, but mesh {mesh} has instances "
            f"of {mesh.tp} devices",
            "perf",
        )
    if not preset.measured_on.known():
        log.warning("perf=%s does not say on which model and device it was measured: used unchecked", config.perf)
    form = Padded(preset.solve(), plain.buckets)
    return replace(plain, points=tuple(priced(_loads(built, plain), form.step_time)), coefficients=form.coefficients)


def _loads(built: Built, plain: Recipe) -> list[Load]:
    """Return the loads of a whole profile."""
    return [probe.load for probe in probes(built.limits, built.max_model_len, plain.buckets)]


def compiler_of(config: ServeConfig, vocab: int, eos: Iterable[int]) -> Compiler:
    """Return the compiler of structured outputs. It loads the tokenizer with the first of them."""

    def read() -> str:
        return tokenizer_json(config)

    return Compiler(read, vocab, eos)


def markers_of(config: ServeConfig, path: Path | None, eos: Iterable[int]) -> ThinkingMarkers:
    """Return the thinking markers of the tokenizer and the chat template that are served; none for random weights."""
    if path is None:
        return ThinkingMarkers()
    folder = path if config.tokenizer is None else tokenizer_folder(config)
    return thinking_markers(folder, eos, template_of(config.chat_template))


def _draft(config: ServeConfig, length: int) -> dict[str, Any]:
    """Return the settings of the draft model, if there is one."""
    if config.speculative is None or config.speculative.model is None:
        return {}
    load_format = DUMMY if config.load_format == DUMMY else "auto"  # otherwise the draft's own format
    draft, folder = find_model(config.speculative.model, config.speculative.revision, load_format)
    return {"draft": draft.for_length(length), "load_draft": _weights(load_format, config.seed or 0, folder)}


def policies_line(config: ServeConfig, mesh: MeshPlan) -> str:
    """Describe the mesh, policy and routing."""
    return f"mesh {mesh}, policy {config.policy}, routing {config.routing}"


def _info(config: ServeConfig, built: Built, seconds: float) -> EngineInfo:
    executors, mesh, spec = built.executors, built.config.mesh, built.config.spec

    def instance(executor: JaxExecutor, role: Any) -> InstanceInfo:
        devices = tuple(str(device) for device in executor.state.mesh.devices.flat)
        return InstanceInfo(executor.name, role.value, devices, executor.pages, executor.page_size)

    return EngineInfo(
        model=config.model_source,
        max_model_len=built.max_model_len,
        vocab_size=spec.vocab,
        dtype=str(executors[0].state.weights["embed"].dtype),
        instances=tuple(map(instance, executors, mesh.roles)),
        policy=policies.shown(config.policy),
        routing=config.routing,
        eos=frozenset(spec.eos),
        thinking=built.config.markers or ThinkingMarkers(),
        startup_seconds=seconds,
        attention=executors[0].state.programs.attention,
        hidden_size=spec.dim,
        logits_processors=tuple(built.config.processors),
        generates=spec.generates,
        score_head=built.score_head,
    )
