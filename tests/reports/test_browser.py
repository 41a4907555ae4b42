"""Pages in a real browser: figures are drawn, nothing is loaded, nothing hostile acts, a phone can read them."""

from __future__ import annotations

from pathlib import Path

import pytest
from chromium import Browser
from hostile import MEGABYTE, hostile_report
from small_runs import write_run

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.reports import formats, html_report
from gradcheck_dist.reports.page import plotly_source, shared_file
from gradcheck_dist.reports.pair import compare
from gradcheck_dist.reports.pair_render import as_html
from gradcheck_dist.trace.run import Run, read_run

pytestmark = [pytest.mark.browser, pytest.mark.timeout(180)]
PHONE, DESK = (390, 844), (1200, 900)


def show(browser: Browser, tmp_path: Path, text: str, size: tuple[int, int]) -> None:
    file = tmp_path / "page.html"
    file.write_text(text, encoding="utf-8")
    browser.open(file.as_uri(), *size)


@pytest.mark.parametrize("size", [PHONE, DESK], ids=["phone", "desk"])
def test_all_figures_are_drawn_and_fit_the_screen(
    browser: Browser, tmp_path: Path, faulty: tuple[Report, Run], size: tuple[int, int]
) -> None:
    report, run = faulty
    show(browser, tmp_path, html_report.render(report, run), size)
    figures = browser.evaluate("[...document.querySelectorAll('.plot')].map(place => place.dataset.figure)")
    assert figures == ["weights", "timeline", "norms", "ratio"]
    assert browser.evaluate("[...document.querySelectorAll('.plot')].every(place => place.querySelector('.main-svg'))")
    cells = "[...document.querySelectorAll('.heatmap-label text')].map(text => text.textContent)"
    assert browser.evaluate(cells) == ["0.5"] * 12
    assert browser.evaluate("document.documentElement.scrollWidth") <= size[0]
    assert all(url.startswith(("file:", "data:", "blob:")) for url in browser.requests)


def test_words_of_figures_have_the_colour_of_the_page(
    browser: Browser, tmp_path: Path, faulty: tuple[Report, Run]
) -> None:
    show(browser, tmp_path, html_report.render(*faulty), DESK)
    colour = "getComputedStyle(document.querySelector({})).{}"
    assert browser.evaluate(colour.format("'.xtick text'", "fill")) == browser.evaluate(
        colour.format("'.soft'", "color")
    )


@pytest.mark.parametrize("size", [PHONE, DESK], ids=["phone", "desk"])
@pytest.mark.parametrize("name", ["attack", "megabyte"])
def test_hostile_names_do_nothing(browser: Browser, tmp_path: Path, name: str, size: tuple[int, int]) -> None:
    report = hostile_report() if name == "attack" else hostile_report(MEGABYTE)
    show(browser, tmp_path, html_report.render(report), size)
    assert browser.evaluate("window.owned === undefined")
    assert browser.evaluate("document.querySelectorAll('img, iframe, a, object, base, form').length") == 0
    assert browser.evaluate("document.querySelectorAll('.plot .main-svg').length") > 0
    assert browser.evaluate("document.documentElement.scrollWidth") <= size[0]
    assert all(url.startswith(("file:", "data:", "blob:")) for url in browser.requests)


def test_a_hostile_parameter_name_in_a_trace_does_nothing_either(browser: Browser, tmp_path: Path) -> None:
    name = "layer<img src=x onerror=window.owned=1>.weight"
    run = read_run(write_run(tmp_path / "run", name=name))
    show(browser, tmp_path, html_report.render(diagnose(run), run), DESK)
    assert browser.evaluate("window.owned === undefined && document.querySelectorAll('img').length === 0")


def test_a_script_that_is_not_ours_is_not_run(browser: Browser, tmp_path: Path, faulty: tuple[Report, Run]) -> None:
    text = html_report.render(faulty[0]).replace("</main>", "<script>window.owned = 1</script></main>")
    show(browser, tmp_path, text, DESK)
    assert browser.evaluate("window.owned === undefined")


def test_a_page_finds_the_plotly_js_beside_it_and_says_when_it_does_not(
    browser: Browser, tmp_path: Path, faulty: tuple[Report, Run]
) -> None:
    text = formats.write(faulty[0], "html", plotlyjs="shared")
    show(browser, tmp_path, text, DESK)
    assert "plotly.js was not found" in browser.evaluate("document.querySelector('.plot').textContent")
    (tmp_path / shared_file()).write_text(plotly_source(), encoding="utf-8")
    show(browser, tmp_path, text, DESK)
    assert browser.evaluate("document.querySelectorAll('.plot .main-svg').length") > 0


@pytest.mark.parametrize("size", [PHONE, DESK], ids=["phone", "desk"])
def test_a_pair_fits_the_screen(
    browser: Browser, tmp_path: Path, faulty: tuple[Report, Run], fixed: tuple[Report, Run], size: tuple[int, int]
) -> None:
    show(browser, tmp_path, as_html([compare(faulty[0], fixed[0])]), size)
    assert "FIXED" in browser.evaluate("document.querySelector('h1').textContent")
    assert browser.evaluate("document.documentElement.scrollWidth") <= size[0]
