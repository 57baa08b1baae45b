"""Everything that can be set, as one frozen value: `ServeConfig`. Flags, a YAML file and `LLM(...)` all make one."""

from __future__ import annotations

import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from pathlib import Path
from typing import Any, Literal

from jaxserve.errors import InvalidValue, short
from jaxserve.sched import admission, policies, routing
from jaxserve.sched.api.preemption import DEPTH, Boundary
from jaxserve.sched.api.slo import ANSWER, SLO, THINKING
from jaxserve.sched.perf import KINDS
from jaxserve.sched.sim.latency import Latency
from jaxserve.settings import speculative
from jaxserve.settings.fields import Bytes, HttpSettings, flag
from jaxserve.settings.other_engines import argument_hint
from jaxserve.settings.speculative import Speculative
from jaxserve.settings.tiers import AUTO, Classes, Objective, ResolvedTier, Tier, load_tiers, resolve
from jaxserve.yamlio import convert, load_fields, load_yaml, nearest, parse_yaml

__all__ = ["ServeConfig", "load_yaml", "parse_mesh", "parse_yaml", "preset"]


# name, least, most (None: any)
RANGES: tuple[tuple[str, float, float | None], ...] = (
    ("max_model_len", 2, None),
    ("max_num_seqs", 1, None),
    ("max_num_batched_tokens", 1, None),
    ("max_num_queued_reqs", 1, None),
    ("queue_timeout", 0, None),
    ("preempt_depth", 1, None),
    ("block_size", 1, None),
    ("kv_cache_memory", 1, None),
    ("profile_time", 0.01, None),
    ("port", 0, 65535),
    ("gpu_memory_utilization", 0.01, 1),
)

CHOICES: tuple[tuple[str, tuple[str | None, ...]], ...] = (
    ("dtype", ("auto", "float32", "bfloat16")),
    ("load_format", ("auto", "safetensors", "orbax", "dummy")),
    ("mode", ("auto", "disaggregated", "colocated")),
    ("attention_backend", ("auto", "mosaic_gpu", "tpu", "xla")),
    ("experts_backend", ("auto", "mosaic_gpu", "xla")),
    ("products_backend", ("auto", "mosaic_gpu", "xla")),
    ("sampling_backend", ("auto", "mosaic_gpu", "xla")),
    ("first_token", ("prefill", "decode")),
    ("log_level", ("debug", "info", "warning", "error")),
    ("quantization", (None, "int8", "fp8", "fp8_per_block")),
    ("kv_cache_dtype", ("auto", "bfloat16", "float16", "float32", "fp8", "fp8_e4m3", "int8")),
)


def preset(kind: str, name: str) -> Path:
    """A file of `configs/`: `preset("slo", "tiers")` is configs/slo/tiers.yaml, also in an installed wheel."""
    folder = Path(__file__).parent / "presets" / kind
    path = folder / f"{name}.yaml"
    if not path.is_file():
        raise InvalidValue(f"no {kind} preset {name!r}: {nearest(name, (p.stem for p in folder.glob('*.yaml')))}", name)
    return path


def parse_mesh(text: str) -> tuple[int, int]:
    """`RxT` as (instances, devices per instance)."""
    match = re.fullmatch(r"([1-9]\d*)[xX]([1-9]\d*)", text.strip())
    if match is None:
        raise InvalidValue(
            f"mesh={text!r} must be RxT, instances by devices per instance, as in 1x1, 2x4 or 4x2", "mesh"
        )
    return int(match[1]), int(match[2])


