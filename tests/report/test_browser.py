# SPDX-License-Identifier: Apache-2.0
"""The report in a real browser: headless Chromium opens the file as a reader does."""

import os
import shutil

import pytest
from records import fit_record
from test_page import ALL, STRANGE

from fl_lightning.report import write_report

api = pytest.importorskip("playwright.sync_api")
pytest.importorskip("plotly")
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium, or CHROMIUM=its path"),
]


@pytest.fixture(scope="module")
def browser():
    with api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def hospitals(tmp_path_factory):
    """Four hospitals, two methods with two seeds."""
    names = ("Nord", "Süd", "Île-de-France", "مستشفى")
    rounds = {"FedAvg": 20, "FedLF": 25}
    records = [fit_record(m, 4, rounds[m], seed, names=names) for m in rounds for seed in (0, 1)]
    return write_report(records, tmp_path_factory.mktemp("hospitals") / "report.html")


class Opened:
    """A page, and what went wrong in it."""

    def __init__(self, browser, path, **options):
        self.context = browser.new_context(**{"viewport": {"width": 1120, "height": 900}, **options})
        self.page, self.wrong = self.context.new_page(), []
        self.page.on("console", lambda message: self.wrong.append(message.text))
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("request", lambda request: self.asked(request.url))
        self.page.on("dialog", lambda dialog: self.wrong.append(f"dialog {dialog.message}"))
        self.session = self.context.new_cdp_session(self.page)
        # Seconds of the page's own thread: a busy machine makes a page slow to open, and no slower to draw.
        self.session.send("Performance.enable", {"timeDomain": "threadTicks"})
        self.page.goto(path.as_uri())
        self.page.wait_for_selector("html[data-drawn]", state="attached")

    def asked(self, url):
        if not url.startswith(("file:", "data:", "blob:")):
            self.wrong.append(f"request {url}")

    def seconds(self):
        metrics = self.session.send("Performance.getMetrics")["metrics"]
        return next(entry["value"] for entry in metrics if entry["name"] == "TaskDuration")

    def drawn(self):
        """Per picture, how many marks of data the browser has drawn."""
        return self.page.evaluate(
            """() => Object.fromEntries([...document.querySelectorAll(".plot")].map((plot) => [plot.id.slice(5),
            plot.querySelectorAll(".point path, path.point, path.js-line, .hm image, .bars path").length]))"""
        )

    def dots(self, picture):
        """Where the dots of the first method are, in units of the axes."""
        return self.page.evaluate(
            """(id) => { const plot = document.getElementById(id);
            return plot.calcdata.find((points) => points[0].trace.hovertext).map((point) => [point.x, point.y]); }""",
            f"plot-{picture}",
        )

    def hovered(self, picture, x, y):
        """What hovering over a place shows; the place in units of the picture's axes."""
        marks = f"#plot-{picture} .hoverlayer .hovertext"
        self.page.mouse.move(0, 0)
        self.page.wait_for_selector(marks, state="detached", timeout=5000)
        place = self.page.evaluate(
            """([id, x, y]) => { const plot = document.getElementById(id), axes = plot._fullLayout;
            plot.scrollIntoView({block: "center", behavior: "instant"});
            const box = plot.getBoundingClientRect();
            return [box.left + axes.xaxis._offset + axes.xaxis.c2p(x),
                    box.top + axes.yaxis._offset + axes.yaxis.c2p(y)]; }""",
            [f"plot-{picture}", x, y],
        )
        self.page.mouse.move(*place)
        self.page.wait_for_selector(marks, timeout=5000)
        shown = " ".join(self.page.locator(marks).all_text_contents())
        return shown.translate({0x2068: None, 0x2069: None})  # marks around names that may be written from the right


@pytest.fixture
def opened(browser):
    pages = []

    def open_page(path, **options):
        pages.append(Opened(browser, path, **options))
        return pages[-1]

    yield open_page
    for page in pages:
        page.context.close()
        assert page.wrong == []


