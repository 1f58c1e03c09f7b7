"""The HTML report in a real browser: it opens without a complaint, filters, opens layers, obeys the keyboard.

Needs Chromium (`make browser`) and selenium. Without them the tests are skipped, in CI they fail.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moefuse.report.model import GraphReport, Report
from tests.report.models import report

CI = bool(os.environ.get("CI"))
PROGRAMS = ("chromium", "chromedriver")
MISSING = [name for name in PROGRAMS if shutil.which(name) is None]
ARGUMENTS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--window-size=1400,1000"),
    # No look-ups of its own: only what the page asks for.
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-quic"),
)

pytestmark = pytest.mark.skipif(bool(MISSING) and not CI, reason=f"{MISSING} not installed: make browser")


@pytest.fixture(scope="module")
def driver(tmp_path_factory) -> Iterator[Any]:
    assert not MISSING, f"CI must install {MISSING}: make browser"
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for argument in (*ARGUMENTS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    # A given service: selenium would look for a driver in the network otherwise.
    browser = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    yield browser
    browser.quit()


@pytest.fixture(scope="module")
def many() -> Report:
    """94 layers that are alike, one that lost its meaning: only the report is made large, not a model."""
    (graph,) = report("sum", "sum", "mean").graphs
    first, alike, lost = graph.sites
    sites = [first, *(replace(alike, layer=f"model.layers.{i}.mlp") for i in range(1, 94))]
    sites.append(replace(lost, layer="model.layers.94.mlp"))
    return Report((GraphReport(0, tuple(sites), 100, 80),))


@pytest.fixture
def page(driver, many, tmp_path) -> "Page":
    return Page(driver, many.to_html(tmp_path / "report.html"))


class Page:
    """One open report."""

    def __init__(self, driver: Any, path: Path) -> None:
        self.driver = driver
        driver.get(path.as_uri())

    def js(self, code: str) -> Any:
        return self.driver.execute_script(f"return {code}")

    def count(self, selector: str) -> int:
        """How many are there and visible."""
        return int(
            self.js(f"[...document.querySelectorAll('{selector}')].filter(e => e.checkVisibility()).length")
        )

    def text(self, selector: str) -> str:
        return str(self.js(f"document.querySelector('{selector}').innerText"))

    def click(self, selector: str) -> None:
        self.driver.find_element("css selector", selector).click()

    def keys(self, *keys: str) -> None:
        from selenium.webdriver import ActionChains

        ActionChains(self.driver).send_keys(*keys).perform()

    def find(self, words: str) -> None:
        box = self.driver.find_element("id", "find")
        box.clear()
        box.send_keys(words)


def test_it_opens_without_a_complaint_and_asks_for_nothing(page):
    assert page.driver.title == "moefuse: 94 of 95 MoE layers fused in 1 graph"
    assert [entry for entry in page.driver.get_log("browser") if entry["level"] != "INFO"] == []
    messages = [json.loads(entry["message"])["message"] for entry in page.driver.get_log("performance")]
    asked = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    assert page.driver.current_url in asked
    assert [url for url in asked if not url.startswith(("file:", "data:", "chrome:"))] == []
    assert page.js("performance.getEntriesByType('navigation')[0].domInteractive") < 5000


def test_it_is_folded_and_unfolds(page):
    assert page.count("tr.layer") == 1
    page.click("tr.fold")
    assert page.count("tr.layer") == 95
    page.click("tr.fold")
    assert page.count("tr.layer") == 1


@pytest.mark.parametrize(
    ("words", "rows"), [("layers.42.", 1), ("LAYERS.4", 11), ("mean lift", 1), ("top-2", 94), ("nowhere", 0)]
)
def test_the_filter_finds(page, words, rows):
    page.find(words)
    assert page.count("tr.layer") == rows
    assert page.text("#count") == f"{rows} of 95"
    assert page.count("#none") == (rows == 0)


@pytest.mark.parametrize(("verdict", "rows"), [("yes", 94), ("no", 1)])
def test_verdicts_filter(page, verdict, rows):
    page.click(f"[data-show={verdict}]")
    assert page.count("tr.layer") == rows
    page.click("[data-show=all]")
    assert page.count("tr.layer") == 1


def test_a_layer_opens_with_its_own_names(page):
    page.find("layers.7.")
    page.click('tr.layer[data-verdict="yes"]:not([hidden])')
    assert page.count("svg") == 2
    assert "⟦" not in page.text("tr.detail")
    assert page.count(".checks tr.ok") >= 9
    assert page.count(".lines code") >= 3
    page.driver.execute_script("document.querySelector('.node.gemm').dispatchEvent(new Event('click'))")
    panel = page.text(".panel")
    assert "aten.bmm.default" in panel
    assert "removed" in panel
    assert "⟦" not in panel
    assert page.count("svg path.on") >= 2
    assert page.driver.get_log("browser") == []


def test_an_unfused_layer_shows_where_it_was_lost(page):
    page.click("tr.layer:not([hidden])")
    assert "expert rows are reduced by mean" in page.text(".why")
    assert "What would work: sum" in page.text(".why")
    assert page.count(".node.lost") == 1
    assert "aten.mean.dim" in page.text(".panel")
    seen = page.js(
        "(() => {const n = document.querySelector('.node.lost').getBoundingClientRect(), "
        "s = document.querySelector('.scroll').getBoundingClientRect(); "
        "return n.top >= s.top && n.bottom <= s.bottom})()"
    )
    assert seen, "the lost node isn't scrolled into view"


def test_the_keyboard_does_everything(page):
    from selenium.webdriver.common.keys import Keys

    page.keys("/", "layers.9.")
    assert page.count("tr.layer") == 1
    page.keys(Keys.ARROW_DOWN, Keys.ENTER)
    assert page.count("tr.detail") == 1
    page.keys(Keys.ESCAPE)
    assert page.count("tr.detail") == 0
    page.keys("/", Keys.ESCAPE)
    assert page.count("tr.layer") == 1
    assert page.js("document.getElementById('find').value") == ""
    page.keys("j", " ")
    assert page.count("tr.layer") == 95
    page.keys("j", "j", "k", Keys.ENTER)
    assert page.count("tr.detail") == 1


def test_dark_and_light(page):
    colour: Callable[[], Any] = lambda: page.js("getComputedStyle(document.body).backgroundColor")  # noqa: E731
    light = colour()
    page.keys("d")
    dark = colour()
    page.click("#theme")
    assert light == colour() != dark


def test_nothing_overflows_sideways(page):
    page.click("tr.layer:not([hidden])")
    assert page.js("document.documentElement.scrollWidth") <= page.js("innerWidth")
