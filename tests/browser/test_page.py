"""What people see and do on the page, with an engine double."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest

from jaxserve.engine.runtime.flight_recorder import EndedRequest, Event, Recent, RequestLife
from jaxserve.engine.runtime.step_record import Step
from jaxserve.report.recorded_server import RecordedServer
from jaxserve.sched.api.request import BEST_EFFORT
from jaxserve.sched.api.slo import SLO
from jaxserve.sched.recorded.record import Demoted, Placed, Recorder
from jaxserve.sched.sim import simulate
from tests.support.browser import END, ENTER, HOME, LEFT, RIGHT, TABS, Page
from tests.support.sched.presets import CHAT, TINY
from tests.support.server.live import Live
from tests.support.timing import until

HTML = "<img src=x onerror='window.hacked=1'><script>window.hacked=1</script><b>bold</b>"
HISTORY = Recent(
    5,
    (Event(1, 0.4, "stop", "i0"), Event(2, 0.2, "move", "i0", 7, "", "p0")),
    (
        EndedRequest(
            3, 3.0, 6, "cmpl-6", "", "default", "standard", 30, 4, 0.1, 0.4, 0.02, 0.5, 0.1, 0.3, True, "stop"
        ),
        EndedRequest(
            4, 2.0, 7, "cmpl-7", "", "default", "standard", 20, 4, 0.2, 0.9, 0.02, 0.5, 0.1, 0.6, False, "stop"
        ),
        EndedRequest(5, 1.0, 8, HTML, "", HTML, "standard", 20, 4, 0.2, 0.9, 0.02, 0.5, 0.1, 0.6, False, "stop"),
    ),
)
LIFE = RequestLife(
    7, "cmpl-7", "", "default", "standard", SLO(0.5, 0.1), 10.0, 20, 0, 0, (10.9, 10.92), 10.9, "stop", None, None, 0.6,
    (Step("i0", 10.0, 10.6, False, ((6, 0, 30, True),), b"", b"", 0),
     Step("i0", 10.6, 10.9, False, ((7, 0, 20, True),), b"", b"", 0)),
    (Placed(10.0, "i0", 7, 1, 30),), (), {6: 30, 7: 20}, (),
)  # fmt: skip
CUT = """return [...document.querySelectorAll(`#${arguments[0]} .scroll`)]
  .filter((one) => one.scrollWidth > one.clientWidth).map((one) => one.getAttribute("aria-label"))"""
Serve = Callable[..., Live]


@pytest.fixture
def busy(serve: Serve) -> Live:
    """A server that has served requests."""
    made = serve()
    made.engine.history, made.engine.lives = HISTORY, {7: LIFE}
    return made


def filled(page: Page, server: Live) -> None:
    """Open the page, and put something into every tab."""
    page.open(server.url)
    page.say("Hi")
    page.choose("live")
    until(lambda: len(page.all("#events li")) == 2)
    page.choose("requests")
    until(lambda: len(page.all("#ended-requests button")) == 3)
    page.get("#ended-requests button[data-request='7']").click()
    until(lambda: page.all("#words-of li"))


def test_it_has_three_tabs_and_a_clean_console(page: Page, busy: Live) -> None:
    filled(page, busy)
    for name in TABS:
        page.choose(name)
        shown = [one.get_attribute("id") for one in page.all("[role=tabpanel]") if one.is_displayed()]
        assert shown == [name]
        assert page.get(f"#tab-{name}").get_attribute("aria-selected") == "true"
    assert page.problems == []


def test_an_answer_says_what_was_promised_and_kept(page: Page, serve: Serve) -> None:
    server = serve("Hello there.")
    page.open(server.url)
    page.run("ttft.value = 0; ttft.dispatchEvent(new Event('input')); tpot.value = 100;")
    assert page.text("#ttft-value") == "20 ms"
    page.say("What is it?")
    assert "Hello there." in page.text("#chat-log")
    slo = server.engine.submitted[-1].slo
    assert slo.ttft == 0.02 and slo.tpot == 60.0
    kept = page.text("#chat-log .kept")
    assert kept.startswith(("on time", "late")) and "objective 20 ms" in kept and "here after" in kept
    page.say("And this?")
    assert "Hello there." in server.sent(), "the answer before is part of the next prompt"
    page.get("#chat-clear").click()
    assert page.text("#chat-log") == ""


def test_a_long_objective_or_none_can_be_chosen(page: Page, serve: Serve) -> None:
    server = serve()
    page.open(server.url)
    page.run("ttft.value = 100; ttft.dispatchEvent(new Event('input'))")
    assert page.text("#ttft-value") == "3600 s"
    page.say("Take your time.")
    assert server.engine.submitted[-1].slo.ttft == 3600.0
    page.get("#no-objectives").click()
    assert not page.get("#ttft").is_enabled() and not page.get("#tpot").is_enabled()
    page.say("Whenever.")
    assert server.engine.submitted[-1].tier == BEST_EFFORT
    assert page.all("#chat-log .kept")[-1].text.startswith("no objectives, here after")
    page.get("#no-objectives").click()
    page.say("And now?")
    assert server.engine.submitted[-1].slo.ttft == 3600.0 and server.engine.submitted[-1].tier != BEST_EFFORT


def test_a_document_goes_beside_the_chat(page: Page, serve: Serve) -> None:
    server = serve()
    page.open(server.url)
    page.get("#tier").send_keys("batch")
    page.get("#document-form button").click()
    until(lambda: server.engine.submitted and not page.get("#document-stop").is_enabled())
    assert "quick brown fox" in server.sent()
    assert "A document of" in page.text("#document-log") and "batch" in page.text("#document-log")


def test_what_a_model_writes_is_text(page: Page, serve: Serve) -> None:
    server = serve(HTML)
    server.engine.history = HISTORY
    page.open(server.url)
    page.say(HTML)
    page.choose("live")
    until(lambda: page.all("#events li"))
    page.choose("requests")
    until(lambda: page.all("#ended-requests button"))
    assert page.text("#chat-log").count(HTML) == 2, "as it was asked, and as it was answered"
    assert HTML in page.text("#ended-requests")
    assert page.all("main img, main script, main b") == []
    assert page.run("return window.hacked ?? null") is None
    assert page.problems == []


def test_live_shows_instances_classes_and_events(page: Page, busy: Live) -> None:
    page.open(busy.url)
    page.choose("live")
    until(lambda: page.all("#events li"))
    assert "i0" in page.text("#instances") and "idle" in page.text("#instances")
    assert "default" in page.text("#classes") and "50%" in page.text("#classes")
    assert "a prefill step was stopped" in page.text("#events") and "request 7 came with its KV" in page.text("#events")
    assert len(page.all("#plot-ttft circle")) == 3
    # in one script, as the page draws it anew each second
    assert page.run("return document.querySelector('#plot-attainment svg').getAttribute('aria-label')")


def test_a_late_request_is_explained_in_three_clicks(page: Page, busy: Live) -> None:
    page.open(busy.url)
    page.choose("requests")
    until(lambda: len(page.all("#ended-requests button")) == 3)
    page.get("#late-only").click()
    assert len(page.all("#ended-requests button")) == 2
    page.get("#ended-requests button[data-request='7']").click()
    until(lambda: page.all("#words-of li"))
    assert page.text("#words-of li").startswith("Missed TTFT by 400 ms: of 900 ms it was computed for 300 ms")
    assert "Predicted when it was routed: first token after 600 ms." in page.text("#words-of")
    late = "#ended-requests tr.chosen td.bad"
    assert [cell.text for cell in page.all(late)] == ["late", "900 ms"], "no TPOT: it has no objective"
    assert len(page.all("#timeline > svg rect.prefill")) == 1 and page.all("#timeline > svg rect.other")


def test_a_demotion_is_told_of_its_request(page: Page, busy: Live) -> None:
    busy.engine.history = HISTORY._replace(number=6, events=(Event(6, 0.1, "demotion", "i0", 7),))
    busy.engine.lives = {7: replace(LIFE, tier=BEST_EFFORT, demoted=Demoted(10.3, "i0", 7, 0.2, 0.6))}
    page.open(busy.url)
    page.choose("live")
    until(lambda: "i0: request 7 became best effort" in page.text("#events"))
    page.choose("requests")
    until(lambda: len(page.all("#ended-requests button")) == 3)
    page.get("#ended-requests button[data-request='7']").click()
    until(lambda: page.all("#words-of li"))
    said = "0.300 s  became best effort on i0: its first token is due in 200 ms, but needs 600 ms"
    assert said in page.text("#words-of")


def test_the_keyboard_is_enough(page: Page, busy: Live) -> None:
    page.open(busy.url)
    page.run("document.querySelector('#tab-chat').focus()")
    for key, tab in (
        (RIGHT, "live"),
        (RIGHT, "requests"),
        (RIGHT, "chat"),
        (LEFT, "requests"),
        (HOME, "chat"),
        (END, "requests"),
    ):
        page.press(key)
        assert page.focused == f"tab-{tab}" and page.get(f"#{tab}").is_displayed()
    until(lambda: len(page.all("#ended-requests button")) == 3)
    page.run("document.querySelector('#ended-requests button[data-request=\"7\"]').focus()")
    page.press(ENTER)
    until(lambda: page.focused == "detail")
    unreachable = page.run(
        "return [...document.querySelectorAll('.log, .scroll')].filter((one) => one.tabIndex < 0).length"
    )
    assert unreachable == 0, "what scrolls can be scrolled by keys"


@pytest.mark.parametrize("width", [320, 390, 768])
def test_narrow_screens_do_not_scroll_sideways(page: Page, busy: Live, width: int) -> None:
    page.size(width, 640)
    filled(page, busy)
    for name in TABS:
        page.choose(name)
        wide = page.run("return document.documentElement.scrollWidth")
        assert wide <= width, name
        assert width > 390 or not page.run(CUT, name), "tables fit a phone"


def test_a_table_that_is_cut_off_says_so_and_scrolls_by_keys(page: Page, busy: Live) -> None:
    page.size(700, 640)
    page.open(busy.url)
    page.choose("live")
    until(lambda: page.run(CUT, "live") == ["Classes"], lambda: "the name of a class is long")
    table = "document.querySelector('[aria-label=Classes]')"
    assert "gradient" in page.run(f"return getComputedStyle({table}).backgroundImage"), "a shadow at its edge"
    page.run(f"{table}.focus()")
    page.press(RIGHT)
    until(lambda: page.run(f"return {table}.scrollLeft") > 0)


def test_dark_and_light_follow_the_system(page: Page, busy: Live) -> None:
    page.open(busy.url)
    shades = {}
    for scheme in ("light", "dark"):
        page.scheme(scheme)
        shades[scheme] = page.run("return getComputedStyle(document.body).backgroundColor")
    assert shades["light"] == "rgb(255, 255, 255)" and shades["dark"] != shades["light"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_accessibility(page: Page, busy: Live, axe: str, scheme: str) -> None:
    page.scheme(scheme)
    filled(page, busy)
    for name in TABS:
        page.choose(name)
        assert page.violations(axe) == [], name


def test_a_key_is_asked_for_where_one_is_needed(page: Page, serve: Serve) -> None:
    server = serve(api_key=("open-sesame",))
    server.engine.history = HISTORY
    page.open(server.url)
    until(lambda: page.get("#key").is_displayed())
    page.choose("live")
    for key, said in (("sésame", "ASCII"), ("wrong", "a wrong API key"), ("open-sesame", "")):
        page.get("#key-value").clear()
        page.get("#key-value").send_keys(key + ENTER)
        if said:
            until(lambda said=said: said in page.text("#key-error"))
    until(lambda: page.all("#events li"))
    assert not page.get("#key").is_displayed()
    assert "open-sesame" not in page.run("return location.href + document.body.innerText")


def test_nobody_looks_while_another_tab_is_open(page: Page, busy: Live) -> None:
    page.open(busy.url)
    assert not busy.service.live.viewers
    page.choose("live")
    until(lambda: busy.service.live.viewers == 1)
    page.choose("requests")
    page.choose("chat")
    until(lambda: not busy.service.live.viewers)


def test_a_stream_that_is_cut_off_is_read_again(page: Page, busy: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    page.open(busy.url)
    page.choose("live")
    until(lambda: page.all("#events li"))
    monkeypatch.setattr(busy.service, "draining", True)
    until(lambda: "trying again" in page.text("#status"))
    monkeypatch.undo()
    until(lambda: page.text("#status") == "")
    busy.stop()
    until(lambda: "The server does not answer" in page.text("#status"))
    assert page.all("#events li"), "what was shown stays"


def test_a_stopped_answer_says_so(page: Page, serve: Serve) -> None:
    server = serve("word " * 200)
    server.engine.delay = 0.05
    page.open(server.url)
    page.get("#prompt").send_keys("Hi" + ENTER)
    until(lambda: "word" in page.text("#chat-log"))
    page.get("#chat-stop").click()
    until(lambda: page.text("#chat-log .kept") == "stopped")
    until(lambda: server.engine.cancelled)


def test_a_refusal_is_shown(page: Page, serve: Serve) -> None:
    server = serve()
    server.engine.reject = "out of luck"
    page.open(server.url)
    page.say("Hi")
    assert "out of luck" in page.text("#chat-log .kept.bad, #chat-log .kept .bad")


@pytest.fixture
def recorded() -> Recorder:
    recorder = Recorder()
    simulate(CHAT, "kairos", "4x1", TINY, qps=60, num_requests=60, recorder=recorder)
    return recorder


def test_a_recorded_run_is_played(page: Page, recorded: Recorder, axe: str) -> None:
    with RecordedServer(recorded, "a simulation", 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            page.open(server.url)
            assert not page.get("#tab-chat").is_displayed() and page.text("#about") == "a simulation"
            events = len(page.all("#events li"))
            page.run("moment.value = 0; moment.dispatchEvent(new Event('input'))")
            assert len(page.all("#events li")) < events
            page.get("#play").click()
            until(lambda: int(page.run("return Number(moment.value)")) > 3)
            page.get("#play").click()
            assert page.violations(axe) == []
            page.choose("requests")
            until(lambda: len(page.all("#ended-requests button")) == 60)
            page.all("#ended-requests button")[0].click()
            until(lambda: page.all("#words-of li") and page.all("#timeline rect"))
            assert page.problems == []
        finally:
            server.shutdown()
            thread.join()
