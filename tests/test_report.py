"""The report: complete, safe against any name, and alive in a browser."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from fxcomm.analysis.account import Account, account_of
from fxcomm.analysis.costs import Schedule, StepProblem
from fxcomm.analysis.report import html_report, memory_in_flight
from fxcomm.analysis.timeline import Span
from tests.test_simulate import every, problem_of, small_cases

MEASURED = (Span("compute", "forward", None, 0.0, 3.0), Span("gather", "gather", 1, 1.0, 2.5))


def an_account(name: str = "p0") -> Account:
    problem = problem_of([2.0, 5.0, 8.0], [3.0, 1.0, 0.0], sizes=[2, 1, 2], norm=0.5)
    first, *others = problem.tensors
    return account_of(
        "a plan", replace(problem, tensors=(replace(first, name=name), *others)), every(problem)
    )


def data_of(html: str) -> dict[str, Any]:
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', html, re.DOTALL)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


def test_holds_everything() -> None:
    account = an_account()
    data = data_of(html_report(account, measured=MEASURED, measured_seconds=9.0, title="mine"))
    assert data["title"] == "mine"
    assert data["measured"] == 9.0
    assert data["seconds"] == account.step.seconds
    assert data["limit"] == account.limit
    assert [w["reason"] for w in data["waits"]] == [w.reason for w in account.waits]
    assert [p["name"] for p in data["plans"]] == ["a plan", *account.baselines]
    simulated, measured = data["timelines"]
    assert len(simulated["spans"]) == len(account.step.timeline)
    assert [s["kind"] for s in measured["spans"]] == ["forward", "gather"]
    assert [b["names"] for b in data["buckets"]] == ["p0", "p1", "p2"]


def test_needs_no_other_file() -> None:
    html = html_report(an_account())
    assert not re.search(r"https?://|<link|<img|src=|@import|url\(", html)


@pytest.mark.parametrize(
    "name", ["</script><script>alert(1)</script>", "<!--", '"\\u2028', "__DATA__"]
)
def test_names_are_only_data(name: str) -> None:
    html = html_report(an_account(name))
    assert data_of(html)["buckets"][0]["names"] == name
    assert html.count("<script") == 2


@settings(max_examples=100)
@given(small_cases())
def test_memory_in_flight_is_less_than_is_held(case: tuple[StepProblem, Schedule]) -> None:
    account = account_of("plan", *case)
    points = memory_in_flight(account)
    assert [t for t, _ in points] == sorted(t for t, _ in points)
    assert all(0 <= held <= account.step.peak_bytes + 1e-9 for _, held in points)
    assert points[-1][1] == pytest.approx(0, abs=1e-9)
    json.dumps(data_of(html_report(account)), allow_nan=False)


# --- in a browser ---


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The report, open in a headless browser."""
    webdriver = pytest.importorskip("selenium.webdriver")
    browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if browser is None or driver is None:
        pytest.skip("no chromium with chromedriver on this machine")
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1200,900"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    opened = webdriver.Chrome(options, webdriver.ChromeService(driver))
    try:
        file: Path = tmp_path_factory.mktemp("report") / "report.html"
        file.write_text(html_report(an_account("a</script>b"), measured=MEASURED))
        opened.get(file.as_uri())
        yield opened
    finally:
        opened.quit()


def shown(page: Any) -> tuple[float, float]:
    """The seconds between which the timeline is drawn."""
    page.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")
    data = page.execute_script("return {...document.getElementById('status').dataset}")
    return float(data["start"]), float(data["end"])


def test_loads_without_errors(page: Any) -> None:
    assert page.get_log("browser") == []
    text = page.find_element("tag name", "body").text
    assert "a plan" in text
    assert "a</script>b" in text
    assert an_account().waits[0].reason[:20] in text
    assert len(page.find_elements("css selector", "#buckets tbody tr")) == 3


def test_the_timeline_zooms_moves_and_resets(page: Any) -> None:
    start, end = shown(page)
    wheel = (
        "const c = document.getElementById('timeline'), b = c.getBoundingClientRect();"
        "c.dispatchEvent(new WheelEvent('wheel', {deltaY: -100, clientX: b.left + b.width / 2,"
        "clientY: b.top + 5, cancelable: true}))"
    )
    page.execute_script(wheel)
    near = shown(page)
    assert near[1] - near[0] == pytest.approx(0.8 * (end - start))
    canvas = page.find_element("id", "timeline")
    canvas.send_keys("+")
    nearer = shown(page)
    assert nearer[1] - nearer[0] < near[1] - near[0]
    canvas.send_keys("\ue014")  # the right arrow
    assert shown(page)[0] > nearer[0]
    page.find_element("id", "reset").click()
    assert shown(page) == (start, end)


def test_the_timeline_tells_what_is_pointed_at(page: Any) -> None:
    page.execute_script(
        "const c = document.getElementById('timeline'), b = c.getBoundingClientRect();"
        "c.dispatchEvent(new PointerEvent('pointermove', {clientX: b.left + 135,"
        "clientY: b.top + 5}))"
    )
    # The innermost span there.
    assert "wait for gather 2: from 0.0 to" in page.find_element("id", "status").text
