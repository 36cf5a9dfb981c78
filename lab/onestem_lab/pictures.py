"""Pictures of the site and of a plan's report, light and dark, and the job of docs/plan-report.md.

    make site && python -m onestem_lab.pictures  # writes docs/site*.png and docs/plan-report*.png

Needs selenium, Pillow, chromium and chromedriver (Debian: chromium-driver). The tickets are made
up, the times are predictions for one H200.
"""

from __future__ import annotations

import argparse
import base64
import csv
import io
import random
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from onestem.batch import JobInput
from onestem.jobs import plan_file
from onestem.options import EngineOptions, InputOptions
from onestem.report import Price
from onestem_lab.results import ROOT

DOCS = ROOT / "docs"
SITE_HEIGHT = 900
TEMPLATE = (
    r"Ticket {ticket}, {time}\nProduct: {product}\n\nManual:\n{manual}\n\n"
    r"Question: {question}\nAnswer:"
)
PRODUCTS = ("router", "phone", "tablet")
PARTS = ("power key", "cover", "cable", "antenna", "display", "battery", "speaker", "side key",
         "memory card", "charger", "camera", "reset hole")  # fmt: skip
SENTENCES = (
    "Hold the {a} for {n} seconds before you touch the {b}.",
    "If the {a} stays dark, take the {b} out and wait {n} minutes.",
    "The {a} has to be replaced after {n} months, and with it the {b}.",
    "Never clean the {a} with water; a dry cloth is enough for the {b} too.",
    "A light beside the {a} blinks {n} times when the {b} is not in place.",
)
QUESTIONS = (
    "Why does the {a} blink?", "How long do I hold the {a}?", "Can I change the {a} and the {b}?",
    "The {a} is dark since yesterday, what now?", "Is the {a} safe near the {b}?",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keep", type=Path, help="folder for the job and its report")
    parser.add_argument("--site", type=Path, default=ROOT / "out" / "site")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.keep or Path(scratch)
        folder.mkdir(exist_ok=True)
        page = folder / "plan.html"
        rows = InputOptions(prompt=TEMPLATE, body='{"max_tokens": 80}', id="ticket")
        (work := Path(scratch) / "work").mkdir()
        plan_file(
            JobInput(written(folder / "tickets.csv"), rows),
            work,
            options=EngineOptions("embedded", device="h200", dtype="bfloat16"),
            price=Price.read("$3.50"),
            html=page,
        )
        with opened() as browser:
            for suffix, scheme in (("", "light"), ("-dark", "dark")):
                features = [{"name": "prefers-color-scheme", "value": scheme}]
                browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
                size(browser, SITE_HEIGHT)
                browser.get((options.site / "index.html").resolve().as_uri())
                save(browser, DOCS / f"site{suffix}.png")
                show_report(browser, page)
                save(browser, DOCS / f"plan-report{suffix}.png")


def written(path: Path, count: int = 2000) -> Path:
    """2,000 tickets about 25 manuals, in the order in which they came."""
    draw = random.Random(0)

    def sentence(forms: tuple[str, ...]) -> str:
        a, b = draw.sample(PARTS, 2)
        return draw.choice(forms).format(a=a, b=b, n=draw.randint(2, 30))

    manuals = [" ".join(sentence(SENTENCES) for _ in range(draw.randint(8, 40))) for _ in range(25)]
    with open(path, "w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["ticket", "time", "product", "manual", "question"])
        for i in range(count):
            which = min(int(draw.expovariate(0.12)), len(manuals) - 1)
            product = PRODUCTS[which % len(PRODUCTS)]
            time = f"2026-11-{1 + i // 80:02} {8 + i % 80 // 8:02}:{draw.randint(0, 59):02}"
            title = f"Manual {which + 1} of the {product}."
            question = " ".join(sentence(QUESTIONS) for _ in range(draw.randint(1, 3)))
            table.writerow([f"T-{i + 1}", time, product, f"{title} {manuals[which]}", question])
    return path


@contextmanager
def opened() -> Iterator[Any]:
    """A browser without a window."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(argument)
    options.binary_location = shutil.which("chromium")
    browser = webdriver.Chrome(
        options=options, service=webdriver.ChromeService(shutil.which("chromedriver"))
    )
    try:
        yield browser
    finally:
        browser.quit()


def show_report(browser: Any, page: Path) -> None:
    """The whole page, with the tree of the better order and a manual pointed at."""
    size(browser, SITE_HEIGHT)
    browser.get(page.resolve().as_uri())
    browser.execute_script(
        "document.querySelector('[data-tree=reordered]').click();"
        "document.querySelector('#tree .block[aria-label*=\"manual 1 \" i]')"
        "?.dispatchEvent(new MouseEvent('mouseenter'))"
    )
    size(browser, browser.execute_script("return document.documentElement.scrollHeight"))


def save(browser: Any, path: Path, colours: int = 48) -> None:
    from PIL import Image

    picture = browser.execute_cdp_cmd("Page.captureScreenshot", {})["data"]
    image = Image.open(io.BytesIO(base64.b64decode(picture))).convert("RGB")
    image.quantize(colours, dither=Image.Dither.NONE).save(path, optimize=True)


def size(browser: Any, height: int, width: int = 1040) -> None:
    found = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", found)


if __name__ == "__main__":
    main()