def test_every_picture_has_data_hovering_names_the_client_and_buttons_choose(opened, hospitals):
    page = opened(hospitals)
    drawn = page.drawn()
    assert tuple(drawn) == ALL
    assert min(drawn.values()) > 0, drawn
    tools = "() => [...document.querySelectorAll('.modebar')].filter((bar) => getComputedStyle(bar).opacity > 0).length"
    page.page.mouse.move(0, 0)
    assert page.page.evaluate(tools) == 0
    worst, row = page.dots("fares")[0]
    shown = page.hovered("fares", worst, row)
    for words in ("Nord", "10 test and 20 training samples", f"test_acc {worst:.4g}", "FedAvg"):
        assert words in shown
    assert "Île-de-France" in page.hovered("over-time", 3, 2)
    assert page.page.evaluate(tools) == 1
    above = """() => { const plot = document.getElementById("plot-over-time");
        return plot.querySelector(".modebar").getBoundingClientRect().bottom <= plot.getBoundingClientRect().top; }"""
    assert page.page.evaluate(above), "tools cover nothing"

    title = "document.getElementById('plot-mean-and-worst').layout.yaxis.title.text"
    assert page.page.evaluate(title) == "\u2068val_acc\u2069 (up is better)"
    page.page.click("#mean-and-worst button:nth-child(2)")
    assert page.page.evaluate(title) == "\u2068val_loss\u2069 (down is better)"
    assert page.page.get_attribute("#mean-and-worst button:nth-child(1)", "aria-pressed") == "false"
    assert min(page.drawn().values()) > 0


def test_pictures_follow_the_theme(opened, hospitals):
    page = opened(hospitals, color_scheme="dark")
    color = "document.getElementById('plot-loss')._fullLayout.font.color"
    dark = page.page.evaluate(f"[{color}, getComputedStyle(document.body).backgroundColor]")
    page.page.emulate_media(color_scheme="light")
    page.page.wait_for_function("(dark) => " + color + " !== dark", arg=dark[0], polling=50)
    light = page.page.evaluate(f"[{color}, getComputedStyle(document.body).backgroundColor]")
    assert dark == ["#e6e9ed", "rgb(20, 24, 29)"]
    assert light == ["#1c2127", "rgb(255, 255, 255)"]


def test_a_phone_shows_everything_without_scrolling_sideways(opened, hospitals):
    page = opened(hospitals, viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    assert page.page.evaluate("document.documentElement.scrollWidth") == 390
    assert min(page.drawn().values()) > 0
    wide = page.page.evaluate("[...document.querySelectorAll('.plot svg')].map((svg) => svg.clientWidth)")
    assert max(wide) <= 390


def test_print_is_light_and_open(opened, hospitals, tmp_path):
    page = opened(hospitals, color_scheme="dark")
    page.page.pdf(path=tmp_path / "report.pdf")
    assert (tmp_path / "report.pdf").stat().st_size > 50_000
    page.page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert page.page.evaluate("document.getElementById('plot-loss')._fullLayout.font.color") == "#1c2127"
    assert page.page.evaluate("[...document.querySelectorAll('details')].every((entry) => entry.open)")


def test_strange_names_are_only_text(opened, tmp_path):
    record = fit_record(STRANGE[0], clients=9, rounds=6, names=STRANGE)
    page = opened(write_report([record], tmp_path / "strange.html"))
    assert page.page.evaluate("document.querySelectorAll('script').length") == 3
    assert STRANGE[0] in page.page.inner_text("h1")
    ticks = " ".join(page.page.locator("#plot-fares .ytick text").all_text_contents())
    for name in ("<script>alert(1)", "\"quo'te&amp;", "emoji", "xxxx…", "مستشفى", "%{x} $y$ <b>", "client 7", "@c0"):
        assert name in ticks
    names = page.page.evaluate("document.getElementById('plot-fares').data.find((t) => t.hovertext).hovertext")
    for (x, y), name in zip(page.dots("fares"), names, strict=True):
        shown = page.hovered("fares", x, y)
        if "%{x}" in name:
            assert "%{x} $y$ <b>" in shown
        if "xxx" in name:
            assert shown.count("x") >= 200


def test_a_thousand_clients_and_rounds_are_drawn_in_less_than_twice_the_time_of_four(opened, tmp_path):
    usual = opened(write_report([fit_record(clients=4, rounds=20)], tmp_path / "small.html")).seconds()
    record = fit_record(clients=1000, rounds=1000, per_round=20, every=5)
    page = opened(write_report([record], tmp_path / "large.html"))
    assert page.seconds() < 2 * usual
    assert min(page.drawn().values()) > 0
    assert "client 0" in page.hovered("fares", *page.dots("fares")[0])
