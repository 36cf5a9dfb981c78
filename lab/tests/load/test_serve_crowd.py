"""A run dealt out to client processes: the same requests, each sent once, one set of figures."""

from __future__ import annotations

import json
from contextlib import closing

from lab.tests.load.socket_server import running
from onestem_lab.load.client import Target
from onestem_lab.load.crowd import ALONE, Part, hopeless
from onestem_lab.load.drive import Hopeless
from onestem_lab.load.figures import Outcome
from onestem_lab.load.run import Bench
from onestem_lab.load.workload import Workload

LOAD = Workload(system_tokens=5, scale=0.02, apps=2)


def bench(url: str, **options) -> Bench:
    return Bench(url, Target("fake-model"), LOAD, requests=13, **options)


def prompts(bodies) -> list[str]:
    return sorted(json.dumps([body["prompt"], body["max_tokens"]]) for body in bodies)


def test_processes_send_what_one_would_have_sent():
    with running() as (url, server):
        alone = bench(url).measure(300)
    sent = prompts(server.bodies)
    with running() as (url, server), closing(bench(url, clients=2)) as crowd:
        together = crowd.measure(300)
        first = prompts(server.bodies)
        hurried = crowd.measure(300, cut=True)  # the same processes, other questions
        assert len(server.bodies) == 26
    assert first == sent
    for name in ("requests", "answered", "failed", "torn", "output_tokens", "held"):
        assert together[name] == alone[name]
    assert hurried["answered"] == 13
    assert crowd.describe()["clients"] == 2


def test_a_run_is_hopeless_by_what_all_clients_have_missed(monkeypatch):
    from onestem_lab.load import crowd

    monkeypatch.setitem(crowd._shared, "missed", [0, 0])
    late = Outcome(0, 0, arrival=0.0, asked_tokens=1)
    first = hopeless(1.0, Part(0, 2), 30)
    second = hopeless(1.0, Part(1, 2), 30)
    assert not first([late, late], 5.0)  # two of thirty
    assert not second([late], 5.0)
    assert second([late, late], 5.0)
    assert first([late, late], 5.0)
    assert type(hopeless(1.0, ALONE, 30)) is Hopeless
