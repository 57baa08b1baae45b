"""Latency presets: published points hold, derived values match hand computation, missing values are named."""

from pathlib import Path

import pytest
import yaml

from jaxserve.sched.api.errors import InvalidValue
from jaxserve.sched.api.perf import Load
from jaxserve.sched.perf.derive import Derived
from jaxserve.sched.perf.model import Coefficients
from jaxserve.sched.sim.latency import Latency
from jaxserve.yamlio import load_yaml, parse_yaml

CONFIGS = Path(__file__).resolve().parents[3] / "configs" / "latency"
SHEET = Derived(
    flops=100e12, bandwidth=1e12, compute=0.5, memory=0.8, parameters=5e9, weights=8e9, attention=5e5, kv=80_000
)


def preset(name: str) -> Latency:
    return load_yaml(CONFIGS / f"{name}.yaml", Latency)


def decode(*contexts: int) -> Load:
    load = Load()
    for context in contexts:
        load = load.add_decode(context)
    return load


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_preset_says_what_is_published_and_what_is_assumed(path: Path) -> None:
    made = load_yaml(path, Latency)
    text = path.read_text()
    assert made.name == path.stem and "# PUBLISHED" in text and "# ASSUMED" in text
    truth = made.solve()
    assert 1e-3 < truth.step_time(decode(1000)) < 0.05
    assert truth.step_time(decode(*[1000] * 64)) < 0.1
    assert 2_500 < 8192 / truth.step_time(Load().add_chunk(8192, 0)) < 70_000
    assert made.kv_tokens > 4096 and made.device().pages > 0


def test_a_derived_step_matches_hand_computation() -> None:
    truth = SHEET.coefficients()
    weights, token, read = 8e9 / 0.8e12, 1e10 / 50e12, 80_000 / 0.8e12
    assert truth.step_time(decode(1000)) == pytest.approx(weights + token + 1000 * read)
    assert truth.step_time(decode(1000, 3000)) == pytest.approx(weights + 2 * token + 4000 * read)
    chunk = Load().add_chunk(100, 50)
    assert truth.step_time(chunk) == pytest.approx(weights + 100 * token + 5e5 * (100 * 50 + 5000) / 50e12)


def test_arithmetic_hidden_behind_weight_reads_costs_nothing() -> None:
    values = {name: getattr(SHEET, name) for name in Derived.__slots__}
    half = Derived(**values | {"hidden": 0.5, "row": 1e-5}).coefficients()
    assert half.decode == pytest.approx(0.5 * SHEET.coefficients().decode + 1e-5)
    assert half.prefill == SHEET.coefficients().prefill


def test_experts_are_read_if_some_token_needs_them() -> None:
    values = {name: getattr(SHEET, name) for name in Derived.__slots__} | {"experts": 4e9, "p_moe": 0.25}
    experts = Derived(**values).coefficients().step_time(decode(0, 0)) - SHEET.coefficients().step_time(decode(0, 0))
    assert experts == pytest.approx(4e9 / 0.8e12 * (1 - 0.75**2))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("compute", 1.5, "between 0 and 1"),
        ("memory", 0.0, "more than 0"),
        ("hidden", -0.1, "between 0 and 1"),
        ("flops", 0.0, "more than 0"),
        ("weights", -1.0, "0 or more"),
        ("kv", float("nan"), "0 or more"),
        ("experts", 1e9, "requires p_moe"),
    ],
)
def test_invalid_data_sheets_are_refused(name: str, value: float, message: str) -> None:
    values = {one: getattr(SHEET, one) for one in Derived.__slots__}
    with pytest.raises(InvalidValue, match=f"{name}.*{message}"):
        Derived(**values | {name: value})


PUBLISHED_MODELS = {  # presets of models with a config in configs/model
    "llama3-8b-a800": "llama3-8b",
    "opt-7b-a100-40g": "opt-6.7b",
    "qwen3-14b-h20": "qwen3-14b",
    "qwen2.5-14b-a800-tp2": "qwen2.5-14b",
    "llama3-70b-a800-tp4": "llama3-70b",
    "qwen3-30b-a3b-a800-tp2": "qwen3-30b-a3b",
    "qwen3-32b-h20-tp2": "qwen3-32b",
    "llama3.3-70b-h20-tp4": "llama3.1-70b",  # the same shapes
}


