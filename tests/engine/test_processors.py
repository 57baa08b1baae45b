"""Logits processors: how they are found and checked, and what they do to logits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.config import ServeConfig
from jaxserve.engine.programs.inputs import NOT_ASKED
from jaxserve.engine.programs.processors import Processor, processed
from jaxserve.engine.startup.processors import load
from jaxserve.errors import InvalidValue
from jaxserve.sched.api.params import SamplingParams
from tests.support.processors import package

VOCAB = 40


@pytest.fixture(scope="module", autouse=True)
def _installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(package(tmp_path_factory.mktemp("package")))
        yield


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("unknown", r"'unknown': no installed package declares .* \(declared: .*top_sigma, turned\)"),
        ("gone", r"'gone' \(jaxserve_test_processors:gone\) cannot be imported: AttributeError: .*gone"),
        ("lost", r"'lost' .* cannot be imported: ModuleNotFoundError: .*no_such_module"),
        ("number", r"'number' is int, not a function"),
        ("halved", r"'halved' returns bfloat16\[2, 40\] for logits float32\[2, 40\]"),
        ("cut", r"'cut' returns float32\[2, 39\]"),
        ("lone", r"'lone' raised TypeError: .* it must be a JAX function of logits \[rows, vocab\] float32 and arg"),
        ("branching", r"'branching' raised TracerBoolConversionError"),
        ("centred", r"'centred' mixes rows"),
    ],
)
def test_a_processor_that_cannot_work_is_refused_at_the_start(name: str, message: str) -> None:
    with pytest.raises(InvalidValue, match=message) as refused:
        load(["turned", name], VOCAB)
    assert refused.value.param == "logits_processors"


def test_a_name_that_two_packages_declare_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "other-2.0.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 2.0\n")
    (other / "entry_points.txt").write_text("[jaxserve.logits_processors]\nturned = other:turned\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(InvalidValue, match=r"several packages declare it \(jaxserve_test_processors:turned, other:tu"):
        load(["turned"], VOCAB)


def test_a_processor_changes_the_rows_that_ask_for_it() -> None:
    made = load(["turned", "top_sigma", "emptied"], VOCAB)
    logits = np.random.default_rng(1).standard_normal((6, VOCAB), np.float32)
    logits[4, 7], logits[5, 7] = np.nan, np.inf
    arguments = np.full((6, 3), NOT_ASKED, np.float32)
    arguments[[1, 2, 4, 5], 0] = 1.0, 2.0, 1.0, 1.0  # turned
    arguments[[2, 3], 1] = 0.5, 1.5  # top_sigma, of what `turned` left

    def applied(asked: np.ndarray) -> np.ndarray:
        return np.asarray(processed(jnp.asarray(logits), jnp.asarray(asked), tuple(made.values())))

    def cut(row: np.ndarray, sigmas: float) -> np.ndarray:
        return np.where(row >= row.max() - sigmas * row.std(), row, -np.inf)

    found = applied(arguments)
    expected = [logits[0], -logits[1], cut(-2 * logits[2], 0.5), cut(logits[3], 1.5), logits[4], logits[5]]
    np.testing.assert_allclose(found, np.stack(expected), rtol=1e-6)
    assert 1 <= np.isfinite(found[2]).sum() < VOCAB and 1 <= np.isfinite(found[3]).sum() < VOCAB


def test_a_processor_for_which_no_row_asks_does_not_run() -> None:
    ran: list[int] = []

    def noted(logits: jnp.ndarray, argument: jnp.ndarray) -> jnp.ndarray:

        jax.debug.callback(lambda: ran.append(1))
        return logits + argument[:, None]

    both: tuple[Processor, ...] = (noted, noted)
    logits = jnp.zeros((2, 4))
    asked = np.array([[NOT_ASKED, NOT_ASKED], [NOT_ASKED, 3.0]], np.float32)

    for arguments, runs in ((np.full((2, 2), NOT_ASKED), 0), (asked, 1)):
        made = jax.jit(lambda x, a: processed(x, a, both))(logits, jnp.asarray(arguments, jnp.float32))
        jax.effects_barrier()
        assert len(ran) == runs
    assert np.asarray(made).tolist() == [[0.0] * 4, [3.0] * 4]


@pytest.mark.parametrize(
    "wrong",
    ["name", [""], [3], [{"argument": 1}], [{"name": "a", "args": []}], [{"name": "a", "argument": True}],
     [{"name": "a", "argument": "1"}], [{"name": "a", "argument": float("inf")}], ["a", {"name": "a"}], [None],
     [{"name": "a", "argument": 10**400}], [{"name": "a", "argument": -1e39}], [("a", float("nan"))]],
    ids=str,
)  # fmt: skip
def test_malformed_requests_are_refused(wrong: object) -> None:
    with pytest.raises(InvalidValue, match=r"logits_processors=.* must be a list of names") as refused:
        SamplingParams(logits_processors=wrong)  # type: ignore[arg-type]
    assert refused.value.param == "logits_processors"


def test_requests_name_processors_with_or_without_an_argument() -> None:
    made = SamplingParams(logits_processors=["a", {"name": "b", "argument": 2}, {"name": "c"}])  # type: ignore[list-item]
    assert made.logits_processors == (("a", 1.0), ("b", 2.0), ("c", 1.0))
    assert SamplingParams(logits_processors=made.logits_processors) == made and made.drafts(0)
    assert SamplingParams(logits_processors=None).logits_processors == ()  # type: ignore[arg-type]


def test_a_server_names_each_processor_once() -> None:
    assert ServeConfig.load(logits_processors=["a", "b"]).logits_processors == ("a", "b")
    for wrong in (["a", "a"], [load]):
        with pytest.raises(InvalidValue, match=r"logits_processors=.* must be a list of names of entry points, each"):
            ServeConfig.load(logits_processors=wrong)
