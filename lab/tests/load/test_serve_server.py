"""Servers in processes of their own: ready, dead, and gone at the end."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress

import httpx2
import pytest
from typer.testing import CliRunner

from lab.tests.load.socket_server import running
from onestem.cli.app import app
from onestem.errors import ConfigError
from onestem_lab.load import server
from onestem_lab.load.server import free_port, onestem_command, serving

HEALTHY = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    asked = 0
    def do_GET(self):
        # Not ready when it is first asked.
        Handler.asked += 1
        self.send_response(200 if Handler.asked > 1 else 503)
        self.send_header("content-length", "0")
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_a_server_runs_for_the_length_of_the_block(tmp_path):
    port = free_port()
    log = tmp_path / "log"
    with serving([sys.executable, "-c", HEALTHY, str(port)], port, log=log) as url:
        assert url == f"http://127.0.0.1:{port}"
        assert httpx2.get(f"{url}/health", trust_env=False).status_code == 200
    with pytest.raises(httpx2.ConnectError):
        httpx2.get(f"{url}/health", trust_env=False)
    assert log.read_text().count('"GET /health HTTP/1.1" 200') == 2


def test_a_server_that_dies_says_why():
    command = [sys.executable, "-c", "raise SystemExit('no such model')"]
    with (
        pytest.raises(ConfigError, match="ended with code 1: no such model"),
        serving(command, free_port()),
    ):
        pytest.fail("it was never ready")


def test_sigterm_takes_the_server_along():
    port = free_port()
    code = (
        "import os, signal, sys\n"
        "from onestem_lab.load.server import serving\n"
        f"with serving([sys.executable, '-c', sys.argv[1], '{port}'], {port}):\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, HEALTHY], check=False)
    assert done.returncode == 143
    with pytest.raises(httpx2.ConnectError):
        httpx2.get(f"http://127.0.0.1:{port}/health", trust_env=False)


def test_a_killed_benchmark_takes_its_server_along(tmp_path):
    """SIGKILL: nothing is cleaned up, and the server would hold its memory and port for ever."""
    port, told = free_port(), tmp_path / "pid"
    code = (
        "import os, signal, sys\n"
        "from onestem_lab.load.server import serving\n"
        f"with serving([sys.executable, '-c', sys.argv[1], '{port}', sys.argv[2]], {port}):\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    writes = "import os, sys; open(sys.argv[2], 'w').write(str(os.getpid()))\n" + HEALTHY
    done = subprocess.run([sys.executable, "-c", code, writes, str(told)], check=False)
    assert done.returncode == -signal.SIGKILL
    with suppress(ProcessLookupError):  # it has ended, and nothing is left of it
        server_process = os.pidfd_open(int(told.read_text()))
        try:
            ended, _, _ = select.select([server_process], [], [], 30)
        finally:
            os.close(server_process)
        assert ended


def test_our_server_gets_the_options_and_a_folder_of_its_own(monkeypatch, tmp_path):
    commands = []

    @contextmanager
    def fake(command, port, *, log):
        commands.append(command)
        with running() as (url, _):
            yield url

    monkeypatch.setattr(server, "serving", fake)
    prompt = tmp_path / "support.txt"
    prompt.write_text("Be kind.")
    done = CliRunner().invoke(
        app,
        ["bench", "serve", "--share", "off", "--kv-memory", "1GiB", "--random-weights", "--json",
         "--app", f"support={prompt}", "--rate", "100", "--requests", "3", "--scale", "0.01"],
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    (command,) = commands
    given = command[command.index("serve") :]
    assert {"--share=off", "--kv-memory=1GiB", "--random-weights"} < set(given)
    assert f"--app=support={prompt}" in given
    assert any(part.startswith("--state=/") for part in given)
    result = json.loads(done.stdout)
    assert result["server"]["share"] == "off"
    assert (result["case"]["apps"], result["case"]["systems"]) == (1, 1)


def test_our_server_reads_the_file_that_the_command_reads(monkeypatch, tmp_path):
    commands = []

    @contextmanager
    def fake(command, port, *, log):
        commands.append(command)
        with running() as (url, fake_server):
            yield url
        ids = [token for body in fake_server.bodies for token in body["prompt"]]
        assert max(ids) < 302

    monkeypatch.setattr(server, "serving", fake)
    (tmp_path / "config.json").write_text('{"vocab_size": 302}')
    file, other = tmp_path / "a.toml", tmp_path / "b.toml"
    file.write_text("page_size = 8\n[serve]\nstream_interval = 2\n")
    other.write_text("random_weights = true\n")
    monkeypatch.setenv("ONESTEM_CONFIG", str(other))
    monkeypatch.setenv("ONESTEM_MODEL", str(tmp_path))
    done = CliRunner().invoke(
        app,
        ["bench", "serve", "--config", str(file), "--json", "--rate", "100", "--requests", "3",
         "--scale", "0.01", "--system-tokens", "5"],
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    (command,) = commands
    assert {f"--config={file}", f"--model={tmp_path}", "--page-size=8"} < set(command)
    assert "--random-weights" not in command


def test_options_of_the_command_are_those_of_onestem_serve(tmp_path):
    shown = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "200"}).output
    for part in onestem_command(1, tmp_path, [])[4:]:
        assert part.partition("=")[0] in shown