@pytest.mark.parametrize(("name", "model"), PUBLISHED_MODELS.items())
def test_a_derived_preset_has_the_sizes_of_its_model(name: str, model: str) -> None:
    config = yaml.safe_load((CONFIGS.parent / "model" / "published.yaml").read_text())["models"][model]["config"]
    made = preset(name)
    derived, hidden, layers = made.derived, config["hidden_size"], config["num_hidden_layers"]
    assert derived is not None
    heads = config["num_attention_heads"]
    size = config.get("head_dim", hidden // heads)
    groups = config.get("num_key_value_heads", heads)
    attention = hidden * size * 2 * (heads + groups)
    if "num_experts" in config:
        expert = 3 * hidden * config["moe_intermediate_size"]
        share = config["num_experts_per_tok"] / config["num_experts"]
        every, used = (count * expert for count in (config["num_experts"], config["num_experts_per_tok"]))
        attention += hidden * config["num_experts"]  # the router
        assert derived.p_moe == share and derived.experts == pytest.approx(2 * layers * every, rel=0.01)
    else:
        used = 2 * hidden * config["ffn_dim"] if "ffn_dim" in config else 3 * hidden * config["intermediate_size"]
    read = attention if derived.experts else attention + used
    assert derived.parameters == pytest.approx(layers * (attention + used), rel=0.01)
    assert derived.weights == pytest.approx(2 * (layers * read + hidden * config["vocab_size"]), rel=0.01)
    assert derived.attention == 4 * layers * heads * size
    assert derived.kv == made.kv_bytes_per_token == layers * 2 * groups * size * 2
    assert made.layers == layers
    whole = 2 * (layers * read + 2 * hidden * config["vocab_size"]) + derived.experts
    card = {"a800": 80, "h20": 96, "a100": 40}[next(one for one in ("a800", "h20", "a100") if one in name)] * 2**30
    room = made.tensor_parallel * (0.9 * card - 2e9) - whole
    assert made.kv_tokens == pytest.approx(room / derived.kv, rel=0.1)


GIVEN = "name: a\nkv_bytes_per_token: 1\nkv_tokens: 100\n"
ALL = "coefficients: {fixed: 1, prefill: 0, decode: 0, quadratic: 0, longest: 0, context: 0}\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("coefficients: {fixed: 1ms, prefill: 1us, decode: 1us, quadratic: 0, longest: 0}", "missing 'context'"),
        ("coefficients: {fixed: 1ms, prefil: 1us}", "unknown key 'prefil' in coefficients.*prefill"),
        ("derived: {flops: 312e12, bandwidth: 2e12, compute: 0.5}", "missing 'memory', 'parameters'"),
        ("points: [{kind: decode, tokens: 1000, seconds: 10ms}]", "1 points cannot determine fixed, prefill, decode"),
        ("points: [{kind: decode, tokens: 1000, seconds: 0}]", "seconds=0.0 must be positive"),
        ("", "one of points .*, coefficients and derived"),
        ("points: [{kind: decode, tokens: 9, seconds: 1}]\nderived: &d {flops: 1}", "missing 'bandwidth'"),
        (ALL + "assumed: {fixed: 1}", "without points"),
        (ALL + "points: [{kind: decode, tokens: 9, seconds: 1}]", "one of points .*, coefficients and derived"),
    ],
)
def test_a_preset_with_a_missing_coefficient_is_a_clear_error(text: str, message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        parse_yaml(GIVEN + text, Latency, "x.yaml").solve()


@pytest.mark.parametrize("context", [0.0, 40e-9])
def test_published_points_hold_under_other_assumptions(context: float) -> None:
    made = preset("minimax-m2.5-h200-tp4")
    other = made.with_coefficients({"context": context, "w_moe": 8e-3})
    truth = other.solve()
    assert (truth.context, truth.w_moe) == (context, 8e-3)
    assert truth.fixed == pytest.approx(made.solve().fixed + 3.5e-3 * made.solve().p_moe, rel=0.02)
    for point in made.points:
        seconds = sum(truth.step_time(load) for load in point.loads(made.chunk))
        assert seconds == pytest.approx(point.seconds, rel=1e-6)
    assert made.solve().context == 15e-9


def test_replacing_an_assumption_replaces_dependent_coefficients() -> None:
    made = preset("minimax-m2.5-h200-tp4").with_coefficients({"longest": 1e-8, "context": 0.0})
    truth = made.solve()
    assert (truth.longest, truth.context) == (1e-8, 0.0)
    assert truth.fixed == pytest.approx(preset("minimax-m2.5-h200-tp4").solve().fixed)
    derived = preset("qwen3-14b-h20")
    assert derived.with_coefficients({"longest": 1e-6}).solve().longest == 1e-6
    assert derived.with_coefficients({"longest": 1e-6}).solve().prefill == derived.solve().prefill
    plain = Latency("a", 1, 100, coefficients=Coefficients(1.0, 0.0, 0.0, 0.0, 0.0, 0.0))
    assert plain.with_coefficients({"fixed": 2.0}).solve().fixed == 2.0
    assert plain.with_coefficients({}) == plain


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"beta": 1.0}, "coefficient 'beta' must be one of fixed, prefill"),
        ({"context": -1.0}, "context=-1.0 must be 0 or more"),
        ({"longest": float("nan")}, "longest=nan must be 0 or more"),
        ({"w_moe": 10.0}, "fixed=.* negative"),
    ],
)
def test_invalid_coefficients_are_refused(values: dict[str, float], message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        preset("minimax-m2.5-h200-tp4").with_coefficients(values).solve()
