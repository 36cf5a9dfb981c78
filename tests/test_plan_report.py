"""The report of a plan: hostile prompts, its size, and what a browser makes of it."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import asdict
from html.parser import HTMLParser

import numpy as np
import pytest

from onestem.batch import JobInput
from onestem.errors import ConfigError, JobError
from onestem.jobs import plan_file
from onestem.options import EngineOptions, InputOptions
from onestem.planner import plan_job
from onestem.report import DrawnTree, Price, savings_by_level, write_page
from tests.batch.fakes import completion, write_lines

EVIL = (
    "</script><script>document.title='owned'</script><img src=x onerror=alert(1)>&amp;{{7*7}}\u2028"
)
OPTIONS = EngineOptions("embedded", device="h200", dtype="bfloat16")
BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")


def plan(source, page, options=OPTIONS, **more):
    page.parent.mkdir(exist_ok=True)
    return plan_file(source, page.parent, options=options, html=page, **more)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A report of prompts, fields, a file and a price that try to be HTML."""
    folder = tmp_path_factory.mktemp("plan")
    evil = EVIL.replace("{{7*7}}", "")
    rows = [
        {evil: f"{EVIL} {i}", "doc": f"{EVIL} document {i % 3}" * 6, "ask": f"{i}"}
        for i in range(30)
    ]
    source = write_lines(folder / "<b>evil.jsonl", rows)
    template = f"{{{evil}}}\n\nDoc: {{doc}}\n\nAsk: {{ask}}"
    page = folder / "work" / "report.html"
    price = Price.read("<b>3")
    plan(JobInput(source, InputOptions(prompt=template)), page, price=price)
    return page


class Elements(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.found = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))


def test_words_of_prompts_are_never_html(page):
    text = page.read_text()
    elements = Elements(text).found
    assert [tag for tag, _ in elements if tag in ("img", "b", "script", "link", "iframe")].count(
        "script"
    ) == 2
    assert not any(tag == "img" for tag, _ in elements)
    handlers = [name for _, attributes in elements for name in attributes if name[:2] == "on"]
    assert handlers == []
    assert text.count("</script") == 2
    assert "{{7*7}}" in text
    assert "&lt;b&gt;evil.jsonl" in text
    loaded = [a for _, attributes in elements for a in attributes if a in ("src", "href", "style")]
    assert loaded == []
    assert "default-src 'none'" in text
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)


def test_trees_say_what_the_plan_computes():
    prompts = [[1, 2, 3, 10, i] for i in range(4)] + [[1, 2, 4, i] for i in range(3)] + [[9, 9]]
    made = plan_job(prompts)
    tree = DrawnTree.of(made, prompts, lambda ids: " ".join(map(str, ids)), 100)
    assert tree.nodes == [
        # parent, tokens, requests, alone, of them; left out: prefixes, requests, tokens; words
        [0, 0, 8, 1, 2, 0, 0, 0, "", "9 9"],
        [0, 2, 7, 0, 0, 0, 0, 0, "1 2", ""],
        [1, 1, 3, 3, 1, 0, 0, 0, "4", "0"],
        [1, 2, 4, 4, 1, 0, 0, 0, "3 10", "0"],
    ]
    report = made.report
    saved = report.logical_prompt_tokens - report.processed_tokens
    assert sum(level["saved_tokens"] for level in savings_by_level(made.tree)) == saved
    cut = DrawnTree.of(made, prompts, lambda ids: "", 3)
    assert len(cut.nodes) == 3
    assert cut.nodes[1][5:8] == [1, 3, 2]
    assert (cut.left_out, cut.left_out_tokens) == (1, 2)


def test_a_large_job_is_cut_to_a_megabyte(tmp_path):
    rng = np.random.default_rng(0)
    prompts = [[int(i) for i in (k % 50, k % 5000, *rng.integers(0, 9, 3))] for k in range(20_000)]
    made = plan_job(prompts)
    report = {
        **asdict(made.report), "largest_groups": [], "failed_lines": 0, "forecast": None,
        "open_ended": {"requests": 0, "most_tokens": 0}, "assumed_tokens": 256,
        "savings_by_level": savings_by_level(made.tree), "dealt": None, "advice": None,
        "forecast_reordered": None, "costs": None,
    }  # fmt: skip

    def draw(most):
        return {"now": DrawnTree.of(made, prompts, lambda ids: "<" * 500, most)}

    write_page(tmp_path / "a.html", report, draw, title="t", model="m", price=None)
    text = (tmp_path / "a.html").read_text()
    assert 100_000 < len(text.encode()) < 1_000_000
    assert "smaller prefixes are left out of the picture" in text


