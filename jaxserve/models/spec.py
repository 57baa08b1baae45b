"""The sizes and options of a model, read once from its Hugging Face config."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from jaxserve.models import quantization
from jaxserve.models.cache import Cache, State
from jaxserve.models.context_length import Config, context_length
from jaxserve.models.packed import methods
from jaxserve.models.quantization import Quantization
from jaxserve.models.rope import PLAIN, Rope, read_rope
from jaxserve.sched.api.errors import InvalidValue, short

SIZE = re.compile(r"(num|n)_.*|.*_(size|dim|rank|layers|embeddings)|first_k_dense_replace|sliding_window")
# Which layers have a sliding window, in configs with one: none may, all have, or `layer_types` says.
Windows = Literal["", "all", "some"]
LARGEST, MANY = 2**31 - 1, 1024  # the largest size; the most layers, and experts


@dataclass(frozen=True, slots=True)
class Experts:
    """The parameters of a mixture of experts."""

    experts: int  # X
    chosen: int  # experts per token
    ff_dim: int  # F of one expert
    layers: tuple[bool, ...]  # by layer: whether it has experts or is dense
    normalized: bool = False  # whether the weights of a token's experts are normalized to sum 1
    scoring: str = "softmax"  # or "sigmoid"
    corrected: bool = False  # whether a bias is added to the scores that select experts, but not to their weights
    biased: bool = False  # whether router and experts have biases
    scaling: float = 1.0  # factor of the weights
    groups: int = 1  # groups of experts, all of the same size
    groups_kept: int = 1  # groups that a token's experts may come from
    group_best: int = 1  # number of top scores that are summed to the score of a group
    shared: int = 0  # total width of the shared experts; 0: none
    gate_slope: float = 1.0  # slope in the gate's x * sigmoid(slope * x)
    gate_limit: float = 0.0  # clamps gate and up, and adds 1 to up; 0: neither

    def __post_init__(self) -> None:
        if self.ff_dim < 1 or not 1 <= self.chosen <= self.experts:
            raise InvalidValue(
                f"config: {self.chosen} of {self.experts} experts of {self.ff_dim=} per token: must be at least 1, "
                "and at most the number of experts (num_experts_per_tok)",
                "num_experts_per_tok",
            )
        within, rest = divmod(self.experts, self.groups) if self.groups > 0 else (0, 1)
        if (
            rest
            or not 1 <= self.groups_kept <= self.groups
            or self.chosen > within * self.groups_kept
            or self.group_best > within
        ):
            raise InvalidValue(
                f"config: {self.chosen} experts per token from {self.groups_kept} of {self.groups} groups of "
                f"{self.experts} experts: groups must have equal sizes, and those kept must hold the chosen experts "
                "(num_experts_per_tok, topk_group, n_group, n_routed_experts)",
                "n_group",
            )


@dataclass(frozen=True, slots=True)
class Latent:
    """The parameters of multi-head latent attention (MLA, arXiv 2405.04434): one latent per token for all heads."""

    rank: int  # R, of the latent
    turned: int  # Z, rotary dimensions of a key, which all heads share
    straight: int  # other dimensions of a head's key
    value: int  # dimensions of a head's value
    query_rank: int = 0  # rank of the queries' latent; 0: queries have none
    interleaved: bool = True  # whether the checkpoint rotates pairs (2 i, 2 i + 1)

    def __post_init__(self) -> None:
        if min(self.rank, self.turned, self.straight, self.value) < 1 or self.turned % 2 or self.query_rank < 0:
            raise InvalidValue(f"config: {self}: each must be at least 1, and turned (qk_rope_head_dim) even")


@dataclass(frozen=True, slots=True)
class Delta:
    """The parameters of gated DeltaNet; see `delta_net` for the letters."""

    key_heads: int  # K
    value_heads: int  # K * R
    key_dim: int  # D
    value_dim: int  # V
    kept: int  # J: the convolution reads one input more
    layers: tuple[bool, ...]  # by layer: whether it has DeltaNet instead of attention

    def __post_init__(self) -> None:
        least = min(self.key_heads, self.value_heads, self.key_dim, self.value_dim, self.kept)
        if least < 1 or self.value_heads % self.key_heads or all(self.layers):
            raise InvalidValue(
                f"config: {self}: sizes must be at least 1, linear_num_value_heads a multiple of linear_num_key_heads, "
                "and some layer must have full attention",
                "linear_num_key_heads",
            )

    @property
    def repeats(self) -> int:  # R
        return self.value_heads // self.key_heads

    @property
    def channels(self) -> int:  # W
        return 2 * self.key_dim + self.repeats * self.value_dim

    @property
    def state(self) -> State:
        """What these layers keep of a request."""
        matrices = self.repeats, self.key_dim, self.value_dim
        return State(self.layers, self.key_heads, (self.kept, self.channels), matrices)


KEYS = {  # of a config.json, by field
    "vocab": "vocab_size",
    "dim": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "ff_dim": "intermediate_size",
    "max_positions": "max_position_embeddings",
}


class Norms(NamedTuple):
    """The checkpoint's names of a layer's norms; "": there is none."""

    attention: str = "input_layernorm"  # of the input of attention
    mixed: str = ""  # of its output
    feed_forward: str = "post_attention_layernorm"  # of the input of the feed-forward
    fed: str = ""  # of its output


BEFORE = Norms()  # those of Llama


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The sizes and options of a decoder. Letters as in CONTRIBUTING."""

    architecture: str
    vocab: int  # V
    dim: int  # E
    layers: int  # L
    heads: int  # H
    kv_heads: int  # K in the checkpoint
    head_dim: int  # D
    ff_dim: int  # F
    max_positions: int
    rope: Rope = PLAIN
    norm_eps: float = 1e-6
    tied: bool = False  # whether the embedding table is also the output head
    generates: bool = True  # whether there is an output head; if not, `tied`, which gives programs one to compile
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: str = ""  # norm of queries and keys: "head" (each head), "all" (a token's heads together) or "" (none)
    activation: str = "silu"  # of the feed-forward
    norms: Norms = BEFORE
    norm_offset: float = 0.0  # added to the weights of norms
    window: int = 0  # keys that a query of a sliding layer sees, including its own
    sliding: tuple[bool, ...] = ()  # by layer: whether it has a sliding window; (): no layer
    local_rope: Rope | None = None  # RoPE of sliding layers; None: as in the others
    unrotated: tuple[bool, ...] = ()  # by layer: whether it has no RoPE; (): all have it
    query_scale: float = 0.0  # factor of attention scores; 0: 1 / sqrt(D)
    softcap: float = 0.0  # soft cap of attention scores; 0: none
    logit_softcap: float = 0.0
    logit_divisor: float = 1.0
    embed_scale: float = 1.0
    residual_scale: float = 1.0  # factor of what attention and feed-forward add to the stream
    moe: Experts | None = None
    latent: Latent | None = None  # MLA; kv_heads is then 1, and head_dim that of queries
    delta: Delta | None = None  # linear attention in some layers
    sinks: bool = False  # attention sinks: one learned score per head in the softmax
    guessing: int = 0  # multi-token prediction layers of the checkpoint, which are not loaded
    eos: tuple[int, ...] = ()
    dtype: str = "float32"  # of the checkpoint
    kv_copies: int = 1  # shards that hold a copy of each kv head
    kv_row: int = 1  # kv heads side by side in a row of the pools
    kv_width: int = 0  # padded width of such a row; 0: not padded
    quantized: Quantization | None = None  # 8-bit weights
    kv_heads_first: bool = False  # pages are [heads, tokens] instead of [tokens, heads]
    transposed: bool = False  # weights are [out, in], which is faster on CPUs: see `models/transposed.py`
    whole: bool = False  # transposed and on one device: 8-bit weights are transposed too, and widened by blocks
    kv_scales: bool = False  # 8-bit pools: the weights include the divisors of keys and values
    vocab_padding: int = 0  # unused rows at the end of tables, so that the shards divide them evenly

    def __post_init__(self) -> None:
        for name, key in KEYS.items():
            if getattr(self, name) < 1:
                raise InvalidValue(f"config: {key}={getattr(self, name)} must be at least 1", key)
        scales = (
            self.norm_eps, self.norm_offset, self.query_scale, self.softcap, self.logit_softcap, self.embed_scale,
            self.residual_scale, 1 / (self.logit_divisor or math.nan),
        )  # fmt: skip
        ropes = [one for one in (self.rope, self.local_rope) if one is not None]
        turns = (value for one in ropes for value in (one.theta, one.factor, one.low, one.high, one.scale))
        for value in (*scales, *turns, *(1 / (value or math.nan) for value in self.rope.divisors + self.rope.short)):
            if not math.isfinite(value):
                raise InvalidValue(f"config: a factor of the model is {value}: it must be finite", "model")
        if self.heads % self.kv_heads:
            raise InvalidValue(
                f"config: num_attention_heads={self.heads} must be a multiple of num_key_value_heads={self.kv_heads}"
            )
        if self.sliding and (len(self.sliding) != self.layers or self.window < 1):
            raise InvalidValue(f"config: sliding_window={self.window} must be at least 1, for {self.layers=} layers")
        if self.unrotated and len(self.unrotated) != self.layers:
            raise InvalidValue(
                f"config: no_rope_layers has {len(self.unrotated)} layers, num_hidden_layers={self.layers}",
                "no_rope_layers",
            )
        pairs = int(self.head_dim * self.rope.share) // 2
        if self.rope.kind == "longrope" and not len(self.rope.divisors) == len(self.rope.short) == pairs:
            raise InvalidValue(f"config: long_factor and short_factor must have {pairs} numbers each", "rope_scaling")
        if self.head_dim % 2 and self.latent is None:
            raise InvalidValue(f"config: head_dim={self.head_dim} must be even: rotary embedding rotates pairs")

    @property
    def pool_heads(self) -> int:
        """The number of kv heads in a page, including copies."""
        return self.kv_heads * self.kv_copies

    @property
    def cache(self) -> Cache:
        """The layout of the KV cache."""
        if self.latent is not None:
            return Cache(self.layers, 1, self.pool_heads, self.latent.rank + self.latent.turned)
        return Cache(
            self.layers if self.delta is None else self.delta.layers.count(False),
            2,
            self.pool_heads // self.kv_row,
            self.kv_width or self.kv_row * self.head_dim,
            self.kv_heads_first,
            None if self.delta is None else self.delta.state,
        )

    @property
    def scale(self) -> float:
        """The factor of attention scores."""
        return self.query_scale or self.head_dim**-0.5

    @property
    def unit_norm(self) -> float:
        """The weight with which a norm does not scale: dummy weights have it."""
        return 1.0 - self.norm_offset

    def window_of(self, layer: int) -> int | None:
        """Return the number of keys that a query of a layer sees, including its own; None: all before it."""
        return self.window if self.sliding and self.sliding[layer] else None

    def rope_of(self, layer: int) -> int:
        """Return the index of a layer's RoPE in `Decoder.turns`; -1: it has none."""
        if self.unrotated and self.unrotated[layer]:
            return -1
        return int(self.local_rope is not None and self.window_of(layer) is not None)

    @property
    def kinds(self) -> tuple[int, ...]:
        """For each layer, the first layer that is computed the same way."""
        kinds = [
            (
                self.window_of(i),
                self.rope_of(i),
                self.moe is not None and self.moe.layers[i],
                self.delta is not None and self.delta.layers[i],
            )
            for i in range(self.layers)
        ]
        return tuple(map(kinds.index, kinds))

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The distinct windows of the layers."""
        return tuple(dict.fromkeys(self.window_of(layer) for layer in range(self.layers)))

    @property
    def group(self) -> int:
        """The number of query heads per kv head of the pool."""
        return self.heads // self.pool_heads

    def quantized_as(self, name: str | None) -> ModelSpec:
        """Return the spec with the quantization that `--quantization` selects; None: the checkpoint's."""
        return replace(self, quantized=quantization.chosen(self.quantized, name))

    def for_length(self, length: int) -> ModelSpec:
        """Return the spec for contexts of up to `length` tokens, on which the frequencies of longrope depend.

        transformers chooses for each text. To choose anew in a text would rotate its whole cache again, and tokens
        would depend on the schedule.
        """
        if self.rope.kind != "longrope" or length > self.rope.original:
            return self
        return replace(self, rope=replace(self.rope, divisors=self.rope.short))

    def headless(self) -> ModelSpec:
        """Return the spec of a checkpoint without an output head, which gives vectors only."""
        return replace(self, tied=True, generates=False)

    def first_layers(self, layers: int) -> ModelSpec:
        """Return the spec of a model that consists of the first `layers` layers."""
        moe = None if self.moe is None else replace(self.moe, layers=self.moe.layers[:layers])
        delta = None if self.delta is None else replace(self.delta, layers=self.delta.layers[:layers])
        sliding, unrotated = self.sliding[:layers], self.unrotated[:layers]
        return replace(self, layers=layers, sliding=sliding, unrotated=unrotated, moe=moe, delta=delta)

    def for_tp(self, tp: int) -> ModelSpec:
        """Return the spec for `tp` shards, with kv heads copied and the vocabulary padded as needed.

        Raises InvalidValue if `tp` does not fit the model.
        """
        copies = max(1, tp // self.kv_heads)
        if self.moe is not None and tp >= 1 and self.moe.experts % tp:
            raise InvalidValue(
                f"tensor parallel size {tp} does not fit {self.architecture}: it must divide its "
                f"{self.moe.experts} experts",
                "mesh",
            )
        if tp < 1 or any(size % tp for size in (self.heads, self.ff_dim, self.kv_heads * copies)):
            raise InvalidValue(
                f"tensor parallel size {tp} does not fit {self.architecture}: it must divide heads={self.heads} and "
                f"ff_dim={self.ff_dim}, and divide or be a multiple of kv_heads={self.kv_heads}",
                "mesh",
            )
        if self.delta is not None and self.delta.key_heads % tp:
            raise InvalidValue(
                f"tensor parallel size {tp} does not fit {self.architecture}: it must divide its "
                f"{self.delta.key_heads} heads of linear attention",
                "mesh",
            )
        return replace(self, kv_copies=copies, vocab_padding=-self.vocab % tp)


def need(config: Config, key: str) -> Any:
    """Return `config[key]`. Raises InvalidValue if it is missing."""
    if config.get(key) is None:
        raise InvalidValue(f"config.json has no {key!r}, which {architecture(config)} needs", key)
    return config[key]


def architecture(config: Config) -> str:
    """Return the first of `architectures`. Raises InvalidValue if there is none."""
    names = config.get("architectures") or ()
    if not names:
        raise InvalidValue("config.json has no 'architectures', so the model's family is unknown", "architectures")
    return str(names[0])


def check_sizes(config: Config) -> None:
    """Raise InvalidValue if a size in a config is one that no model has, before anything is made of that size."""
    for name, value in config.items():
        if isinstance(value, int | float) and SIZE.fullmatch(name):
            most = MANY if name.endswith(("layers", "experts")) else LARGEST
            if not value <= most:
                raise InvalidValue(f"config.json: {name}={short(value)} must be at most {most}", name)


def ids_of(given: Any) -> tuple[int, ...]:
    """Return the token ids that a config gives, as a number or a list. Raises InvalidValue."""
    ids = given if isinstance(given, list | tuple) else () if given is None else (given,)
    if wrong := [id for id in ids if type(id) is not int]:
        raise InvalidValue(f"eos_token_id={short(wrong[0])} must be a token id", "eos_token_id")
    return tuple(ids)


def common(
    config: Config, *, activations: tuple[str, ...] = ("silu",), windows: Windows = "", partials: bool = False
) -> dict[str, Any]:
    """Return the `ModelSpec` fields that most families read alike; a family adds or overrides fields.

    activations: allowed activations of the feed-forward, the default first. windows: which layers have a
    sliding window, if the config has one. partials: whether RoPE may rotate a part of a head only.
    """
    heads, dim = int(need(config, "num_attention_heads")), int(need(config, "hidden_size"))
    rope, max_positions = read_rope(config, partials=partials)
    return {
        "architecture": architecture(config),
        "vocab": int(need(config, "vocab_size")),
        "dim": dim,
        "layers": int(need(config, "num_hidden_layers")),
        "heads": heads,
        "kv_heads": int(config.get("num_key_value_heads") or heads),
        "head_dim": int(config.get("head_dim") or dim // heads),
        "ff_dim": int(need(config, "intermediate_size")),
        "max_positions": max_positions,
        "rope": rope,
        "activation": _activation(config, activations),
        **_windows(config, windows),
        "norm_eps": float(config.get("rms_norm_eps", 1e-6)),
        "tied": bool(config.get("tie_word_embeddings", False)),
        "eos": ids_of(config.get("eos_token_id")),
        "quantized": methods.read(config),
        "dtype": str(config.get("dtype") or config.get("torch_dtype") or "float32"),
    }


def _activation(config: Config, allowed: tuple[str, ...]) -> str:
    key = next((key for key in ("hidden_activation", "activation_function") if config.get(key)), "hidden_act")
    act = str(config.get(key) or allowed[0])
    act = "silu" if act == "swish" else act
    if act not in allowed:
        names = ", ".join(map(repr, allowed))
        raise InvalidValue(f"config.json: {key}={act!r} is not supported; supported is {names}", key)
    return act


def _windows(config: Config, layers: Windows) -> dict[str, Any]:
    """Return the sliding layers: by `layer_types`, or those from `max_window_layers` on, or all."""
    window, count = config.get("sliding_window"), int(need(config, "num_hidden_layers"))
    kinds = [str(kind) for kind in config.get("layer_types") or ()]
    on = bool(config.get("use_sliding_window", True)) and window is not None
    every = "sliding_attention" if on else "full_attention"  # what the family's layers are if they are all alike
    known = {"full_attention", "sliding_attention"} if layers == "some" else {every}
    other = sorted(set(kinds) - known)
    if other or (on and not layers):
        raise InvalidValue(
            f"config.json: sliding_window={window!r}, layer_types={other}: not supported for {architecture(config)}; "
            f"supported is {' or '.join(sorted(known)) if layers else 'full attention'} in every layer",
            "sliding_window",
        )
    if not kinds and on:
        first = int(config.get("max_window_layers") or 0) if layers == "some" and "use_sliding_window" in config else 0
        kinds = ["full_attention"] * min(first, count) + ["sliding_attention"] * max(count - first, 0)
    sliding = tuple(kind == "sliding_attention" for kind in kinds)
    wide = window is not None and int(window) >= context_length(config)  # as Phi-4-mini's: no text leaves it
    return {"window": int(window or 0), "sliding": sliding} if any(sliding) and not wide else {}
