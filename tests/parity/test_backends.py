"""Tokens with the kernels of an accelerator, interpreted on a CPU, equal those with XLA.

Equal up to close calls, as in the law. Every run has steps with prompt chunks and running decodes.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest

from jaxserve.models import registry
from jaxserve.models.spec import ModelSpec
from jaxserve.sched.api.params import SamplingParams
from jaxserve.sched.api.plan import StepPlan
from jaxserve.sched.api.request import Request
from jaxserve.sched.instance import prefix_groups
from pallas_kernels.mosaic import compat
from tests.support.parity.law import LENGTH, PAGE, ROWS, SPEC, Ask, Model, Setup, compare

pytestmark = pytest.mark.timeout(1800)  # interpreted kernels take minutes, many on a busy machine
PAGES, TOKENS = 40, 4
# Heads as wide as the kernels need. Weights of the law's model, so that scores are spread.
WIDE = registry.spec_from_config(
    {
        "architectures": ["Qwen3ForCausalLM"], "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 96, "vocab_size": 256,
        "max_position_embeddings": LENGTH, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False,
        "hidden_act": "silu", "eos_token_id": 7,
    }
)  # fmt: skip
# Tensor cores take no float32; in float16 a score of 30 is exact to 0.02, and attention is rounded before it.
MODELS = {"tpu": Model(WIDE), "mosaic_gpu": Model(WIDE, "float16", 0.1)}
needs_interpreter = pytest.mark.skipif(
    not compat.DETECTS_RACES, reason="mosaic_gpu: this needs the interpreter of jax 0.11"
)


def asks() -> list[Ask]:
    """Return a short and a long prompt, greedy and sampled: the long one is chunked while the short one decodes."""
    draw = random.Random(5)
    made = []
    for length, temperature in ((3, 0.0), (75, 1.0)):
        prompt = tuple(draw.randrange(8, SPEC.vocab) for _ in range(length))
        made.append(
            Ask(prompt, SamplingParams(max_tokens=TOKENS, temperature=temperature, seed=length, ignore_eos=True))
        )
    return made


@dataclass
class Seen:
    """A recorder of the kinds of steps."""

    mixed: int = 0
    decode: int = 0

    def __call__(self, plan: StepPlan) -> None:
        lengths = [span.length for span in plan.spans]
        self.mixed += max(lengths) > 16 and min(lengths) == 1
        self.decode += max(lengths) == 1


@cache
def reference(model: Model) -> tuple[Request, ...]:
    """Serve each request alone with XLA."""
    return Setup("1x1", 32, PAGES, model=model).each(asks())


SINKS = registry.spec_from_config(
    {
        "architectures": ["GptOssForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 32, "vocab_size": 256, "sliding_window": 20,
        "max_position_embeddings": LENGTH, "num_local_experts": 4, "num_experts_per_tok": 2, "eos_token_id": 7,
    }
)  # fmt: skip
# As wide as the Hopper MLA kernel needs.
LATENT = registry.spec_from_config(
    {
        "architectures": ["DeepseekV2ForCausalLM"], "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 4, "intermediate_size": 96, "moe_intermediate_size": 32, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1, "q_lora_rank": None,
        "kv_lora_rank": 128, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32, "vocab_size": 256,
        "max_position_embeddings": LENGTH, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False,
        "hidden_act": "silu", "eos_token_id": 7, "topk_method": "greedy", "norm_topk_prob": False,
    }
)  # fmt: skip
EXPERTS = registry.spec_from_config(
    {
        "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96, "vocab_size": 256, "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True, "eos_token_id": 7,
        "max_position_embeddings": LENGTH, "tie_word_embeddings": False,
    }
)  # fmt: skip
# As wide as Hopper's quantized matmul needs, with two scales along the contracted axis.
NARROW = replace(WIDE, dim=256, ff_dim=256).quantized_as("fp8_per_block")
# As wide as the gated product needs on two devices.
GATED = replace(WIDE, ff_dim=128)
# As wide as the grouped matmul needs 8-bit weights, with two scales along the first contracted axis.
NARROW_EXPERTS = replace(EXPERTS, dim=256, moe=replace(EXPERTS.moe, ff_dim=64))


def case(
    name: str, mesh: str = "1x1", *, backend: str = "mosaic_gpu", spec: ModelSpec = WIDE, kv: str = "auto",
    what: str = "attention", bare: bool = False, **options: str,
) -> Any:  # fmt: skip
    """Return parameters: `what` is the operation that the backend must perform, `options` the other settings."""
    model = replace(MODELS[backend], spec=spec, kv=kv)
    if kv != "auto":
        model = replace(model, close=max(model.close, 0.05))
    marks = [needs_interpreter] * (backend == "mosaic_gpu") + [pytest.mark.full] * (not bare)
    return pytest.param(backend, mesh, model, what, options, id=f"{backend}-{mesh}-{name}", marks=marks)


CASES = [
    case("plain", backend="tpu"),
    case("plain", "1x2", backend="tpu", bare=True),
    case("plain", bare=True),
    case("plain", "1x2"),
    *(case(kv, backend="tpu", kv=kv) for kv in ("int8", "fp8")),
    case("int8", kv="int8", bare=True),
    case("fp8", kv="fp8"),
    *(case("sinks and windows", mesh, backend=one, spec=SINKS) for one in MODELS for mesh in ("1x1", "1x2")),
    case("latent", spec=LATENT, bare=True),
    case("latent", "1x2", spec=LATENT),
    *(case(f"latent of {kv}", spec=LATENT, kv=kv) for kv in ("int8", "fp8")),
    case("8-bit weights", spec=NARROW, products_backend="mosaic_gpu"),
    *(case("gated products", mesh, spec=GATED, what="mlp") for mesh in ("1x1", "1x2")),
    case("experts", spec=EXPERTS, what="experts", bare=True),
    case("experts", "1x2", spec=EXPERTS, what="experts"),
    *(
        case(f"experts of {name}", mesh, spec=NARROW_EXPERTS.quantized_as(name), what="experts")
        for name, mesh in (("int8", "1x1"), ("fp8", "1x1"), ("fp8_per_block", "1x1"), ("int8", "1x2"))
    ),
]


@pytest.fixture
def several(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow a kernel on several devices in the Hopper interpreter.

    It runs them side by side, but the first device to finish asserts that no device still has a
    barrier, where jax means its own.
    """
    if not compat.DETECTS_RACES:
        return
    from jax._src.pallas.mosaic_gpu.interpret.shared_memory import GPUSharedMemory

    monkeypatch.setattr(GPUSharedMemory, "assert_no_barriers_allocated", lambda self: None)