def test_price_and_places(tmp_path):
    assert str(Price.read("$2.5")) == "$2.50"
    assert str(Price.read("2 EUR")) == "2.00 EUR"
    assert Price.read("0.9€").text(0.00123) == "0.0012€"
    for text in ("cheap", "-1", "1.2.3", ""):
        with pytest.raises(ConfigError, match="expected a price like"):
            Price.read(text)
    source = write_lines(tmp_path / "in.jsonl", [completion("a")])
    with pytest.raises(JobError, match="does not exist: make it first"):
        plan_file(source, tmp_path, options=OPTIONS, html=tmp_path / "none" / "a.html")
    os.mkfifo(tmp_path / "pipe")
    for no_file in (source, tmp_path, tmp_path / "pipe"):
        with pytest.raises(
            JobError, match=r"is (not a regular file|the input): choose another file for --html"
        ):
            plan_file(source, tmp_path, options=OPTIONS, html=no_file)
    (tmp_path / "link.html").symlink_to("target.html")
    plan_file(source, tmp_path, options=OPTIONS, html=tmp_path / "link.html")
    assert (tmp_path / "link.html").is_symlink()
    assert (tmp_path / "target.html").is_file()
    with pytest.raises(ConfigError, match="price_per_hour needs a prediction"):
        plan_file(source, tmp_path, options=OPTIONS, predicts=False, price=Price(1))


@pytest.mark.parametrize("lines", [[], [{"custom_id": "x"}], [completion("a")]])
def test_jobs_with_nothing_to_share_have_a_report(tmp_path, lines):
    source = write_lines(tmp_path / "in.jsonl", lines)
    page = tmp_path / "work" / "a.html"
    report = plan(source, page, keep_going=True, price=Price(1))
    assert json.dumps(report)
    assert "No two prompts begin alike." in page.read_text()


# ------------------------------------------------------------------------------------ the browser


@pytest.fixture(scope="module")
def browser():
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    if not (BROWSER and DRIVER):
        pytest.skip("no chromium and chromedriver (Debian: chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


def test_the_page_in_a_browser(page, browser):
    def blocks():
        return browser.execute_script(
            "return [...document.querySelectorAll('#tree .block')].map(b => [b.dataset.node, "
            "b.width.baseVal.value, b.height.baseVal.value])"
        )

    def press(keys):
        browser.switch_to.active_element.send_keys(keys)

    def about():
        return browser.execute_script("return document.getElementById('about').innerText")

    browser.set_window_size(390, 800)
    browser.get(page.as_uri())
    assert browser.title == "<b>evil.jsonl: what the job shares"
    overflow = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert browser.execute_script(overflow) == 0
    browser.set_window_size(1200, 900)
    now = blocks()
    browser.execute_script("document.querySelector('[data-tree=reordered]').click()")
    drawn = blocks()
    assert len(drawn) > len(now)
    # As wide as tokens, as high as requests.
    found = re.search(r'id="data">(.*?)</script>', page.read_text(), re.DOTALL)
    nodes = json.loads(found.group(1))["reordered"]
    (number, width, height), *_ = drawn
    _, tokens, requests, *_ = nodes[int(number)]
    for other, *box in drawn:
        sizes = nodes[int(other)][1] * width / tokens, nodes[int(other)][2] * height / requests
        assert box == pytest.approx(sizes, rel=1e-3)
    browser.execute_script("document.querySelector('#tree .block').focus()")
    press("\ue014")  # right
    assert "requests\n10" in about()
    assert EVIL.split("\u2028")[0][:20] in about()
    press("\ue007")  # Enter
    zoomed = blocks()
    assert zoomed[0][2] == pytest.approx(height, rel=1e-3)
    press("\ue00c")  # Escape
    assert len(blocks()) == len(drawn)
    assert browser.title == "<b>evil.jsonl: what the job shares"
    assert [entry["message"] for entry in browser.get_log("browser")] == []
