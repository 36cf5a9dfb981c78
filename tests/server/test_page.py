"""The page in a real browser, headless, under its Content-Security-Policy."""

from __future__ import annotations

import shutil

import pytest

from onestem.server.page.reference import api_page
from tests.server.page_states import EVIL, RUNS, START, state
from tests.server.page_stub import PAGE, Stub, serving

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
By = pytest.importorskip("selenium.webdriver.common.by").By
WebDriverWait = pytest.importorskip("selenium.webdriver.support.ui").WebDriverWait

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    not (BROWSER and DRIVER), reason="no chromium and chromedriver (Debian: chromium-driver)"
)


@pytest.fixture(scope="module")
def browser():
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    driver.set_window_size(1366, 768)
    yield driver
    driver.quit()


@pytest.fixture
def page(browser):
    """(browser, stub) with the page loaded; what the browser complains of fails the test."""
    stub = Stub()
    stub.say(state())
    with serving(stub) as url:
        browser.get_log("browser")
        browser.get(url)
        until(browser, lambda: text(browser, "engine") == "engine running")
        yield browser, stub
        browser.get("about:blank")
    complaints = [entry["message"] for entry in browser.get_log("browser")]
    assert [entry for entry in complaints if "/internal/" not in entry] == []


def until(browser, condition):
    WebDriverWait(browser, 20, poll_frequency=0.05).until(lambda _: condition())


def text(browser, name):
    return browser.find_element(By.ID, name).text


def script(browser, body):
    return browser.execute_script(body)


def rectangles(browser):
    """Run id -> (x, y, width, height, class), as drawn."""
    found = script(
        browser,
        "return [...document.querySelectorAll('#tree rect.run')].map(r => [Number(r.dataset.run), "
        "...['x', 'y', 'width', 'height'].map(n => r[n].baseVal.value), r.getAttribute('class')])",
    )
    return {run: tuple(rest) for run, *rest in found}


def test_the_tree_has_tokens_as_width_and_readers_as_colour(page):
    browser, _ = page
    drawn = rectangles(browser)
    assert drawn.keys() == {run[0] for run in RUNS}
    scale = drawn[1][2] / 800
    for run, _, start, tokens, *_ in RUNS:
        assert drawn[run][0] == pytest.approx(start * scale, abs=0.01)
        assert drawn[run][2] == pytest.approx(tokens * scale, abs=0.01)
    # Nine readers, one, two, none.
    for run, level in ((1, 4), (2, 1), (3, 2), (6, 0)):
        assert f"readers-{level}" in drawn[run][4]
    assert len(browser.find_elements(By.CSS_SELECTOR, "#tree rect.missing")) == 1
    assert len(browser.find_elements(By.CSS_SELECTOR, "#tree rect.pin")) == 2
    assert "7 smaller runs" in text(browser, "left-out")


def test_a_run_is_as_high_as_what_continues_it(page):
    browser, _ = page
    drawn = rectangles(browser)
    row = drawn[2][3]
    assert [drawn[run][3] / row for run in (1, 2, 3, 4, 5, 6)] == pytest.approx([3, 1, 2, 1, 1, 1])
    top, bottom = drawn[1][1], drawn[1][1] + drawn[1][3]
    assert all(top <= drawn[run][1] < bottom for run in (2, 3, 4, 5))
    assert drawn[6][1] >= bottom


def test_a_run_tells_what_it_is(page):
    browser, stub = page
    browser.find_element(By.CSS_SELECTOR, "[data-run='1']").click()
    for part in ("800, from 0 to 800", "9 running", "by prefix support", "You are a helpful"):
        assert part in text(browser, "run")
    browser.switch_to.active_element.send_keys("\ue014\ue015")  # right, down
    assert "run 1" in text(browser, "run")
    assert "50 of 200" in text(browser, "run")
    assert "interactive; other keys never match it" in text(browser, "run")
    # It stays chosen when the tree changes.
    changed = state(121)
    changed["runs"][2]["computed"] = 180
    stub.say(changed)
    until(browser, lambda: "180 of 200" in text(browser, "run"))


def test_text_of_prompts_is_never_html(page):
    browser, _ = page
    browser.find_element(By.CSS_SELECTOR, "[data-run='3']").click()
    assert EVIL in text(browser, "run")
    assert EVIL in text(browser, "prefixes")
    assert EVIL in text(browser, "requests")
    assert browser.find_elements(By.CSS_SELECTOR, "img, b:not(.tile b)") == []
    assert browser.title == "Onestem"