@dataclass(frozen=True)
class ServeConfig(HttpSettings):
    """Settings of a server or of an `LLM`. Names are vLLM's where vLLM has the setting.

    Each field is a flag (`max_model_len` is `--max-model-len`) and a key of a `--config` file. Raises InvalidValue
    naming the field, its value and what is allowed, also for settings this version does not support yet.
    """

    # model
    model: str | None = flag(
        None, "model", "Hugging Face name, short name (llama3-8b), or folder with config.json, tokenizer and weights. "
        "Default: the demo model that comes with jaxserve, small enough for a laptop.", metavar="NAME|PATH",
    )  # fmt: skip
    tokenizer: str | None = flag(None, "model", "Name or folder of the tokenizer. Default: the model's.")
    revision: str | None = flag(None, "model", "Branch, tag or commit on the Hugging Face hub.")
    dtype: Literal["auto", "float32", "bfloat16"] = flag(
        "auto", "model", "Type of weights and activations. auto: float32 on CPU, bfloat16 on accelerators."
    )
    quantization: Literal["int8", "fp8", "fp8_per_block"] | None = flag(
        None, "model", "Keep the weights of matrix products in 8 bits: int8 or fp8 with a scale for each output, or "
        "fp8_per_block with one for 128 x 128. Default: as the checkpoint has them.",
    )  # fmt: skip
    load_format: Literal["auto", "safetensors", "orbax", "dummy"] = flag(
        "auto", "model", "Where weights come from: safetensors, or orbax as made by `jaxserve convert`; auto: as the "
        "folder is. dummy: random ones, for measuring speed without a download.",
    )  # fmt: skip
    max_model_len: int | None = flag(
        None, "model", "Longest prompt plus output, in tokens. Default: the model's own limit."
    )
    seed: int = flag(0, "model", "Seed of dummy weights and of requests that bring none.")
    speculative_config: str | None = flag(
        None, "model", "Draft tokens and verify several at a time, JSON as for vLLM: method (ngram or draft_model), "
        "num_speculative_tokens, model (the draft), prompt_lookup_max and _min.", metavar="JSON",
    )  # fmt: skip

    # devices
    mesh: str | None = flag(
        None, "devices", "RxT: R instances of T devices each (T-way tensor parallel). From 2 instances on, half "
        "prefill and half decode. Default: one instance on all local accelerators; 1x1 on CPU. On CPU missing "
        "devices are emulated.", metavar="RxT",
    )  # fmt: skip
    prefill: int | None = flag(
        None, "devices", "How many of the R instances prefill; the others decode. Default: half.", metavar="N"
    )
    mode: Literal["auto", "disaggregated", "colocated"] = flag(
        "auto", "devices", "colocated: every instance both prefills and decodes. disaggregated: each does one of the "
        "two. auto: disaggregated from two instances on.",
    )  # fmt: skip
    share_devices: bool = flag(False, "devices", "Let instances share a device when there are fewer than R*T.")
    attention_backend: Literal["auto", "mosaic_gpu", "tpu", "xla"] = flag(
        "auto", "devices", "Kernels that attend. auto: the first that can run, of mosaic_gpu and xla on a GPU, tpu and "
        "xla on a TPU, xla on CPU. One that is named runs or is an error.",
    )  # fmt: skip
    experts_backend: Literal["auto", "mosaic_gpu", "xla"] = flag(
        "auto", "devices", "Kernels that multiply in a mixture of experts; chosen as --attention-backend is."
    )
    products_backend: Literal["auto", "mosaic_gpu", "xla"] = flag(
        "auto", "devices", "Kernels that multiply by other weights of 8 bits; chosen as --attention-backend is."
    )
    sampling_backend: Literal["auto", "mosaic_gpu", "xla"] = flag(
        "auto", "devices", "Kernels that find what top-k, top-p and min-p keep; chosen as --attention-backend is."
    )

    # scheduling
    policy: str = flag(
        "unified", "scheduling", "Scheduling policy: unified, kairos, flowprefill, fairbatching, slos_serve, sarathi, "
        "vllm, distserve, sjf, edf ..., some with options as in kairos:literal, or one per role as in "
        "prefill=fcfs,decode=continuous.", metavar="NAME",
    )  # fmt: skip
    routing: str = flag(
        "auto", "scheduling", "Which instance takes a request: least_work (least prompt tokens left after its own "
        "prefix hits), round_robin, deflect, prefill_budget, next_replica, unified. auto: what goes with the policy.",
        metavar="NAME",
    )  # fmt: skip
    admission: str = flag(
        "none", "scheduling", "Whether to admit what cannot be on time: none (everything), pab, dp. Others become best "
        "effort, or with :refuse are answered with 429.", metavar="NAME",
    )  # fmt: skip
    perf: str = flag(
        "learned", "scheduling", "Step-time model: learned (the general form, fitted at start and corrected by every "
        "step), general, exact, table, table:ewma, linear, roofline, roofline:published, poly, or a latency preset: a "
        "file that `jaxserve profile` or `jaxserve fit` wrote, or a name in configs/latency.", metavar="NAME|FILE",
    )  # fmt: skip
    profile_time: float | None = flag(
        None, "scheduling", "Longest time to measure steps at the first start; later starts use what is kept beside "
        "the compiled programs. Default: 5s on accelerators, 10s on CPU.", metavar="TIME",
    )  # fmt: skip
    ttft_slo: Objective = flag(
        AUTO, "scheduling", "Time to first token that a request is promised unless it brings its own: 8s, 500ms. auto: "
        "4 prefills of the longest prompt, as measured at start; nothing in the Python API.", metavar="TIME|auto",
    )  # fmt: skip
    tpot_slo: Objective = flag(
        AUTO, "scheduling", "Mean time per token after the first, likewise. auto: 2 decode steps of a full batch.",
        metavar="TIME|auto",
    )  # fmt: skip
    thinking_tpot_slo: float | None = flag(
        None, "scheduling", "The same for tokens that a model thinks before its answer. Default: --tpot-slo.",
        metavar="TIME",
    )  # fmt: skip
    answer_tpot_slo: float | None = flag(
        None, "scheduling", "The same for tokens of the answer. Default: --tpot-slo.", metavar="TIME"
    )
    slo_tiers: str | None = flag(
        None, "scheduling", "YAML file of the tiers a request can pick with service_tier. Default: interactive, "
        "priority, agent, batch (configs/slo/tiers.yaml).", metavar="FILE",
    )  # fmt: skip
    max_num_seqs: int | None = flag(
        None, "scheduling", "Most requests running at a time on an instance. Default: 256 on accelerators, 64 on CPU."
    )
    max_num_batched_tokens: int | None = flag(
        None, "scheduling", "Most new tokens in a step: the chunk budget. Default: 8192 on accelerators, 512 on CPU."
    )
    max_num_queued_reqs: int | None = flag(
        None, "scheduling", "Requests that may wait for each instance that takes prompts; further ones get 503 and "
        "Retry-After. Default: 16 x --max-num-seqs.",
    )  # fmt: skip
    queue_timeout: float = flag(
        600.0, "scheduling", "How long a request may wait to be begun before it gets 503; 0: for ever, as in LLM(...).",
        metavar="TIME",
    )  # fmt: skip
    preempt_boundary: str = flag(
        "layer", "scheduling", "Where a running prefill may stop for more urgent work: op (attention and feed-forward "
        "of a layer apart), layer, layers:K, or chunk (its end).", metavar="WHERE",
    )  # fmt: skip
    preempt_depth: int = flag(
        DEPTH, "scheduling", "Pieces of a prefill that are sent to the devices before those ahead of them are done: "
        "more keep them busy, fewer let urgent work begin sooner.", metavar="N",
    )  # fmt: skip
    first_token: Literal["prefill", "decode"] = flag(
        "prefill", "scheduling", "Who sends the first token: the prefill instance at once, or the decode instance "
        "when the KV has arrived.",
    )  # fmt: skip

    # memory
    block_size: int | None = flag(
        None, "memory", "Tokens in a page of the KV cache. Default: what the attention kernel likes best."
    )
    kv_cache_dtype: Literal["auto", "bfloat16", "float16", "float32", "fp8", "fp8_e4m3", "int8"] = flag(
        "auto", "memory", "Type of the KV cache. auto: as --dtype. fp8 (e4m3) and int8 hold twice the tokens of "
        "bfloat16 in the same memory.",
    )  # fmt: skip
    gpu_memory_utilization: float = flag(
        0.9, "memory", "Share of each accelerator's memory for weights, KV cache and temporaries."
    )
    kv_cache_memory: Bytes | None = flag(
        None, "memory", "On CPU: bytes of all KV caches together, as in 2GiB. Default: 2 GiB or a quarter of free "
        "memory, whichever is smaller.", metavar="SIZE",
    )  # fmt: skip
    enable_prefix_caching: bool = flag(True, "memory", "Keep the KV of finished requests for later equal prefixes.")

    def __post_init__(self) -> None:
        self._check_ranges()
        self.check_http()
        self._check_supported()
        self._check_names()
        self._check_mesh()
        _ = self.slo, self.speculative, self.tiers

    def _check_ranges(self) -> None:
        for name, low, high in RANGES:
            value = getattr(self, name)
            if value is not None and (value < low or (high is not None and value > high)):
                allowed = f"at least {low}" if high is None else f"{low} to {high}"
                raise InvalidValue(f"{name}={value!r} must be {allowed}", name)
        if self.block_size is not None and self.block_size & (self.block_size - 1):
            raise InvalidValue(f"block_size={self.block_size} must be a power of two", "block_size")

    def _check_supported(self) -> None:
        for name, allowed in CHOICES:
            if getattr(self, name) not in allowed:
                words = ", ".join(word for word in allowed if word is not None)
                raise InvalidValue(f"{name}={getattr(self, name)!r} must be one of {words}", name)
        Boundary.parse(self.preempt_boundary)

    def _check_names(self) -> None:
        """Mistyped names and options are told before anything is loaded."""
        policies.make(self.policy)
        routing.make(policies.routing(self.policy, self.routing), admission.make(self.admission))
        _ = self.perf_preset

    def _check_mesh(self) -> None:
        if self.mesh is not None:
            self.roles(parse_mesh(self.mesh)[0])
        elif self.prefill is not None:
            raise InvalidValue(f"prefill={self.prefill} needs a mesh, as in --mesh 4x2 --prefill 1", "prefill")

    @property
    def mesh_shape(self) -> tuple[int, int] | None:
        """(instances, devices per instance), or None: one instance on all local accelerators, 1x1 on CPU."""
        return None if self.mesh is None else parse_mesh(self.mesh)

    def roles(self, instances: int) -> tuple[str, ...]:
        """Role of each instance: `prefill`, `decode` or `mixed`."""
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
        """Where the model is: as given, or the folder of the demo model."""
        if self.model is not None:
            return self.model
        from jaxserve.demo import model_path

        return str(model_path())

    @property
    def names(self) -> tuple[str, ...]:
        """What requests may call the model; the first is what answers call it: of a folder its last name only."""
        if self.served_model_name or self.model is None:
            return self.served_model_name or ("jaxserve-demo",)
        return (Path(self.model).resolve().name if Path(self.model).is_dir() else self.model,)

    @cached_property
    def speculative(self) -> Speculative | None:
        """Who drafts, and how much; None: nobody."""
        return None if self.speculative_config is None else speculative.parse(self.speculative_config)

    @property
    def decides(self) -> str:
        """The policy, made to draft where the server speculates; slos_serve does so by itself."""
        if self.speculative is None or self.policy.partition(":")[0] == "slos_serve":
            return self.policy
        return f"{self.policy}/draft" + ("" if self.speculative.adaptive else ":no-adaptive")

    @property
    def slo(self) -> SLO:
        """What a request is promised that brings no SLO of its own. `auto` is nothing: see `promising`."""
        stages = ((THINKING, self.thinking_tpot_slo), (ANSWER, self.answer_tpot_slo))
        for stage, tpot in stages:
            if tpot is not None and not tpot > 0:
                name = f"{stage}_tpot_slo"
                raise InvalidValue(f"{name}={tpot!r} must be a positive time, as in 50ms", name)
        ttft, tpot = (inf if one == AUTO else one for one in (self.ttft_slo, self.tpot_slo))
        return SLO(ttft, tpot, None, tuple((s, tpot) for s, tpot in stages if tpot is not None))

    def promising(self, slo: SLO) -> ServeConfig:
        """With the objectives of `slo` in place of those that are `auto`."""
        ttft, tpot = (slo.ttft if self.ttft_slo == AUTO else self.ttft_slo), self.tpot_slo
        return replace(self, ttft_slo=ttft, tpot_slo=slo.tpot if tpot == AUTO else tpot)

    @cached_property
    def perf_preset(self) -> Latency | None:
        """The latency preset that `perf` names; None where it names a form. Raises InvalidValue for neither."""
        if self.perf in KINDS:
            return None
        path = Path(self.perf)
        if path.suffix not in (".yaml", ".yml"):
            folder = Path(__file__).parent / "presets" / "latency"
            path = folder / f"{self.perf}.yaml"
            if not path.is_file():
                known = (*KINDS, *sorted(one.stem for one in folder.glob("*.yaml")))
                raise InvalidValue(f"perf={self.perf!r} is unknown: {nearest(self.perf, known)}", "perf")
        elif not path.is_file():
            raise InvalidValue(f"perf={self.perf!r} does not exist: `jaxserve profile --out FILE` writes one", "perf")
        return load_yaml(path, Latency)

    def rows(self, platform: str) -> int:
        """`max_num_seqs`, or the platform's default."""
        return self.max_num_seqs or (64 if platform == "cpu" else 256)

    def step_tokens(self, platform: str) -> int:
        """`max_num_batched_tokens`, or the platform's default."""
        return self.max_num_batched_tokens or (512 if platform == "cpu" else 8192)

    @cached_property
    def tiers(self) -> Mapping[str, Tier]:
        """The tiers that `service_tier` may name. `auto`, `default` and `standard` are the server's own SLO."""
        return load_tiers(Path(self.slo_tiers) if self.slo_tiers else preset("slo", "tiers"))

    @cached_property
    def classes(self) -> Classes:
        """The classes of requests that metrics tell apart."""
        return Classes(self.tiers, self.slo)

    @cached_property
    def _resolved_tiers(self) -> Mapping[str, ResolvedTier]:
        slo = self.slo
        return {name: resolve(name, tier, slo) for name, tier in self.tiers.items()}

    def tier(self, name: str) -> ResolvedTier:
        """A tier by name. Raises InvalidValue naming the tiers there are."""
        found = self._resolved_tiers.get(name)
        if found is None:
            raise InvalidValue(f"service_tier={short(name)} is unknown: {nearest(name, self.tiers)}", "service_tier")
        return found

    @classmethod
    def load(cls, path: str | Path | None = None, **given: Any) -> ServeConfig:
        """Settings from a YAML file, overridden by those given; these may be texts, as in `ttft_slo="8s"`."""
        hints = typing.get_type_hints(cls, include_extras=True)
        for name, value in given.items():
            if name not in hints:
                raise InvalidValue(f"unknown setting {name!r}; {argument_hint(name) or nearest(name, hints)}", name)
            if isinstance(value, str):
                try:
                    given[name] = convert(value, hints[name])
                except InvalidValue as error:
                    raise InvalidValue(f"{name}={error}", name) from error
        return cls(**{**(load_fields(path, cls) if path else {}), **given})
