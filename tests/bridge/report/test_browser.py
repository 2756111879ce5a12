"""The page in a real browser: figures drawn, themes, choices, keyboard, no script, no noise."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from bridge.report import write_report
from bridge.report.documents import Document
from bridge.verify.diff_document import DiffDocument, ScanDocument
from bridge.verify.verdict import Histogram, Verdict

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

    def opener(verdict: Document, *, theme: str = "light", script: bool = True, width: int = 1280) -> Page:
        path = tmp_path / "report.html"
        write_report(verdict, path)
        context = browser.new_context(
            color_scheme=theme, java_script_enabled=script, viewport={"width": width, "height": 900}
        )
        context.set_default_timeout(120_000)  # A busy machine is no failure.
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
            page.wait_for_selector("html[data-ready]", timeout=120_000)
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


def test_a_figure_that_only_another_case_has(open_page, passing: Verdict, make_tensor) -> None:
    nothing = Histogram(edges=(-1.0, 0.0, 1.0), reference=(0, 0), target=(0, 0))
    worst = make_tensor("y", "all NaN", factor=9.0, histogram=nothing)
    page = open_page(msgspec.structs.replace(passing, tensors=(worst, make_tensor("y", "fine"))))
    assert page.locator("figure.histogram").is_hidden()
    page.locator("select.case").select_option(index=1)
    page.wait_for_selector("figure.histogram:not(.absent) svg.main-svg")
    assert page.locator("figure.histogram .canvas").bounding_box()["width"] > 300


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


def test_every_column_of_calls_is_within_the_grid(open_page, scan: ScanDocument) -> None:
    page = open_page(scan)
    grid = page.locator("#calls").bounding_box()
    last = page.get_by_role("columnheader").last.bounding_box()
    assert last["x"] + last["width"] <= grid["x"] + grid["width"]


def test_print_is_light(open_page, failing: Verdict) -> None:
    page = open_page(failing, theme="dark")
    page.emulate_media(media="print")
    assert background(page) == "rgb(255, 255, 255)"
    assert page.locator("#theme").is_hidden()
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    page.wait_for_function(
        "[...document.querySelectorAll('[data-figure]')].every((el) => el.dataset.drawn === 'light')"
    )


def grid_rows(page: Page) -> int:
    """How many calls pass the filters, as the page says it."""
    return int(page.locator("#calls-count").inner_text().split()[0].replace(",", ""))


def wait_for_rows(page: Page, expected: int) -> None:
    """Filtering waits for a pause in the typing."""
    start = f"{expected:,} of"
    page.wait_for_function(f"document.querySelector('#calls-count').textContent.startsWith('{start}')")


def column(page: Page, name: str) -> list[str]:
    """The texts of one column, from the top, as far as they are drawn."""
    cells = page.locator(".grid-row").evaluate_all(
        "(rows, name) => {"
        " const heads = [...document.querySelectorAll('.grid-head [role=columnheader]')];"
        " const titles = heads.map((head) => head.textContent);"
        " return rows.sort((a, b) => a.dataset.position - b.dataset.position)"
        "   .map((row) => row.children[titles.indexOf(name)].textContent); }",
        name,
    )
    return [str(cell) for cell in cells]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_diff_figures_are_drawn_in_the_theme(open_page, ab: DiffDocument, theme: str) -> None:
    page = open_page(ab, theme=theme)
    figures = page.query_selector_all("[data-figure]")
    assert len(figures) == 10
    assert {figure.get_attribute("data-drawn") for figure in figures} == {theme}
    assert page.locator("#flow .scatterlayer path.point").count() > 50
    assert page.locator("#layers .heatmaplayer image").count() == 1
    page.locator("#theme").click()
    other = "dark" if theme == "light" else "light"
    page.wait_for_function(
        f"[...document.querySelectorAll('[data-figure]')].every((el) => el.dataset.drawn === '{other}')"
    )


def test_filters(open_page, diverged: DiffDocument) -> None:
    page = open_page(diverged)
    assert grid_rows(page) == 95  # Beyond noise or unmatched is what one sees first.
    page.locator("select[data-column=status]").select_option(label="status: any")
    assert grid_rows(page) == 120
    page.locator("select[data-column=phase]").select_option(label="backward")
    assert grid_rows(page) == 60
    page.locator("select[data-column=phase]").select_option(label="phase: any")
    queries = {"layers.1.": 40, "layers.1. softmax": 10, "-layers.1.": 80, "op_2 born": 1}
    for query, expected in queries.items():
        page.fill("#calls-filter", query)
        wait_for_rows(page, expected)
    forward = diverged.table.out_difference[:60]
    page.fill("#calls-filter", "out>=0.004 out<0.005 forward")
    wait_for_rows(page, sum(value is not None and 0.004 <= value < 0.005 for value in forward))
    outs = [float(text) for text in column(page, "Output diff")]
    assert outs
    assert all(0.004 <= value < 0.005 for value in outs)
    page.fill("#calls-filter", "nothing like this")
    wait_for_rows(page, 0)
    assert page.locator(".grid-row").count() == 0


def test_sorting(open_page, diverged: DiffDocument) -> None:
    page = open_page(diverged)
    page.locator("select[data-column=status]").select_option(label="status: any")
    heading = page.get_by_role("columnheader", name="Output diff")
    heading.locator("button").click()
    assert heading.get_attribute("aria-sort") == "descending"
    values = [float(text) for text in column(page, "Output diff") if text not in ("-", "bit-equal")]
    assert values[0] == 0.064
    assert values == sorted(values, reverse=True)
    heading.locator("button").click()
    assert heading.get_attribute("aria-sort") == "ascending"
    assert column(page, "Output diff")[0] == "bit-equal"
    heading.locator("button").click()
    assert heading.get_attribute("aria-sort") == "none"
    assert column(page, "Call")[0] == "layers.0.attention_norm/op_0"
    page.get_by_role("columnheader", name="Call").locator("button").click()
    keys = column(page, "Call")
    assert keys == sorted(keys)


def test_keyboard_and_drill_down(open_page, diverged: DiffDocument) -> None:
    page = open_page(diverged)
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "calls-filter"
    page.keyboard.type("attention/op_2")
    wait_for_rows(page, 2)
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.id") == "calls"
    page.keyboard.press("ArrowDown")
    assert page.locator(".grid-row.active .key").text_content() == "layers.1.attention/op_2"
    page.keyboard.press("Enter")
    page.wait_for_selector("#detail[data-row='22']")
    detail = page.locator("#detail")
    text = detail.inner_text()
    for part in ("born by replay", "model.py:102 in forward", "1e-05", "35.0", "1,200", "bfloat16 / float32"):
        assert part in text
    assert detail.locator(".block.figure svg.main-svg").count() > 0
    assert page.url.endswith("#row=22")
    page.keyboard.press("Escape")
    assert detail.is_hidden()
    page.keyboard.press("End")
    assert page.locator(".grid-row.active").get_attribute("aria-rowindex") == "3"
    page.keyboard.press("Home")
    page.keyboard.press("PageDown")
    assert page.locator(".grid-row.active").count() == 1


def test_a_suspect_leads_to_its_call_through_any_filter(open_page, diverged: DiffDocument) -> None:
    page = open_page(diverged)
    page.fill("#calls-filter", "layers.0.")
    page.wait_for_function("!document.querySelector('#calls-count').textContent.startsWith('95')")
    page.locator("button.show-row").nth(1).click()
    page.wait_for_selector("#detail[data-row='75']")
    assert page.locator(".grid-row.active .origin").inner_text() == "born"
    assert page.input_value("#calls-filter") == ""


def test_a_point_of_the_flow_leads_to_its_call(open_page, diverged: DiffDocument) -> None:
    page = open_page(diverged)
    page.evaluate(
        "document.querySelector('[data-figure=flow]').emit('plotly_click', { points: [{ customdata: 75 }] })"
    )
    page.wait_for_selector("#detail[data-row='75']")


def test_the_map_can_show_modules(open_page, diverged: DiffDocument) -> None:
    page = open_page(diverged)
    page.select_option("#layers-by", "layer-module")
    page.wait_for_function(
        "document.querySelector('#layers .xaxislayer-above').textContent.includes('feed_forward.w1')"
    )


def test_100_000_calls(open_page, make_diff: Callable[..., DiffDocument]) -> None:
    page = open_page(make_diff(layers=100, calls=500, born=(20_000, 60_001)))
    page.locator("select[data-column=status]").select_option(label="status: any")
    assert grid_rows(page) == 100_000
    assert page.locator(".grid-row").count() < 60
    page.evaluate("document.querySelector('.grid-body').scrollTop = 1e9")
    page.wait_for_function(
        "[...document.querySelectorAll('.grid-row')].some((row) => row.dataset.position === '99999')"
    )
    assert page.locator(".grid-row").count() < 60
    assert column(page, "Call")[-1] == "layers.0.ffn_norm/backward/op_499"
    page.get_by_role("columnheader", name="Output diff").locator("button").click()
    assert column(page, "Output diff")[0] == "0.0640"
    page.fill("#calls-filter", "layers.57. softmax backward")
    wait_for_rows(page, 125)


def test_scan_page(open_page, scan: ScanDocument) -> None:
    page = open_page(scan)
    assert grid_rows(page) == 60
    page.locator("select[data-column=verdict]").select_option(label="FAIL")
    assert grid_rows(page) == 3
    assert column(page, "Margin") == ["12.0", "6.00", "4.00"]
    page.locator("button.show-row").first.click()
    page.wait_for_selector("#detail[data-row='0']")
    assert "12 times its threshold" in page.locator("#detail").inner_text()


def test_runs_without_scripts(open_page, ab: DiffDocument) -> None:
    page = open_page(ab, script=False)
    assert page.locator("h1").inner_text().startswith("\u2717 DIVERGED")
    assert page.locator(".static tbody tr:visible").count() == 50
    assert page.locator("#calls-app").is_hidden()
    assert "2 births" in page.locator("#flow figcaption").inner_text()
    assert page.locator(".verdicts tbody tr:visible").count() == 9


def test_runs_without_calls(open_page, unmatched: DiffDocument) -> None:
    page = open_page(unmatched)
    assert page.locator("h1").inner_text().startswith("? NOTHING MATCHED")


def test_the_figures_buttons_hide_nothing_and_send_nothing(open_page, failing: Verdict) -> None:
    page = open_page(failing)
    figure = page.locator(".js-plotly-plot:has(.colorbar)").first
    figure.scroll_into_view_if_needed()
    figure.hover()
    titles = page.evaluate("[...document.querySelectorAll('.modebar-btn')].map((x) => x.dataset.title)")
    assert "Download plot as a PNG" in titles and not any("hare" in title for title in titles)
    buttons = figure.locator(".modebar").bounding_box()
    for part in (".colorbar", ".heatmaplayer"):
        drawn = figure.locator(part).first.bounding_box()
        assert buttons["y"] + buttons["height"] <= drawn["y"]


def test_a_call_of_a_scan_is_drilled_into(open_page, make_scan: Callable[..., ScanDocument]) -> None:
    page = open_page(make_scan(drilled=True))
    page.locator(".show-row").first.click()
    detail = page.locator("#detail")
    text = detail.inner_text()
    assert "Statistics of both sides" in text and "FP64" in text and "recorded" in text
    assert "model.py" in text and "Inputs from" in text and "worst elements" in text
    detail.locator(".js-plotly-plot").nth(1).wait_for()
    assert page.locator("#calls-help").inner_text().endswith("bold: has a drill-down")