@pytest.mark.parametrize(("backend", "mesh", "model", "what", "options"), CASES)
def test_tokens_equal_those_of_xla(
    backend: str, mesh: str, model: Model, what: str, options: dict[str, Any], several: None
) -> None:
    seen = Seen()
    setup = Setup(mesh, 32, PAGES, model=model, interpret=True, **{f"{what}_backend": backend}, **options)
    assert getattr(setup.executors[0].state.programs, what) == f"{backend} (interpreted)"
    requests = asks()
    served, _ = setup.run(requests, "sarathi", seen)
    assert seen.mixed and seen.decode, f"some kind of step is missing: {seen}"
    stopped = compare(requests, served, reference(model), model)
    assert stopped <= (0 if model.dtype == "float32" else 1), "there were too many close calls"
    assert all(len(request.output) == TOKENS for request in served)


@pytest.mark.full
@needs_interpreter
def test_tokens_equal_those_of_xla_where_a_prefix_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check requests of which all but one begin with the same two pages; one is admitted per step."""
    monkeypatch.setattr(prefix_groups, "LEAST_TOKENS", 2 * PAGE)
    model, draw, plans = MODELS["mosaic_gpu"], random.Random(6), list[StepPlan]()
    shared, other = (tuple(draw.randrange(8, SPEC.vocab) for _ in range(2 * PAGE)) for _ in range(2))
    requests = [
        Ask((*(other if n == 3 else shared), 8 + n), SamplingParams(max_tokens=8, seed=n, ignore_eos=True))
        for n in range(ROWS)
    ]
    options: Any = {"attention_backend": "mosaic_gpu", "cascade_attention": "on"}
    setup = Setup("1x1", 32, PAGES, model=model, interpret=True, **options)
    served, _ = setup.run(requests, "sarathi", plans.append)
    assert any(len(group.spans) > 3 for plan in plans for group in plan.shared)
    alone = Setup("1x1", 32, PAGES, model=model)
    assert compare(requests, served, alone.each(requests), model) <= 1


def test_an_unavailable_backend_is_refused_at_startup() -> None:
    from jaxserve.errors import InvalidValue

    with pytest.raises(InvalidValue, match=r"'tpu' cannot run here: .*; allowed: auto, xla") as caught:
        Setup("1x1", 32, PAGES, model=replace(MODELS["tpu"]), attention_backend="tpu")
    assert caught.value.param == "attention_backend"
