"""Named policies, routers and admissions: options are parsed by type, and errors name the allowed values."""

from __future__ import annotations

import re
import sys
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.sched import admission, policies, routing
from jaxserve.sched.api.errors import InvalidValue
from jaxserve.sched.registry import build, shared


def thing(
    flag: bool = False, on: bool = True, count: int = 3, share: float = 0.5, word: str = "a", no_way: bool = False
) -> dict[str, Any]:
    return dict(locals())


def other(count: int = 1, given: str = "") -> dict[str, Any]:
    return dict(locals())


TABLE = {"thing": "things:thing", "other": "things:other", "third": "things:thing:word=z"}
DEFAULTS = thing()


@pytest.fixture(autouse=True)
def things(monkeypatch: pytest.MonkeyPatch) -> None:
    package, module = ModuleType("shelf"), ModuleType("shelf.things")
    package.__path__ = []
    module.thing, module.other = thing, other  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "shelf", package)
    monkeypatch.setitem(sys.modules, "shelf.things", module)


def made(text: str, **given: Any) -> dict[str, Any]:
    result: dict[str, Any] = build(TABLE, text, "toy", "shelf", **given)
    return result


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        ("thing", {}),
        ("  thing ", {}),
        ("thing:", {}),
        ("thing:flag", {"flag": True}),
        ("thing:no-flag", {}),
        ("thing:no-on", {"on": False}),
        ("thing:no_on", {"on": False}),
        ("thing:no-way", {"no_way": True}),  # an option of this name, not the negation of `way`
        ("thing:no-no-way", {}),
        ("thing:count=7", {"count": 7}),
        ("thing:count=-7", {"count": -7}),
        ("thing:count=8e3", {"count": 8000}),
        ("thing:share=1", {"share": 1.0}),
        ("thing:share = 2.5e-1", {"share": 0.25}),
        ("thing:word=b:7", {"word": "b:7"}),
        ("thing:word=", {"word": ""}),
        ("thing:flag+no-on+count=1+share=.5+word=x", {"flag": True, "on": False, "count": 1, "word": "x"}),
        ("thing:count=1+count=2", {"count": 2}),
        ("third", {"word": "z"}),
        ("third:word=y+flag", {"word": "y", "flag": True}),
    ],
)
def test_options_are_parsed_by_the_type_of_their_default(text: str, changed: dict[str, Any]) -> None:
    found = made(text)
    assert found == DEFAULTS | changed
    assert {key: type(value) for key, value in found.items()} == {key: type(value) for key, value in DEFAULTS.items()}


ALLOWED = "flag, no-on, count=3, share=0.5, word=a, no_way"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("thin", "unknown toy 'thin'; choose one of other, thing, third; did you mean 'thing'?"),
        ("", "unknown toy ''; choose one of other, thing, third"),
        ("thing:size=3", f"toy 'thing' has no option 'size=3'; its options: {ALLOWED}"),
        ("thing:fast", f"toy 'thing' has no option 'fast'; its options: {ALLOWED}"),
        ("thing:no-fast", f"toy 'thing' has no option 'no-fast'; its options: {ALLOWED}"),
        ("thing:flag=1", "toy 'thing': option 'flag=1' must be a flag without a value"),
        ("thing:count", "toy 'thing': option 'count' must be a whole number"),
        ("thing:no-count", "toy 'thing': option 'no-count' must be a whole number"),
        ("thing:count=many", "toy 'thing': option 'count=many' must be a whole number"),
        ("thing:count=inf", "toy 'thing': option 'count=inf' must be a whole number"),
        ("thing:count=7.5", "toy 'thing': option 'count=7.5' must be a whole number"),
        ("thing:share=nan", "toy 'thing': option 'share=nan' must be a number"),
        ("thing:share=half", "toy 'thing': option 'share=half' must be a number"),
        ("thing:word", "toy 'thing': option 'word' must be text"),
        ("other:given=x", "toy 'other' has no option 'given=x'; its options: count=1"),
    ],
)
def test_an_error_names_the_value_and_what_is_allowed(text: str, message: str) -> None:
    with pytest.raises(InvalidValue, match=re.escape(message)):
        made(text, given="mine")


