"""The page in a real browser: figures drawn, themes, choices, keyboard, no script, no noise."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from bridge.report import write_report
from bridge.verify.verdict import Verdict

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.browser

FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    binary = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if binary is None:
        pytest.skip("no Chromium on this machine")
    with playwright.sync_playwright() as engine:
        found = engine.chromium.launch(executable_path=binary, headless=True, args=list(FLAGS))
        yield found
        found.close()


@pytest.fixture
def open_page(browser: Browser, tmp_path: Path) -> Iterator[Callable[..., Page]]:
    """Open a document's page; fails when it logs, raises, or asks for anything beyond itself."""
    noise: list[str] = []
    contexts = []

    def opener(verdict: Verdict, *, theme: str = "light", script: bool = True, width: int = 1280) -> Page:
        path = tmp_path / "report.html"
        write_report(verdict, path)
        context = browser.new_context(
            color_scheme=theme, java_script_enabled=script, viewport={"width": width, "height": 900}
        )
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: noise.append(f"console {message.type}: {message.text}"))
        page.on("pageerror", lambda error: noise.append(f"error: {error}"))
        page.on(
            "request",
            lambda request: (
                None
                if request.url.startswith(("file:", "data:", "blob:"))
                else noise.append(f"request {request.url}")
            ),
        )
        page.goto(path.as_uri())
        if script:
            page.wait_for_selector("html[data-ready]", timeout=60_000)
            assert page.evaluate("document.documentElement.dataset.ready") == "figures"
        return page

    yield opener
    for context in contexts:
        context.close()
    assert noise == []


def background(page: Page) -> str:
    return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))


@pytest.mark.parametrize(("theme", "colour"), [("light", "rgb(255, 255, 255)"), ("dark", "rgb(20, 23, 27)")])
def test_every_figure_is_drawn_in_the_theme(open_page, failing: Verdict, theme: str, colour: str) -> None:
    page = open_page(failing, theme=theme)
    assert background(page) == colour
    figures = page.query_selector_all("[data-figure]")
    assert len(figures) == 7
    for figure in figures:
        assert figure.query_selector("svg.main-svg") is not None
        assert figure.get_attribute("data-drawn") == theme
    papers = page.evaluate(
        "[...document.querySelectorAll('[data-figure]')].map((el) => el._fullLayout.paper_bgcolor)"
    )
    assert set(papers) == {"#ffffff" if theme == "light" else "#14171b"}
    assert page.locator("[data-figure=margins] .scatterlayer path.point").count() >= 9
    assert page.locator("figure.map .heatmaplayer image").count() == 3


def test_toggle_switches_page_and_figures_and_is_remembered(open_page, failing: Verdict) -> None:
    page = open_page(failing)
    button = page.locator("#theme")
    assert button.inner_text() == "Dark theme"
    button.click()
    page.wait_for_function(
        "[...document.querySelectorAll('[data-figure]')].every((el) => el.dataset.drawn === 'dark')"
    )
    assert background(page) == "rgb(20, 23, 27)"
    assert button.inner_text() == "Light theme"
    page.reload()
    page.wait_for_selector("html[data-ready=figures]")
    assert background(page) == "rgb(20, 23, 27)"


def test_rows_expand_by_keyboard(open_page, failing: Verdict) -> None:
    page = open_page(failing)
    rows = page.locator("tbody.cases tr:visible")
    assert rows.count() == 0
    first = page.locator("button.expand").first
    first.focus()
    page.keyboard.press("Enter")
    assert first.get_attribute("aria-expanded") == "true"
    assert rows.count() == 2
    page.locator("#expand-all").click()
    assert rows.count() == 6
    page.locator("#expand-all").click()
    assert rows.count() == 0


def test_another_case_can_be_chosen(open_page, failing: Verdict) -> None:
    page = open_page(failing)
    panel = page.locator("article.panel").first
    assert panel.locator(".checks tbody tr").first.inner_text().split()[-1] == "27.3x"
    panel.locator("select.case").select_option(index=1)
    page.wait_for_function(
        "document.querySelector('article.panel .checks td:nth-child(4)').textContent === '13.7x'"
    )
    assert (
        "13.7 times" in panel.locator(".reason").inner_text()
        or "13.6 times" in panel.locator(".reason").inner_text()
    )
    assert panel.locator("figure.map svg.main-svg").count() > 0


def test_without_scripts_the_verdict_is_there(open_page, failing: Verdict) -> None:
    page = open_page(failing, script=False)
    assert page.locator("h1").inner_text().startswith("\u2717 FAIL")
    assert page.locator(".verdicts tbody tr:visible").count() == 9
    assert page.locator("#diagnosis").inner_text().count("1 + w") >= 1
    assert "exceed their limit" in page.locator("#margins figcaption").inner_text()
    assert page.locator(".needs-js:visible").count() == 0
    assert page.locator(".canvas:visible").count() == 0


def test_results_without_numbers(open_page, undefined: Verdict) -> None:
    page = open_page(undefined)
    assert "not finite" in page.locator(".verdicts").inner_text()


def test_nothing_judged(open_page, empty: Verdict) -> None:
    page = open_page(empty)
    assert "Nothing of offset_rmsnorm was judged." in page.locator("h1").inner_text()


def test_nothing_is_wider_than_the_window(open_page, failing: Verdict) -> None:
    page = open_page(failing, width=700)
    assert page.evaluate("document.documentElement.scrollWidth") <= 700


def test_print_is_light(open_page, failing: Verdict) -> None:
    page = open_page(failing, theme="dark")
    page.emulate_media(media="print")
    assert background(page) == "rgb(255, 255, 255)"
    assert page.locator("#theme").is_hidden()
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    page.wait_for_function(
        "[...document.querySelectorAll('[data-figure]')].every((el) => el.dataset.drawn === 'light')"
    )