def test_memory_by_owner(page):
    browser, _ = page
    legend = text(browser, "memory-legend")
    for part in (
        "cache 4000",
        "prefix support 800",
        "key alice 736",
        "free 60k",
        "of 65.5k tokens",
    ):
        assert part in legend
    widths = [
        piece.size["width"] for piece in browser.find_elements(By.CSS_SELECTOR, "#memory > div")
    ]
    total = sum(widths)
    assert [width / total for width in widths] == pytest.approx(
        [4000 / 65536, 800 / 65536, 736 / 65536, 60000 / 65536], abs=0.005
    )


def test_every_requests_reuse_is_explained(page):
    browser, _ = page
    rows = [row.text for row in browser.find_elements(By.CSS_SELECTOR, "#requests tbody tr")]
    wanted = [
        "812 of 900 prompt tokens shared with prefix support; at token 812 it goes on with",
        "899 of 900 prompt tokens shared with an earlier request; all but the last token",
        "from token 500 what is stored belongs to another key",
        "Nothing of 900 prompt tokens shared; what followed token 0 was evicted",
        "Nothing was looked up",
    ]
    assert len(rows) == len(wanted)
    for row, part in zip(rows, wanted):
        assert part in row
    # What cannot be seen is written out.
    assert f"goes on with {EVIL} where \\n is stored" in rows[0]


def test_tables_and_tiles(page):
    browser, _ = page
    assert "support, version 2 operator ready 800 3.17 MiB 9 90" in text(browser, "prefixes")
    assert "computing, 25%" in text(browser, "prefixes")
    assert "batch_12 alice in progress 125 of 1000 5" in text(browser, "jobs")
    assert "80%\nof all prompt tokens came from KV memory" in text(browser, "tiles")
    assert "12\nsequences running" in text(browser, "tiles")
    assert "123\nreads of stored tokens saved: one read served several sequences" in text(
        browser, "tiles"
    )
    assert "embedded, float32 on cpu" in text(browser, "model")