def test_given_arguments_reach_the_constructors_that_take_them() -> None:
    assert made("other:count=2", given="mine") == {"count": 2, "given": "mine"}
    assert made("thing", given="mine") == DEFAULTS


@given(count=st.integers(-(10**9), 10**9), share=st.floats(allow_nan=False, allow_infinity=False), flag=st.booleans())
def test_a_formatted_name_parses_to_itself(count: int, share: float, flag: bool) -> None:
    text = f"thing:count={count}+share={share!r}+{'flag' if flag else 'no-flag'}"
    assert "e+" in text or made(text) == DEFAULTS | {"count": count, "share": share, "flag": flag}


def test_shared_options_go_to_the_parts_that_take_them() -> None:
    tables, names = [TABLE, TABLE], ["thing", "other"]

    def split(text: str) -> list[str]:
        return shared(tables, names, text, "pair 'x'", "pair", "shelf")

    assert split("flag+count=2") == ["thing:flag+count=2", "other:count=2"]
    assert split("no-on") == ["thing:no-on", "other:"]
    assert split("") == ["thing:", "other:"]
    with pytest.raises(InvalidValue, match=re.escape("pair 'x' has no option 'size=1'; its options: flag, no-on, ")):
        split("flag+size=1")


@pytest.mark.parametrize(
    ("make", "text", "message"),
    [
        (policies.make, "sarathi:tokens=few", "policy 'sarathi': option 'tokens=few' must be a whole number"),
        (policies.make, "sarathi:tokens=-1", "at least 1, or 0"),
        (policies.make, "sarathi:share=1.5", "at most 1"),
        (policies.make, "vllm:tokens=0", "at least 1"),
        (policies.make, "fairbatching:use=0", "more than 0"),
        (policies.make, "fairbatching:budget=many", "must be slo, tokens, fixed or fixed:N"),
        (policies.make, "flowprefill:batch=-1", "batch=-1 must be 0"),
        (policies.make, "edf:literal", "policy 'edf' has no option 'literal'; its options: ageing=0.0, no-pack"),
        (policies.make, "slos_serve:spek", "its options: no-admit, no-spec, no-dynamic, margin"),
        (policies.make, "kairos:verbos", "policy 'kairos' has no option 'verbos'"),
        (policies.make, "fairbatching:anchor=last", "anchor='last' must be first or arrival"),
        (policies.make, "fairbatching:budget=fixed:0", "budget='fixed:0' must be slo, tokens, fixed or fixed:N"),
        (policies.make, "flowprefill:order=fifo", "order='fifo' must be one of sedf, deadline_edf, edf"),
        (policies.make, "prefill=vllm,decode=kairos", "unknown prefill policy 'vllm'; choose one of deadline_edf, edf"),
        (policies.make, "prefill=fcfs", "unknown policy 'prefill=fcfs'"),
        (policies.make, "kairos/draft:fast", "no option 'fast'"),
        (policies.make, "kairos/guess", "choose one of draft"),
        (policies.make, "sjf:ageing=2", "ageing=2.0 must be a share"),
        (routing.make, "deflect:sl", "routing 'deflect' has no option 'sl'; its options: faster, slo, dropped"),
        (routing.make, "deflect:slo+faster", "one of faster, slo and dropped"),
        (routing.make, "deflect:share=0", "share=0.0 must be more than 0"),
        (routing.make, "roundrobin", "did you mean 'round_robin'?"),
        (routing.make, "next_replica:limit=0", "limit=0 must be at least 1"),
        (routing.make, "next_replica:admission=none", "has no option 'admission=none'; its options: limit=8"),
        (admission.make, "pab:reject", "admission 'pab' has no option 'reject'; its options: refuse"),
        (admission.make, "all", "unknown admission 'all'; choose one of dp, none, pab"),
    ],
)
def test_policies_routers_and_admissions_list_their_options(make: Any, text: str, message: str) -> None:
    with pytest.raises(InvalidValue, match=re.escape(message)):
        make(text)
