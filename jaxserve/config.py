"""`ServeConfig`: all settings as one frozen value, built from flags, a YAML file or `LLM(...)`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from jaxserve.errors import InvalidValue, short
from jaxserve.sched import admission, policies, routing, scaling
from jaxserve.sched.api.policy import Role
from jaxserve.sched.api.pooling import PoolingType
from jaxserve.sched.api.preemption import Boundary
from jaxserve.sched.api.slo import SLO, THINKING
from jaxserve.sched.perf import KINDS
from jaxserve.settings.fields import flag
from jaxserve.settings.operations import OperationSettings
from jaxserve.settings.other_engines import argument_hint
from jaxserve.settings.speculative import Speculative
from jaxserve.settings.tiers import AUTO, DEFAULT, PLAIN, Classes, Objective, ResolvedTier, Tier, load_tiers, resolve
from jaxserve.yamlio import (
    Bytes,
    Count,
    Positive,
    Range,
    Room,
    Seconds,
    convert,
    hints_of,
    load_fields,
    load_yaml,
    nearest,
    parse_setting,
    parse_yaml,
    seconds,
)

if TYPE_CHECKING:
    from jaxserve.sched.sim.latency import Latency

__all__ = ["ServeConfig", "load_yaml", "parse_mesh", "parse_yaml", "preset"]


Kernels = Literal["auto", "mosaic_gpu", "xla"]


def preset(kind: str, name: str) -> Path:
    """Return a file of `configs/`: `preset("slo", "tiers")` is configs/slo/tiers.yaml, also in a wheel."""
    folder = Path(__file__).parent / "presets" / kind
    path = folder / f"{name}.yaml"
    if not path.is_file():
        raise InvalidValue(f"no {kind} preset {name!r}: {nearest(name, (p.stem for p in folder.glob('*.yaml')))}", name)
    return path


def parse_mesh(text: str) -> tuple[int, int]:
    """Parse `RxT` into (instances, devices per instance)."""
    match = re.fullmatch(r"([1-9]\d*)[xX]([1-9]\d*)", text.strip())
    if match is None:
        raise InvalidValue(
            f"mesh={text!r} must be RxT, instances by devices per instance, as in 1x1, 2x4 or 4x2", "mesh"
        )
    return int(match[1]), int(match[2])


@dataclass(frozen=True)
class ServeConfig(OperationSettings):
    """Settings of a server or of an `LLM`, with vLLM's names for settings that vLLM has.

    Each field is a flag (`max_model_len` is `--max-model-len`) and a key of a `--config` file. Its type says
    what is allowed, for all three. Raises InvalidValue naming the field, its value and what is allowed.
    """

    # model
    model: str | None = flag(
        None, "model", "Hugging Face name, short name (llama3-8b), or folder with config.json, tokenizer and weights. "
        "Default: the demo model that comes with jaxserve, small enough for a laptop.", metavar="NAME|PATH",
    )  # fmt: skip
    tokenizer: str | None = flag(None, "model", "Name or folder of the tokenizer. Default: the model's.")
    revision: str | None = flag(None, "model", "Branch, tag or commit on the Hugging Face hub.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = flag(
        "auto", "model", "Data type of weights and activations. auto: float32 on CPU, bfloat16 on accelerators, but "
        "float16 on GPUs without bfloat16, such as the T4.",
    )  # fmt: skip
    quantization: Literal["int8", "fp8", "fp8_per_block"] | None = flag(
        None, "model", "Quantize the weights of matrix products to 8 bits: int8 or fp8 with a scale per output, or "
        "fp8_per_block with a scale per 128 x 128 block. Default: as in the checkpoint.",
    )  # fmt: skip
    load_format: Literal["auto", "safetensors", "orbax", "dummy"] = flag(
        "auto", "model", "Format of the weights: safetensors, or orbax as written by `jaxserve convert`; auto: detect. "
        "dummy: random weights, to measure speed without a download.",
    )  # fmt: skip
    max_model_len: Annotated[int, Range(2)] | None = flag(
        None, "model", "Longest prompt plus output, in tokens. Default: the model's own limit."
    )
    seed: Annotated[int, Range(0)] | None = flag(
        None, "model", "Seed of requests without one (default: random), and of dummy weights (default: 0)."
    )
    pooling_type: PoolingType = flag(
        "last", "model", "How /v1/embeddings, /pooling, /score and /rerank make one vector of a text: the hidden "
        "state of its last token, or the mean over all. Requests can override it with pooling_type.",
    )  # fmt: skip
    logits_processors: tuple[str, ...] = flag(
        (), "model", "Logits processors that requests may ask for by these names, in the order in which they are "
        "applied: entry points that installed packages declare in the group jaxserve.logits_processors.",
        metavar="NAME",
    )  # fmt: skip
    speculative_config: str | None = flag(
        None, "model", "Speculative decoding, as JSON with vLLM's keys: method (ngram or draft_model), "
        "num_speculative_tokens, model (the draft model), prompt_lookup_max and _min.", metavar="JSON",
    )  # fmt: skip

    # devices
    mesh: str | None = flag(
        None, "devices", "RxT: R instances of T devices each (T-way tensor parallel). With two or more instances, half "
        "prefill and half decode. Default: one instance on all local accelerators; 1x1 on CPU. On CPU missing "
        "devices are emulated.", metavar="RxT",
    )  # fmt: skip
    prefill: int | None = flag(None, "devices", "Number of instances that prefill; the others decode. Default: half.")
    mode: Literal["auto", "disaggregated", "colocated"] = flag(
        "auto", "devices", "colocated: every instance prefills and decodes. disaggregated: each instance does "
        "one of the two. auto: disaggregated with two or more instances.",
    )  # fmt: skip
    share_devices: bool = flag(False, "devices", "Let instances share devices if there are fewer than R*T.")
    attention_backend: Literal["auto", "mosaic_gpu", "tpu", "xla"] = flag(
        "auto", "kernels", "Attention kernels. auto: the first that can run: mosaic_gpu or xla on a GPU, tpu or xla on "
        "a TPU, xla on CPU. A named backend that cannot run is an error.",
    )  # fmt: skip
    cascade_attention: Literal["auto", "on", "off"] = flag(
        "off", "kernels", "Read the KV of a prefix that 4 or more requests of a step share (at least 256 tokens in the "
        "prefix cache) once, not once per request. Rounding then depends on which requests share a step, so tokens may "
        "differ between runs where two are nearly equally likely. auto: where the attention kernels can (xla, and "
        "mosaic_gpu without MLA).",
    )  # fmt: skip
    experts_backend: Kernels = flag(
        "auto", "kernels", "Kernels of the mixture of experts; chosen like --attention-backend."
    )
    products_backend: Kernels = flag(
        "auto", "kernels", "Kernels of matmuls with other 8-bit weights; chosen like --attention-backend."
    )
    sampling_backend: Kernels = flag(
        "auto", "kernels", "Kernels that find thresholds of top-k, top-p and min-p; chosen like --attention-backend."
    )
    mlp_backend: Kernels = flag(
        "auto", "kernels", "Kernels of gate, up and SwiGLU of dense feed-forwards. mosaic_gpu: one launch in steps of "
        "8 to 2048 tokens. auto: xla, as no GPU has compared them.",
    )  # fmt: skip

    # scheduling
    policy: str = flag(
        "unified", "scheduling", "Scheduling policy: unified, kairos, flowprefill, fairbatching, slos_serve, sarathi, "
        "vllm, distserve, sjf, edf, ...; some have options, as in kairos:literal; a policy per role, as in "
        "prefill=fcfs,decode=continuous; or a class of yours, as in file:./mine.py:Mine.", metavar="NAME",
    )  # fmt: skip
    routing: str = flag(
        "auto", "scheduling", f"Router of requests to instances: {', '.join(routing.ROUTERS)}. auto: the policy's "
        "default.", metavar="NAME",
    )  # fmt: skip
    admission: str = flag(
        "none", "objectives", f"Admission control: {', '.join(admission.ADMISSIONS)}. Requests that cannot be on time "
        "become best effort, or with :refuse get 429; none admits everything.", metavar="NAME",
    )  # fmt: skip
    perf: str = flag(
        "learned", "scheduling", f"Step-time model: {', '.join(KINDS)}, or a latency preset: a file written by "
        "`jaxserve profile` or `jaxserve fit`, or a name in configs/latency. learned: the general form, fitted at "
        "start and updated after every step.", metavar="NAME|FILE",
    )  # fmt: skip
    programs: str | None = flag(
        None, "startup", "Folder of executables that `jaxserve compile` wrote, on this machine or another; "
        "needs --digest.", metavar="DIR",
    )  # fmt: skip
    digest: str | None = flag(
        None, "startup", "Digest of --programs, as `jaxserve compile` printed it: executables are code, so only "
        "those that you name are used.", metavar="SHA256",
    )  # fmt: skip
    warmup: Literal["early", "full"] = flag(
        "early", "startup", "early: answer once a few programs can compute any request, and make the others "
        "meanwhile. full: make all first, as engines do that draft or keep KV outside of the devices.",
    )  # fmt: skip
    profile_time: Annotated[float, seconds, Range(0.01)] | None = flag(
        None, "startup", "Longest time to measure steps at the first start; later starts use the profile stored "
        "beside the compiled programs. Default: 0.8s with an early warm-up, else 5s on accelerators, 10s on CPU."
    )  # fmt: skip
    ttft_slo: Objective = flag(
        AUTO, "objectives", "Default TTFT objective of requests that set none, as in 8s or 500ms. auto: 4 prefills of "
        "the longest prompt, as measured at start; no objective in the Python API."
    )  # fmt: skip
    tpot_slo: Objective = flag(
        AUTO, "objectives", "Default objective of the mean time per token after the first. auto: 2 full decode steps."
    )  # fmt: skip
    thinking_tpot_slo: Positive | None = flag(
        None, "objectives", "TPOT objective of thinking tokens. Default: --tpot-slo."
    )
    slo_tiers: str | None = flag(
        None, "objectives", "YAML file of the tiers that requests select with service_tier. Default: interactive, "
        "priority, agent, batch (configs/slo/tiers.yaml).", metavar="FILE",
    )  # fmt: skip
    max_num_seqs: Count | None = flag(
        None, "scheduling", "Most running requests on an instance. Default: 256 on accelerators, 64 on CPU."
    )
    max_num_batched_tokens: Count | None = flag(
        None, "scheduling", "Most new tokens in a step. Default: 8192 on accelerators, 512 on CPU."
    )
    max_num_queued_reqs: Count | None = flag(
        None, "scheduling", "Requests that may wait, for each instance that takes prompts; further ones get 503 with "
        "Retry-After. Default: 16 x --max-num-seqs.",
    )  # fmt: skip
    queue_timeout: Seconds = flag(
        600.0, "scheduling", "Longest wait of a request for its first token; then 503, unless its prompt is in a step"
        " just then. 0: no limit, as in LLM(...)."
    )  # fmt: skip
    preempt_boundary: str = flag(
        "layer", "scheduling", "Points at which a running prefill can be preempted for more urgent work: op (attention "
        "and feed-forward of a layer), layer, layers:K, or chunk (only at its end).", metavar="WHERE",
    )  # fmt: skip
    preempt_within: Annotated[float, seconds, Range(0.005)] | None = flag(
        None, "scheduling", "Chunks of prompts are cut so that a running prefill that is asked to stop is predicted to "
        "do so in this time, as in 10ms. Default: no bound.",
    )  # fmt: skip

    # memory
    block_size: Count | None = flag(
        None, "memory", "Tokens per page of the KV cache. Default: 64 on accelerators, 16 on CPU."
    )
    kv_cache_dtype: Literal["auto", "bfloat16", "float16", "float32", "fp8", "fp8_e4m3", "int8"] = flag(
        "auto", "memory", "Data type of the KV cache. auto: as --dtype. fp8 (e4m3) and int8 hold twice the tokens of "
        "bfloat16 in the same memory.",
    )  # fmt: skip
    gpu_memory_utilization: Annotated[float, Range(0.01, 1)] = flag(
        0.9, "memory", "Share of each accelerator's memory for weights, KV cache and temporaries."
    )
    kv_cache_memory: Room | None = flag(
        None, "memory", "Bytes of all KV caches together, as in 2GiB. Default on CPU: 2 GiB or a quarter of free "
        "memory, whichever is smaller."
    )  # fmt: skip
    enable_prefix_caching: bool = flag(True, "memory", "Reuse the KV of earlier requests for equal prefixes.")
    session_timeout: Seconds = flag(
        60.0, "memory", "Longest time for which a session keeps its KV pages after a turn."
    )  # fmt: skip
    kv_host_memory: Bytes = flag(
        0, "memory", "Host memory for KV that the prefix caches evict, as in 64GiB, shared by the instances of an "
        "engine. 0: none."
    )  # fmt: skip
    kv_disk: str | None = flag(
        None, "memory", "Folder for KV that does not fit into --kv-host-memory, with --kv-disk-size. An engine of the "
        "same model finds it again after a restart.", metavar="PATH",
    )  # fmt: skip
    kv_disk_size: Bytes = flag(
        0, "memory", "Most bytes in --kv-disk, as in 1TiB, per engine, with what engines of other models have left "
        "there: their oldest pages are removed."
    )  # fmt: skip

    def __post_init__(self) -> None:
        self.check_http()
        self.check_operations()
        if self.block_size is not None and self.block_size & (self.block_size - 1):
            raise InvalidValue(f"block_size={self.block_size} must be a power of two", "block_size")
        Boundary.parse(self.preempt_boundary)
        self._check_names()
        if self.mesh is not None:
            self.roles(parse_mesh(self.mesh)[0])
        elif self.prefill is not None:
            raise InvalidValue(f"prefill={self.prefill} needs a mesh, as in --mesh 4x2 --prefill 1", "prefill")
        self._check_tiers()
        self._check_replicas()
        self._check_scaling()
        _ = self.slo, self.speculative, self.overrides, self.tiers

    def _check_tiers(self) -> None:
        if (self.programs is None) != (self.digest is None):
            raise InvalidValue(
                f"programs={self.programs!r} and digest={self.digest!r} must be given together, as `jaxserve compile` "
                "printed them", "programs" if self.programs is None else "digest",
            )  # fmt: skip
        if (self.kv_disk is None) != (self.kv_disk_size == 0):
            raise InvalidValue(
                f"kv_disk={self.kv_disk!r} and kv_disk_size={self.kv_disk_size!r} must be given together", "kv_disk"
            )
        for name in ("kv_host_memory", "kv_disk_size"):
            if getattr(self, name) and not self.enable_prefix_caching:
                raise InvalidValue(f"{name}={getattr(self, name)!r} needs enable_prefix_caching", name)

    def _check_names(self) -> None:
        """Check names and options of policies and routers before anything is loaded."""
        object.__setattr__(self, "policy", policies.resolved(self.policy))  # other processes may run in other folders
        policies.make(self.policy)
        routing.make(policies.routing(self.policy, self.routing), admission.make(self.admission))
        routing.make(self.replica_routing, what="replica_routing")
        scaling.make(self.scaling)
        self._check_processors()
        _ = self.perf_preset

    def _check_processors(self) -> None:
        names: Sequence[object] = self.logits_processors  # Python callers may give anything
        if not all(isinstance(name, str) for name in names) or len({*names}) < len(names):
            what = "a list of names of entry points, each once"
            raise InvalidValue(f"logits_processors={names!r} must be {what}", "logits_processors")
        object.__setattr__(self, "logits_processors", tuple(names))

    def _check_replicas(self) -> None:
        counts = self.prefill_replicas, self.decode_replicas
        if counts == (None, None):
            self._check_kv_transfer()
            return
        given = f"prefill_replicas={counts[0]} and decode_replicas={counts[1]}"
        if None in counts:
            name = "decode_replicas" if counts[1] is None else "prefill_replicas"
            raise InvalidValue(f"{given}: both must be at least 1, or neither be given", name)
        if self.replicas != 1:
            raise InvalidValue(f"replicas={self.replicas} must be left out with {given}", "replicas")
        if not self.enable_prefix_caching:
            raise InvalidValue(
                f"enable_prefix_caching=False must be True with {given}: KV arrives in the prefix cache",
                "enable_prefix_caching",
            )
        if self.mode == "disaggregated" or self.prefill is not None:
            name, value = ("prefill", self.prefill) if self.prefill is not None else ("mode", "disaggregated")
            raise InvalidValue(
                f"{name}={value!r} must be left out with {given}: all instances of a replica do the same", name
            )

    def _check_kv_transfer(self) -> None:
        """Check whether replicas that prefill and decode can exchange KV."""
        given = f"kv_transfer={self.kv_transfer!r}"
        if self.kv_transfer is None:
            return
        if self.most_replicas == 1:
            raise InvalidValue(f"{given} needs several engines: give --replicas, or leave it out", "kv_transfer")
        if self.ray is not None:
            raise InvalidValue(f"{given} must be left out with ray={self.ray!r}", "kv_transfer")
        if not self.enable_prefix_caching:
            raise InvalidValue(f"{given} needs enable_prefix_caching", "kv_transfer")

    def _check_scaling(self) -> None:
        if self.max_replicas is None:
            if self.min_replicas is not None:
                raise InvalidValue(f"min_replicas={self.min_replicas} needs max_replicas", "min_replicas")
            return
        if not (self.min_replicas or 1) <= self.replicas <= self.max_replicas:
            raise InvalidValue(
                f"replicas={self.replicas} at the start must be min_replicas={self.min_replicas or 1} to "
                f"max_replicas={self.max_replicas}",
                "replicas",
            )
        given = f"max_replicas={self.max_replicas}"
        if self.prefill_replicas is not None:
            raise InvalidValue(f"{given} must be left out with prefill_replicas and decode_replicas", "max_replicas")
        if self.mesh is not None and set(self.roles(parse_mesh(self.mesh)[0])) != {"mixed"}:
            raise InvalidValue(
                f"{given} needs instances that prefill and decode: mode='colocated', or a mesh of one instance (1xT)",
                "mode",
            )

    @property
    def most_replicas(self) -> int:
        """The number of engines that may run at a time."""
        return self.max_replicas or len(self.replica_roles)

    @property
    def replicas_said(self) -> str:
        """The setting that says how many engines may run at a time, for messages."""
        return f"{'max_' if self.max_replicas else ''}replicas={self.most_replicas}"

    @property
    def replica_roles(self) -> tuple[Role, ...]:
        """The role of each engine of the server at the start."""
        if self.prefill_replicas is None or self.decode_replicas is None:
            return (Role.MIXED,) * self.replicas
        return (Role.PREFILL,) * self.prefill_replicas + (Role.DECODE,) * self.decode_replicas

    @property
    def mesh_shape(self) -> tuple[int, int] | None:
        """(instances, devices per instance); None: one instance on all local accelerators, 1x1 on CPU."""
        return None if self.mesh is None else parse_mesh(self.mesh)

    def roles(self, instances: int) -> tuple[str, ...]:
        """Return the role of each instance: `prefill`, `decode` or `mixed`."""
        if self.mode == "disaggregated" and instances == 1:
            raise InvalidValue("mode='disaggregated' needs at least 2 instances, as in --mesh 2x1", "mode")
        if self.mode == "colocated" or instances == 1:
            if self.prefill is not None:
                raise InvalidValue(f"prefill={self.prefill} has no meaning when all instances are colocated", "prefill")
            return ("mixed",) * instances
        prefill = instances // 2 if self.prefill is None else self.prefill
        if not 1 <= prefill < instances:
            raise InvalidValue(f"prefill={prefill} must be 1 to {instances - 1} of {instances} instances", "prefill")
        return ("prefill",) * prefill + ("decode",) * (instances - prefill)

    @property
    def model_source(self) -> str:
        """The model as given, or the folder of the demo model."""
        if self.model is not None:
            return self.model
        from jaxserve.demo import model_path

        return str(model_path())

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the model in requests; responses use the first. A folder is named by its last part."""
        if self.served_model_name or self.model is None:
            return self.served_model_name or ("jaxserve-demo",)
        return (Path(self.model).resolve().name if Path(self.model).is_dir() else self.model,)

    @cached_property
    def speculative(self) -> Speculative | None:
        """The parsed `speculative_config`; None: no speculation."""
        given = self.speculative_config
        return None if given is None else parse_setting(given, Speculative, "speculative_config")

    @property
    def decides(self) -> str:
        """The policy, with drafting if the server speculates; slos_serve drafts by itself."""
        if self.speculative is None or self.policy.partition(":")[0] == "slos_serve":
            return self.policy
        return f"{self.policy}/draft" + ("" if self.speculative.adaptive else ":no-adaptive")

    @property
    def slo(self) -> SLO:
        """The default SLO. `auto` counts as no objective here: see `promising`."""
        thinking = self.thinking_tpot_slo
        ttft, tpot = (inf if objective == AUTO else objective for objective in (self.ttft_slo, self.tpot_slo))
        return SLO(ttft, tpot, None, () if thinking is None else ((THINKING, thinking),))

    def promising(self, slo: SLO) -> ServeConfig:
        """Return a copy with `auto` objectives replaced by those of `slo`."""
        ttft, tpot = (slo.ttft if self.ttft_slo == AUTO else self.ttft_slo), self.tpot_slo
        return replace(self, ttft_slo=ttft, tpot_slo=slo.tpot if tpot == AUTO else tpot)

    @cached_property
    def perf_preset(self) -> Latency | None:
        """The latency preset named by `perf`; None if it names a form. Raises InvalidValue for neither."""
        if self.perf in KINDS:
            return None
        path = Path(self.perf)
        if path.suffix not in (".yaml", ".yml"):
            folder = Path(__file__).parent / "presets" / "latency"
            path = folder / f"{self.perf}.yaml"
            if not path.is_file():
                known = (*KINDS, *sorted(file.stem for file in folder.glob("*.yaml")))
                raise InvalidValue(f"perf={self.perf!r} is unknown: {nearest(self.perf, known)}", "perf")
        elif not path.is_file():
            raise InvalidValue(f"perf={self.perf!r} does not exist: `jaxserve profile --out FILE` writes one", "perf")
        from jaxserve.sched.sim.latency import Latency  # imports the simulator, which --help must not wait for

        return load_yaml(path, Latency)

    def rows(self, platform: str) -> int:
        """Return `max_num_seqs`, or the platform's default."""
        return self.max_num_seqs or (64 if platform == "cpu" else 256)

    def step_tokens(self, platform: str) -> int:
        """Return `max_num_batched_tokens`, or the platform's default."""
        return self.max_num_batched_tokens or (512 if platform == "cpu" else 8192)

    @cached_property
    def tiers(self) -> Mapping[str, Tier]:
        """The values of `service_tier`. `auto`, `default` and `standard` are the server's own SLO."""
        return load_tiers(Path(self.slo_tiers) if self.slo_tiers else preset("slo", "tiers"))

    @cached_property
    def classes(self) -> Classes:
        """The request classes of metrics."""
        return Classes(self.tiers, self.slo)

    @cached_property
    def class_objectives(self) -> Mapping[str, SLO]:
        """The objectives of the request classes that have some: `default`, and each tier but best effort."""
        tiers = (tier for name, tier in self._resolved_tiers.items() if name not in PLAIN)
        return {DEFAULT: self.slo, **{tier.name: tier.slo for tier in tiers if not tier.tier.best_effort}}

    @cached_property
    def _resolved_tiers(self) -> Mapping[str, ResolvedTier]:
        slo = self.slo
        return {name: resolve(name, tier, slo) for name, tier in self.tiers.items()}

    def tier(self, name: str) -> ResolvedTier:
        """Return a tier and its SLO. Raises InvalidValue naming the known tiers."""
        resolved = self._resolved_tiers.get(name)
        if resolved is None:
            raise InvalidValue(f"service_tier={short(name)} is unknown: {nearest(name, self.tiers)}", "service_tier")
        return resolved

    @classmethod
    def load(cls, path: str | Path | None = None, **given: Any) -> ServeConfig:
        """Load settings from a YAML file, overridden by `given`; values may be strings: `ttft_slo="8s"`."""
        hints = hints_of(cls)
        for name, value in given.items():
            if name not in hints:
                raise InvalidValue(f"unknown setting {name!r}; {argument_hint(name) or nearest(name, hints)}", name)
            if isinstance(value, str):
                try:
                    given[name] = convert(value, hints[name])
                except InvalidValue as error:
                    raise InvalidValue(f"{name}={error}", name) from error
        return cls(**{**(load_fields(path, cls) if path else {}), **given})