def test_tiers_are_told_apart(page):
    browser, stub = page
    more = state()
    for shown in (more["totals"], more["requests"][0]):
        shown |= {"host_tokens": shown["cached_tokens"] // 4, "disk_tokens": 0}
    more["totals"]["disk_tokens"] = 100000
    stub.say(more)
    told = "the cache: 50% from KV memory, 20% from host memory, 10% from files"
    until(browser, lambda: f"80%\nof all prompt tokens came from {told}" in text(browser, "tiles"))
    rows = [row.text for row in browser.find_elements(By.CSS_SELECTOR, "#requests tbody tr")]
    assert rows[0].endswith("Copied back: 203 from host memory.")
    assert not any("Copied back" in row for row in rows[1:])


def test_lines_grow_with_the_seconds_that_events_bring(page):
    browser, stub = page
    points = (
        "return [...document.querySelectorAll('#charts path')].map("
        "p => (p.getAttribute('d').match(/[ML]/g) || []).length)"
    )
    assert script(browser, points) == [120] * 10
    more = state(125)
    # An event holds what is new; seconds that are known already count once.
    more["history"] = {name: column[110:] for name, column in more["history"].items()}
    more["history"]["ttft_p99"][-2] = None
    stub.say(more)
    until(browser, lambda: script(browser, points)[0] == 125)
    assert sorted(script(browser, points)) == [124, *[125] * 9]
    assert "−1 min" not in text(browser, "charts")
    stub.say(state(900))
    until(browser, lambda: script(browser, points) == [301] * 10)
    assert "−5 min" in text(browser, "charts")


def test_an_engine_that_is_down_is_said_clearly(page):
    browser, stub = page
    assert not browser.find_element(By.ID, "banner").is_displayed()
    down = {"state": "down", "restarts": 3, "since": START, "error": "killed by signal 9"}
    stub.say(state(engine=down))
    until(browser, lambda: "The engine is down since" in text(browser, "banner"))
    assert "killed by signal 9" in text(browser, "banner")
    assert "restarts so far: 3" in text(browser, "banner")
    assert text(browser, "engine") == "engine down"
    stub.say(state(engine={**down, "state": "starting"}))
    until(browser, lambda: text(browser, "engine") == "engine starting")
    stub.say(state())
    until(browser, lambda: not browser.find_element(By.ID, "banner").is_displayed())


def said(browser):
    """(role, text) of each message that is shown."""
    shown = browser.find_elements(By.CSS_SELECTOR, "#chat-log p")
    return [(one.get_attribute("class"), one.text) for one in shown]


def ask(browser, text):
    browser.find_element(By.ID, "chat-text").send_keys(text + "\n")


def piece(text):
    return {"choices": [{"delta": {"content": text}}]}


def end(stub, prompt, cached, answer):
    tokens = {"prompt_tokens": prompt, "completion_tokens": answer}
    usage = tokens | {"prompt_tokens_details": {"cached_tokens": cached}}
    for one in ({"choices": [], "usage": usage}, b"data: [DONE]\n\n", None):
        stub.answers.put(one)


def test_a_chat_streams_and_says_what_was_shared(page):
    browser, stub = page
    browser.find_element(By.ID, "chat-system").send_keys("Be kind.")
    stub.answers.put({"choices": [{"delta": {"role": "assistant"}}]})
    for data in (b": waits\n\n", b'data: {"choices": [{"del', b'ta": {"content": "Hel"}}]}\n\n'):
        stub.answers.put(data)
    ask(browser, "Hi")
    until(browser, lambda: said(browser) == [("user", "Hi"), ("assistant", "Hel")])
    assert text(browser, "chat-send") == "Stop"
    stub.answers.put(piece("lo " + EVIL))
    end(stub, 30, 20, 5)
    until(browser, lambda: text(browser, "chat-send") == "Send")
    told = (
        "Prompt 30 tokens: 20 shared with what was computed before, 10 computed. Answer 5 tokens."
    )
    assert text(browser, "chat-cost") == told
    assert said(browser)[1] == ("assistant", f"Hello {EVIL}")
    assert browser.title == "Onestem"

    end(stub, 40, 39, 1)
    ask(browser, "And then?")
    until(browser, lambda: "39 shared" in text(browser, "chat-cost"))
    turns = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": f"Hello {EVIL}"},
        {"role": "user", "content": "And then?"},
    ]
    assert [body["messages"] for body in stub.bodies] == [turns[:2], turns]
    browser.find_element(By.ID, "chat-reset").click()
    assert said(browser) == []
    end(stub, 9, 0, 1)
    ask(browser, "Anew")
    until(browser, lambda: "9 computed" in text(browser, "chat-cost"))
    assert stub.bodies[-1]["messages"] == [turns[0], {"role": "user", "content": "Anew"}]


def test_a_chat_shows_reasoning_and_sends_it_back(page):
    browser, stub = page
    for part in ("The sky", " is blue."):
        stub.answers.put({"choices": [{"delta": {"reasoning_content": part}}]})
    stub.answers.put(piece("Blue."))
    end(stub, 9, 0, 5)
    ask(browser, "Which colour?")
    shown = [("user", "Which colour?"), ("reasoning", "The sky is blue."), ("assistant", "Blue.")]
    until(browser, lambda: said(browser) == shown)
    until(browser, lambda: text(browser, "chat-send") == "Send")
    end(stub, 20, 9, 1)
    ask(browser, "Why?")
    until(browser, lambda: "9 shared" in text(browser, "chat-cost"))
    answer = {"role": "assistant", "content": "Blue.", "reasoning_content": "The sky is blue."}
    assert stub.bodies[-1]["messages"][1] == answer
    stub.answers.put({"choices": [{"delta": {"reasoning_content": "Hm."}}]})
    stub.answers.put({"error": {"message": "the engine died"}})
    before = said(browser)
    ask(browser, "Go on")
    until(browser, lambda: text(browser, "chat-cost") == "the engine died")
    assert said(browser) == before


