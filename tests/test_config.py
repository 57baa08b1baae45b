"""Settings from keywords, files and flags: strict, with errors that name the value and what is allowed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal

import pytest

from jaxserve.config import ServeConfig, load_yaml, parse_mesh, parse_yaml, preset
from jaxserve.errors import InvalidValue
from jaxserve.sched.api.slo import NO_SLO, SLO
from jaxserve.yamlio import Bytes, Range, Seconds, check_fields, choices, hints_of, parts, seconds, size


@dataclass(frozen=True)
class Part:
    name: str
    share: float = 1.0


@dataclass(frozen=True)
class Whole:
    title: str
    slo: SLO = SLO()  # noqa: RUF009
    parts: tuple[Part, ...] = ()
    pause: Seconds | None = None
    room: Bytes | None = None
    kind: Literal["a", "b"] = "a"
    tiers: Mapping[str, SLO] | None = None
    either: float | Part = 0.0
    on: bool = False


def test_yaml_becomes_a_dataclass():
    made = parse_yaml(
        """
        title: x
        slo: {ttft: 2s, tpot: 30ms}
        parts: [{name: p, share: 1e-3}, {name: q}]
        pause: 250us
        room: 1.5k
        tiers: {fast: {ttft: .5}, none: {}}
        either: {name: r}
        on: true
        """,
        Whole,
    )
    assert made == Whole(
        "x",
        SLO(2.0, 0.03),
        (Part("p", 0.001), Part("q")),
        0.00025,
        1500,
        tiers={"fast": SLO(0.5), "none": SLO()},
        either=Part("r"),
        on=True,
    )
    assert parse_yaml("{}", ServeConfig) == ServeConfig() == parse_yaml("", ServeConfig)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("title: x\ntitel: y", "f.yaml:2: unknown key 'titel'; did you mean 'title'"),
        ("title: x\nparts:\n- nam: p", r"f.yaml:3: unknown key 'nam' in parts\[0\]; did you mean 'name'"),
        ("title: x\ntitle: y", "f.yaml:2: key 'title' is given twice"),
        ("kind: a", "missing 'title'"),
        ("title: 3", "title: 3 must be a string"),
        ("title: x\nkind: c", "kind: 'c' must be one of 'a', 'b'"),
        ("title: x\non: 1", "on: 1 must be true or false"),
        ("title: x\nparts: p", "parts must be a list"),
        ("title: x\npause: soon", "f.yaml:2: pause: 'soon' must be a number of seconds"),
        ("title: x\npause: true", "f.yaml:2: pause: True must be a number, or a string with a unit"),
        ("title: x\nroom: [1]", r"f.yaml:2: room: \[1\] must be a number, or"),
        ("title: x\neither: [1]", "either: fits none of float, Part"),
        ("title: x\nslo: {ttft: -1}", "f.yaml:2: SLO ttft=-1.0 must be a positive"),
        ("title: x\ntiers: [a]", "must be a mapping"),
        ("title: x\ntiers: {3: {}}", "f.yaml:2: tiers: 3 must be a string"),
        ("title: x\ntiers:\n  a: {}\n  a: {}", "f.yaml:4: key 'a' is given twice"),
        ("title: x\nno-title: y\non: true", r"f.yaml:2: unknown key 'no-title'"),
        ("[1]", "the file must be a mapping"),
        ("title: [", "f.yaml is not valid YAML"),
    ],
)
def test_errors_in_a_file_name_their_line(text, said):
    with pytest.raises(InvalidValue, match=said):
        parse_yaml(text, Whole, "f.yaml")


@dataclass(frozen=True)
class Bounded:
    share: Annotated[float, Range(0, 1)] = 1.0
    count: Annotated[int, Range(2)] | None = None
    kind: Literal["a", "b"] = "a"
    other: Literal["c"] | None = None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, None),
        ({"share": 0, "count": 2, "kind": "b", "other": "c"}, None),
        ({"share": 1.5}, "^share=1.5 must be 0 to 1$"),
        ({"share": float("nan")}, "^share=nan must be 0 to 1$"),
        ({"count": 1}, "^count=1 must be at least 2$"),
        ({"kind": "c"}, "^kind='c' must be one of a, b$"),
        ({"kind": None}, "^kind=None must be one of a, b$"),
        ({"other": "a"}, "^other='a' must be one of c$"),
    ],
)
def test_choices_and_ranges_are_those_of_the_types(given, said):
    if said is None:
        check_fields(Bounded(**given))
        return
    for param in (None, "whole"):
        with pytest.raises(InvalidValue, match=said) as caught:
            check_fields(Bounded(**given), param)
        assert caught.value.param == (param or next(iter(given)))


def beside(hint):
    """Return values beside the choices and bounds of a type."""
    bounds = [mark for mark in parts(hint)[1] if isinstance(mark, Range)]
    ends = [end for one in bounds for end in (one.least - 1, one.most and one.most + 1) if end is not None]
    return ["nothing", *ends] if choices(hint) else ends


BESIDE = [(name, value) for name, hint in hints_of(ServeConfig).items() for value in beside(hint)]


def test_choices_and_bounds_are_found():
    assert {
        *("dtype", "kv_cache_dtype", "load_format", "kv_transfer", "port", "max_model_len", "kv_disk_size"),
        *("thinking_tpot_slo", "gpu_memory_utilization", "max_num_queued_reqs"),
    } <= {*dict(BESIDE)}


@pytest.mark.parametrize(("name", "value"), BESIDE)
def test_values_beside_choices_and_bounds_are_refused(name, value):
    with pytest.raises(InvalidValue, match=f"^{name}=.* must be") as caught:
        ServeConfig(**{name: value})
    assert caught.value.param == name


def test_units_are_parsed():
    given = ("8s", "50ms", "1.5", "2m", "1e-3", "inf", 3)
    assert [seconds(text) for text in given] == [8, 0.05, 1.5, 120, 0.001, float("inf"), 3]
    assert [size(t) for t in ("2GiB", "1.5G", "64k", "10", 7)] == [2 << 30, 1_500_000_000, 64_000, 10, 7]
    for wrong in ("8 parsecs", "s", "-", ""):
        with pytest.raises(InvalidValue, match="unit as in"):
            seconds(wrong)
        with pytest.raises(InvalidValue, match="unit as in"):
            size(wrong)


def test_mesh_and_roles():
    assert parse_mesh("4x2") == (4, 2) and ServeConfig().mesh_shape is None
    for wrong in ("4", "0x1", "4x", "x", "4x2x1", "-1x1"):
        with pytest.raises(InvalidValue, match="must be RxT"):
            parse_mesh(wrong)
    assert ServeConfig(mesh="4x2").roles(4) == ("prefill", "prefill", "decode", "decode")
    assert ServeConfig(mesh="5x1", prefill=1).roles(5) == ("prefill", *["decode"] * 4)
    assert ServeConfig(mesh="4x2", mode="colocated").roles(4) == ("mixed",) * 4
    assert ServeConfig(mesh="1x4").roles(1) == ("mixed",)


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"speculative_config": "{}"}, "speculative_config"),
        ({"admission": "slo"}, "admission"),
        ({"preempt_boundary": "half"}, "preempt_boundary"),
        ({"preempt_boundary": "layers:0"}, "preempt_boundary"),
        ({"routing": "deflect:never"}, "routing"),
        ({"replica_routing": "deflect:never"}, "replica_routing"),
        ({"replica_routing": "auto"}, "replica_routing"),
        ({"mesh": "2x1", "prefill": 2}, "prefill"),
        ({"mesh": "1x1", "prefill": 1}, "prefill"),
        ({"prefill": 1}, "prefill"),
        ({"mesh": "1x2", "mode": "disaggregated"}, "mode"),
        ({"block_size": 24}, "block_size"),
        ({"ttft_slo": "never"}, None),
        ({"ttft_slo": 0}, "ttft"),
        ({"thinking_tpot_slo": "-5ms"}, "thinking_tpot_slo"),
        ({"thinking_tpot_slo": "soon"}, "thinking_tpot_slo"),
        ({"max_num_seqs": "many"}, None),
    ],
)
def test_invalid_values_are_refused(given, param):
    with pytest.raises(InvalidValue) as caught:
        ServeConfig.load(**given)
    assert str(next(iter(given.values()))) in str(caught.value) or param in str(caught.value)
    assert param is None or caught.value.param == param


def test_flags_override_the_file(tmp_path):
    path = tmp_path / "serve.yaml"
    path.write_text("ttft-slo: 500ms\nmax_num_seqs: 4\nport: 9\n")
    made = ServeConfig.load(path, port=10, tpot_slo="20ms")
    assert (made.slo, made.max_num_seqs, made.port) == (SLO(0.5, 0.02), 4, 10)


def test_tiers(tmp_path):
    config = ServeConfig(ttft_slo=3.0, tpot_slo=0.05)
    assert config.tier("standard")[1] == config.tier("auto")[1] == SLO(3.0)
    assert config.tier("interactive")[1].ttft == 1.0
    assert config.tier("flex")[1] == config.tier("best_effort")[1] == NO_SLO
    with pytest.raises(InvalidValue, match="service_tier='gold'"):
        config.tier("gold")
    own = tmp_path / "tiers.yaml"
    own.write_text("tiers: {gold: {ttft: 100ms, priority: -7, weight: 4}}")
    tier, slo, _ = ServeConfig(slo_tiers=str(own), tpot_slo=0.05).tier("gold")
    assert (tier.priority, slo) == (-7, SLO(0.1, weight=4.0))


def test_stages_in_flags_and_tiers(tmp_path):
    plain = ServeConfig.load(tpot_slo="50ms", thinking_tpot_slo="20ms")
    assert dict(plain.slo.stages) == {"thinking": 0.02} and plain.slo.tpot == 0.05
    assert plain.tier("standard")[1] == plain.slo
    assert plain.tier("interactive")[1].stages == (), "its own TPOT applies to every stage"
    path = tmp_path / "tiers.yaml"
    path.write_text(
        "tiers:\n"
        "  quick: {ttft: 1s, stages: {thinking: {tpot: 10ms}}}\n"
        "  agent: {tpot: 30ms, tbt: 90ms, stages: {answer: {tpot: 40ms}}}\n"
    )
    config = ServeConfig.load(slo_tiers=str(path), ttft_slo="8s", thinking_tpot_slo="20ms")
    assert dict(config.tier("quick")[1].stages) == {"thinking": 0.01}
    assert config.tier("agent")[1] == SLO(8.0, 0.03, 0.09, (("answer", 0.04),))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("quick: {stages: {dreaming: {tpot: 1s}}}", "tiers.yaml:2: unknown key 'dreaming' in .*allowed: answer, think"),
        ("quick: {stages: {thinking: {ttft: 1s}}}", "tiers.yaml:2: unknown key 'ttft' in .*; allowed: tpot"),
        ("quick: {stages: {thinking: {}}}", "tiers.yaml:2: missing 'tpot'"),
        ("quick: {stages: {thinking: {tpot: 0}}}", "tiers.yaml:2: tpot=0.0 must be a positive time"),
        ("quick: {stages: {thinking: 20ms}}", "tiers.yaml:2: tiers.quick.stages.thinking must be a mapping"),
        ("quick: {weight: 2000}", "tiers.yaml:2: weight=2000.0 must be .*1000"),
        ("quick: {ttft: -1s}", "tiers.yaml:2: ttft=-1.0 must be a positive time"),
        ("quick: {tbt: 0}", "tiers.yaml:2: tbt=0.0 must be a positive time"),
        ("night: {best_effort: true, tpot: 1s}", "tiers.yaml:2: a tier with best_effort: true has no objectives"),
    ],
)
def test_invalid_tiers_are_refused_at_startup(tmp_path, text, said):
    path = tmp_path / "tiers.yaml"
    path.write_text(f"tiers:\n  {text}\n")
    with pytest.raises(InvalidValue, match=said):
        ServeConfig(slo_tiers=str(path))


def test_a_missing_tiers_file_is_refused_at_startup(tmp_path):
    with pytest.raises(InvalidValue, match=r"slo_tiers='.*none.yaml' does not exist") as caught:
        ServeConfig(slo_tiers=str(tmp_path / "none.yaml"))
    assert caught.value.param == "slo_tiers"


def test_classes_come_from_the_configuration(tmp_path):
    path = tmp_path / "tiers.yaml"
    path.write_text("tiers: {gold: {ttft: 1s}, night: {best_effort: true}}")
    config = ServeConfig(slo_tiers=str(path))
    classes = config.classes
    assert classes.names == ("custom", "default", "gold", "best_effort")
    assert classes.of("standard", config.slo) == "default" and classes.of("standard", SLO(1.0)) == "custom"
    assert classes.of("gold", SLO(0.001)) == "gold" and classes.of("best_effort", NO_SLO) == "best_effort"
    assert {classes.of(f"tier{n}", SLO(float(n))) for n in range(1, 100)} == {"custom"}


def test_names():
    assert ServeConfig().names == ("jaxserve-demo",) and Path(ServeConfig().model_source).is_dir()
    assert ServeConfig(model="a/b").names == ("a/b",)
    assert ServeConfig(model="a/b", served_model_name=("c", "d")).names == ("c", "d")


def test_presets_load(repo):
    assert preset("slo", "tiers").is_file()
    with pytest.raises(InvalidValue, match="no slo preset 'tears'"):
        preset("slo", "tears")
    for path in sorted((repo / "configs" / "serve").glob("*.yaml")):
        load_yaml(path, ServeConfig)


def test_every_setting_has_a_description():
    for field in fields(ServeConfig):
        assert field.metadata["help"].endswith("."), field.name


def test_settings_import_no_jax():
    code = (
        "import sys, jaxserve, jaxserve.config, jaxserve.cli.flags, jaxserve.cli.main\n"
        "jaxserve.SamplingParams, jaxserve.SLO, jaxserve.InvalidValue\n"
        "jaxserve.config.ServeConfig().tiers, jaxserve.config.ServeConfig().model_source\n"
        "slow = {'jax', 'torch', 'transformers', 'fastapi', 'flax', 'jaxserve.sched.sim'} & set(sys.modules)\n"
        "assert not slow, slow"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{}", "missing 'method', 'num_speculative_tokens'"),
        ('{"method": "ngram"', "not valid YAML"),
        ('{"method": "eagle", "num_speculative_tokens": 4}', "ngram"),
        ('{"method": "ngram", "num_speculative_tokens": 0}', "must be 1 to 15"),
        ('{"method": "ngram", "num_speculative_tokens": 16}', "must be 1 to 15"),
        ('{"method": "ngram", "num_speculative_tokens": 4, "model": "x"}', "takes no model"),
        ('{"method": "draft_model", "num_speculative_tokens": 4}', "needs a model"),
        (
            '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 5, "prompt_lookup_max": 3}',
            "at most the maximum",
        ),
        ('{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup": 5}', "prompt_lookup"),
        ('{"method": "ngram", "num_speculative_tokens": 4, "rejection_sample_method": "probabilistic"}', "strict"),
    ],
)
def test_invalid_speculative_configs_are_refused(text: str, words: str) -> None:
    with pytest.raises(InvalidValue, match=words) as raised:
        ServeConfig(speculative_config=text)
    assert raised.value.param == "speculative_config"


def test_speculative_configs_are_parsed() -> None:
    text = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}'
    config = ServeConfig(speculative_config=text, policy="kairos")
    assert config.speculative is not None and config.speculative.lookup == (3, 3)
    assert config.decides == "kairos/draft" and ServeConfig(policy="kairos").decides == "kairos"
    assert ServeConfig(speculative_config=text, policy="slos_serve:no-admit").decides == "slos_serve:no-admit"
    fixed = ServeConfig(speculative_config=text[:-1] + ', "adaptive": false}', policy="kairos")
    assert fixed.decides == "kairos/draft:no-adaptive"
