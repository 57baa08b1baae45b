"""From settings to a machine that is ready to serve: executors, schedulers, a cluster."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import jax

from jaxserve.config import ServeConfig
from jaxserve.engine import kv, profile
from jaxserve.engine.build import ExecutorConfig, build_executors, from_folder, random_init
from jaxserve.engine.executor import JaxExecutor
from jaxserve.engine.info import EngineInfo, InstanceInfo
from jaxserve.engine.mesh import MeshPlan, plan_of, sub_meshes
from jaxserve.engine.warmup import CompileCounter, Progress, compile_counter
from jaxserve.models.hub import resolve_model
from jaxserve.models.registry import load_spec
from jaxserve.models.spec import ModelSpec
from jaxserve.models.thinking import end_thinking
from jaxserve.sched import admission, placement, policies
from jaxserve.sched.cluster import Cluster, Instance
from jaxserve.sched.journal import Journal
from jaxserve.sched.log import Log, no_log
from jaxserve.sched.policy import Limits, Role
from jaxserve.sched.request import Request
from jaxserve.sched.scheduler import Scheduler

log = logging.getLogger(__name__)


class Machine:
    """Warm executors and what is needed to schedule them. Writer: the Engine that owns it."""

    def __init__(
        self,
        config: ServeConfig,
        mesh: MeshPlan,
        executors: list[JaxExecutor],
        limits: Limits,
        points: list[profile.Point],
        info: EngineInfo,
    ) -> None:
        self.info = info
        self.executors = executors
        self.compiled: CompileCounter = compile_counter()
        self._config = config
        self._mesh = mesh
        self._limits = limits
        self._points = points
        self._file: IO[str] | None = None  # open for as long as the machine lives
        if config.journal is not None:
            self._file = Path(config.journal).open("w", encoding="utf-8")  # noqa: SIM115

    def cluster(self, finished: Callable[[Request], None]) -> Cluster:
        """A new cluster over the executors."""
        config = self._config
        instances = []
        for executor, role in zip(self.executors, self._mesh.roles, strict=True):
            scheduler = Scheduler(
                policies.make(config.decides),
                profile.model(self._points, self._limits, self.info.max_model_len),
                self._limits,
                role,
                prefix_caching=config.enable_prefix_caching,
                log=self._log(executor.name, role),
            )
            instances.append(Instance(executor.name, scheduler, executor))
        admits = admission.make(config.admission)
        places = placement.make(policies.placement(config.policy, config.placement), admits)
        return Cluster(instances, places, admits, first_token=config.first_token, finished=finished)

    def _log(self, name: str, role: Role) -> Log:
        if self._file is None:
            return no_log
        described = {
            "model": "profile",
            "points": self._points,
            "limits": asdict(self._limits),
            "max_model_len": self.info.max_model_len,
        }
        return Journal(self._file).instance(
            name,
            policy=self._config.decides,
            limits=self._limits,
            role=role,
            prefix_caching=self._config.enable_prefix_caching,
            perf=described,
        )

    def now(self) -> float:
        return self.executors[0].now()

    async def close(self) -> None:
        for executor in self.executors:
            with suppress(Exception):  # a device that is gone must not keep the others from being closed
                await executor.close()
        if self._file is not None:
            self._file.close()


def assemble(config: ServeConfig, progress: Progress | None = None) -> Machine:
    """Load, compile, measure. Raises JaxserveError with what to do about it."""
    began = time.perf_counter()
    path = resolve_model(config.model_source, config.revision)
    spec = load_spec(path).quantised_as(config.quantization)
    mesh = plan_of(config)
    sub_meshes(mesh, share_devices=config.share_devices)  # before jax starts, so that devices can be emulated
    platform = jax.default_backend()
    length = config.max_model_len or spec.max_positions
    rows, tokens = config.rows(platform), config.step_tokens(platform)
    page_size = config.block_size or kv.default_page_size(platform)
    executors = build_executors(
        ExecutorConfig(
            spec=spec,
            load=random_init(config.seed)
            if config.load_format == "dummy"
            else from_folder(path, config.load_format, progress),
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
            preempt_boundary=config.preempt_boundary,
            preempt_depth=config.preempt_depth,
            speculative=config.speculative,
            **_draft(config),
        ),
        progress,
    )
    drafted = 0 if config.speculative is None else config.speculative.num_speculative_tokens
    limits = Limits(
        tokens,
        rows,
        executors[0].pages,
        page_size,
        preemptible=executors[0].preemptible,
        draft=drafted,
        history=drafted > 0,
    )
    points = profile.measured(executors[0], limits, length)
    compile_counter().warm()
    seconds = time.perf_counter() - began
    info = _info(config, spec, mesh, executors, length, seconds, end_thinking(path))
    log.info("ready in %.1f s; %s, attention %s", seconds, policies_line(config, mesh), info.attention)
    return Machine(config, mesh, executors, limits, points, info)


def _draft(config: ServeConfig) -> dict[str, Any]:
    """The draft model, where one drafts."""
    if config.speculative is None or config.speculative.model is None:
        return {}
    path = resolve_model(config.speculative.model, config.speculative.revision)
    return {"draft": load_spec(path), "load_draft": from_folder(path)}


def policies_line(config: ServeConfig, mesh: MeshPlan) -> str:
    """What decides, in words."""
    return f"mesh {mesh}, policy {config.policy}, placement {config.placement}"


def _info(
    config: ServeConfig,
    spec: ModelSpec,
    mesh: MeshPlan,
    executors: list[JaxExecutor],
    length: int,
    seconds: float,
    thinks: frozenset[int],
) -> EngineInfo:
    def instance(executor: JaxExecutor, role: Any) -> InstanceInfo:
        devices = tuple(str(device) for device in executor.state.mesh.devices.flat)
        return InstanceInfo(executor.name, role.value, devices, executor.pages, executor.page_size)

    return EngineInfo(
        model=config.model_source,
        max_model_len=length,
        vocab_size=spec.vocab,
        dtype=str(executors[0].state.weights["embed"].dtype),
        instances=tuple(map(instance, executors, mesh.roles)),
        policy=config.policy,
        placement=config.placement,
        eos=frozenset(spec.eos),
        end_thinking=thinks,
        startup_seconds=seconds,
        attention=executors[0].state.programs.attention,
    )