def test_a_chat_that_is_stopped_stays_and_one_that_fails_does_not(page):
    browser, stub = page
    stub.answers.put(piece("One, two"))
    ask(browser, "Count")
    until(browser, lambda: said(browser)[1:] == [("assistant", "One, two")])
    browser.find_element(By.ID, "chat-send").click()
    until(browser, lambda: text(browser, "chat-send") == "Send")
    stub.answers.put(None)
    until(browser, lambda: stub.answers.empty())
    stub.answers.put({"error": {"message": "the engine died"}})
    stub.answers.put(None)
    ask(browser, "Go on")
    until(browser, lambda: text(browser, "chat-cost") == "the engine died")
    assert said(browser) == [("user", "Count"), ("assistant", "One, two")]
    assert browser.find_element(By.ID, "chat-text").get_attribute("value") == "Go on"
    assert [one["content"] for one in stub.bodies[-1]["messages"]] == ["Count", "One, two", "Go on"]
    stub.answers.put(None)  # nothing, and no end
    ask(browser, "")
    until(browser, lambda: text(browser, "chat-cost") == "the answer was cut off")


def test_a_chat_asks_for_a_key_where_one_is_needed(page):
    browser, stub = page
    stub.key = "sk-1"
    key = browser.find_element(By.ID, "chat-key")
    assert not key.is_displayed()
    ask(browser, "Hi")
    until(browser, key.is_displayed)
    assert text(browser, "chat-cost") == "no valid API key"
    assert said(browser) == []
    browser.get_log("browser")  # the 401
    key.send_keys("sk-1")
    stub.answers.put(piece("Hello"))
    end(stub, 3, 0, 1)
    ask(browser, "")
    until(browser, lambda: "3 computed" in text(browser, "chat-cost"))
    assert said(browser) == [("user", "Hi"), ("assistant", "Hello")]


def test_without_events_it_asks(page):
    browser, stub = page
    assert text(browser, "link") == "live"
    stub.events = False
    stub.hang_up()
    until(browser, lambda: text(browser, "link") == "asked every two seconds")
    changed = state(130)
    changed["queue"]["running"] = 77
    stub.state = changed
    until(browser, lambda: "77\nsequences running" in text(browser, "tiles"))
    stub.events = True
    until(browser, lambda: text(browser, "link") == "live")


def test_a_server_that_is_gone_is_said_clearly(page):
    browser, stub = page
    stub.up = False
    stub.hang_up()
    until(browser, lambda: "The server does not answer" in text(browser, "banner"))
    assert text(browser, "engine") == "no connection"
    stub.up = True
    until(browser, lambda: text(browser, "engine") == "engine running")


def test_it_fits_a_laptop_and_loads_nothing_from_elsewhere(page):
    browser, stub = page
    assert script(browser, "return document.documentElement.scrollWidth <= window.innerWidth")
    loaded = script(browser, "return performance.getEntriesByType('resource').map(e => e.name)")
    origin = script(browser, "return location.origin")
    assert loaded
    assert all(name.startswith(origin + "/") for name in loaded)
    files = {path.name for path in PAGE.iterdir()} - {"index.html"}
    assert {f"/page/{name}" for name in files} <= set(stub.asked)


def test_dark_where_the_system_is_dark(page):
    browser, _ = page
    ground = "return getComputedStyle(document.body).backgroundColor"
    seen = []
    for scheme in ("light", "dark"):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        seen.append(script(browser, ground))
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    assert seen == ["rgb(251, 251, 249)", "rgb(20, 24, 23)"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_of_the_api_is_drawn_under_its_policy(browser, scheme):
    """With its style, by the system's light or dark, and without any other request."""
    operation = {"operationId": "f", "description": "It is `good`.", "responses": {}}
    schemas = {"Thing": {"properties": {"<b>": {"type": "integer", "description": EVIL}}}}
    document = {
        "info": {"title": "API", "version": "1", "description": ""},
        "paths": {"/f": {"get": operation}},
        "components": {"schemas": schemas},
    }
    html, headers = api_page(document)
    stub = Stub()
    stub.pages["/docs"] = html, headers["Content-Security-Policy"]
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    with serving(stub) as url:
        browser.get_log("browser")
        browser.get(f"{url}/docs")
        ground = script(browser, "return getComputedStyle(document.body).backgroundColor")
        cells = [cell.text for cell in browser.find_elements(By.CSS_SELECTOR, "#Thing td")]
        browser.get("about:blank")
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    assert ground == {"light": "rgb(251, 251, 249)", "dark": "rgb(20, 24, 23)"}[scheme]
    assert cells == ["<b>", "an integer", "", EVIL]
    assert browser.get_log("browser") == []
    assert stub.asked == ["/docs"]
