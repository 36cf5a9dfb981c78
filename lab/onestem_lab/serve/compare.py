"""The rate that each server sustains, by system prompt: our modes, and vLLM's server.

    python -m onestem_lab.serve.compare [--shape 0.1b] [--servers full,storage,off,vllm]
        [--system-tokens 64,2048] [--repeats 3] [--duration 180] [--scale 1]

All servers run side by side, and take turns: a run of one server's search, then of the next one's,
while the others idle. A search ends when the rates that held and did not are --resolution apart. A
rate holds if nine of ten requests take at most --limit seconds per output token. Short: --repeats 1
--duration 45 --scale 0.25 --resolution 0.1. On a GPU: --shape llama3.1-8b --device cuda --dtype
bfloat16 --limit 0.05 --kv-gib 40 --random-weights --sequential (one server at a time).

--start-rate is where searches begin: 10, or by server and system prompt, the first that fits
counts: off@2048=2,storage=8,10. A good guess with a small --factor saves runs.
Written to lab/results/serve-SHAPE.json; `python -m onestem_lab.serve.plot` draws it.

With --rates nothing is searched: every server is driven at each of these rates --repeats times, in
turns. --before DIR and --servers full,full-before compare with another version of ours (its
`onestem/`, with its compiled libraries).
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from onestem_lab.load.client import Target
from onestem_lab.load.crowd import default_clients
from onestem_lab.load.run import Bench, model_name
from onestem_lab.load.search import RateSearch
from onestem_lab.load.workload import Workload
from onestem_lab.results import RESULTS, ROOT, machine, write
from onestem_lab.serve.model import config_alone, servable
from onestem_lab.serve.servers import SERVERS, Setting, running

# What is asked of `full`: times the rate of another server, by tokens of system prompt.
ASKED = {
    2048: {"storage": 1.8, "off": 3.0, "vllm": 1.8},
    64: {"storage": 0.98, "off": 0.98, "vllm": 1.0},
}


def main() -> None:
    options = _options()
    names = options.servers.split(",")
    setting = Setting(
        model=_model(options),
        dtype=options.dtype,
        device=options.device,
        kv_gib=options.kv_gib,
        threads=options.threads,
        peers=options.peers,
        logs=options.work,
        random_weights=options.random_weights,
        before=options.before,
    )
    result: dict[str, Any] = {
        "command": "python -m onestem_lab.serve.compare " + " ".join(sys.argv[1:]),
        "machine": machine(),
        "shape": options.shape,
        "dtype": options.dtype,
        "limit": options.limit,
        "resolution": options.resolution,
        "kv_gib": options.kv_gib,
        "searches": [],
    }
    path = RESULTS / f"serve-{options.shape}{options.suffix}.json"
    if options.rates:
        result["rates"] = result.pop("searches")
        for entry in _at_rates(names, setting, options):
            result["rates"].append(entry)
            write(path, result)
        return
    for search in _searches(names, setting, options):
        result["searches"].append(search)
        result["against"] = _against(result["searches"])
        # After each: a run that is cut off keeps what it has.
        write(path, result)
    for line in _table(result["against"]):
        print(line)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="0.1b")
    parser.add_argument("--servers", default="full,storage,off,vllm", help="in this order")
    parser.add_argument("--system-tokens", default="64,2048")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--duration", type=float, default=180.0, help="seconds of arrivals of a run"
    )
    parser.add_argument("--scale", type=float, default=1.0, help="of question and answer lengths")
    parser.add_argument("--apps", type=int, default=1)
    parser.add_argument("--limit", type=float, default=0.5)
    parser.add_argument("--start-rate", type=_start_rates, default=_start_rates("1"))
    parser.add_argument(
        "--rates", type=lambda text: [float(rate) for rate in text.split(",")], default=[]
    )
    parser.add_argument("--before", type=Path, help="another version of ours")
    parser.add_argument(
        "--warm-up",
        type=float,
        default=15.0,
        help="seconds of arrivals before the first run: servers that compile do so for the row "
        "counts that they meet",
    )
    parser.add_argument("--factor", type=float, default=2.0, help="until a search is bracketed")
    parser.add_argument("--resolution", type=float, default=0.04)
    parser.add_argument(
        "--random-weights", action="store_true", help="our servers make weights up: it saves time"
    )
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--kv-gib", type=float, default=4.0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "serve")
    parser.add_argument("--peers", type=Path, default=ROOT / "build" / "peers" / "vllm")
    parser.add_argument(
        "--clients", type=int, default=default_clients(), help="processes that send requests"
    )
    parser.add_argument("--sequential", action="store_true", help="one server at a time")
    parser.add_argument("--suffix", default="", help="appended to the result file's name")
    options = parser.parse_args()
    for name in options.servers.split(","):
        if not SERVERS.fullmatch(name):
            parser.error(f"server is {name!r}, expected full, storage, off, vllm or vllm-eager")
        if options.random_weights and name.startswith("vllm"):
            parser.error("--random-weights is for our own servers: vLLM would not have the same")
        if name.endswith("-before") and options.before is None:
            parser.error(f"{name} needs --before")
    options.work.mkdir(parents=True, exist_ok=True)
    return options


def _start_rates(text: str) -> list[tuple[str, str, float]]:
    """Entries (server, tokens, rate) of --start-rate; "" stands for any."""
    rates = []
    for entry in text.split(","):
        where, _, rate = entry.rpartition("=")
        server, _, tokens = where.partition("@")
        rates.append((server, tokens, float(rate)))
    return rates


def _start_rate(options: argparse.Namespace, name: str, system_tokens: int) -> float:
    for server, tokens, rate in options.start_rate:
        if server in ("", name) and tokens in ("", str(system_tokens)):
            return float(rate)
    raise SystemExit(f"--start-rate has none for {name}@{system_tokens}: add one for all")


def _model(options: argparse.Namespace) -> Path:
    make = config_alone if options.random_weights else servable
    return make(options.work, options.shape, options.dtype)


def _searches(
    names: list[str], setting: Setting, options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Finished searches of all servers, one length of system prompt after the other."""
    for group in [[name] for name in names] if options.sequential else [names]:
        with ExitStack() as stack:
            urls = {name: stack.enter_context(running(name, setting)) for name in group}
            for system_tokens in map(int, options.system_tokens.split(",")):
                yield from _searches_of(urls, system_tokens, options)


def _searches_of(
    urls: dict[str, str], system_tokens: int, options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    with _benches(urls, system_tokens, options) as benches:
        yield from _take_turns(benches, system_tokens, options)


@contextmanager
def _benches(
    urls: dict[str, str], system_tokens: int, options: argparse.Namespace
) -> Iterator[dict[str, Bench]]:
    """Of each server, warmed up."""
    with ExitStack() as stack:
        benches = {
            name: stack.enter_context(closing(_bench(url, system_tokens, options)))
            for name, url in urls.items()
        }
        for name, bench in benches.items():
            print(f"{name}: warm-up", file=sys.stderr, flush=True)
            _warm_up(bench, _start_rate(options, name, system_tokens), options.warm_up)
        yield benches


FIGURES = ("normalised", "ttft", "per_token", "between_chunks")


def _at_rates(
    names: list[str], setting: Setting, options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Runs at fixed rates, the servers in turns. Who is first in a turn pays for the pause before
    it, so an even number of turns is fair."""
    with ExitStack() as stack:
        urls = {name: stack.enter_context(running(name, setting)) for name in names}
        for system_tokens in map(int, options.system_tokens.split(",")):
            with _benches(urls, system_tokens, options) as benches:
                for rate in options.rates:
                    yield _at_rate(benches, rate, system_tokens, options.repeats)


def _at_rate(
    benches: dict[str, Bench], rate: float, system_tokens: int, repeats: int
) -> dict[str, Any]:
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in benches}
    for repeat in range(repeats):
        for name in list(benches)[:: -1 if repeat % 2 else 1]:
            runs[name].append(benches[name].measure(rate))
    medians = {name: _medians(found) for name, found in runs.items()}
    first = medians[next(iter(benches))]
    print(f"system prompt of {system_tokens}, {rate} requests/s, {repeats} runs each:")
    for name, found in medians.items():
        shown = ", ".join(
            f"{figure} {value:.4g}" + (f" ({value / first[figure]:.3f})" if first[figure] else "")
            for figure, value in found.items()
        )
        print(f"  {name:14} {shown}", flush=True)
    return {"system_tokens": system_tokens, "rate": rate, "medians": medians, "runs": runs}


def _medians(runs: list[dict[str, Any]]) -> dict[str, float]:
    """Over runs, of a figure's mean and 99th percentile over requests."""
    found = {
        f"{figure}_{of}": statistics.median(run[figure][of] for run in runs)
        for figure in FIGURES
        for of in ("mean", "p99")
    }
    rate = statistics.median(run["output_tokens_per_s"] for run in runs)
    return {
        **found,
        "output_tokens_per_s": rate,
        "wrong": sum(r["failed"] + r["torn"] for r in runs),
    }


def _bench(url: str, system_tokens: int, options: argparse.Namespace) -> Bench:
    load = Workload(
        seed=options.seed, apps=options.apps, system_tokens=system_tokens, scale=options.scale
    )
    target = Target(model_name(url))
    return Bench(
        url,
        target,
        load,
        limit=options.limit,
        duration=options.duration,
        clients=options.clients,
    )


def _warm_up(bench: Bench, rate: float, seconds: float) -> None:
    bench.warm_up()
    count = bench.workload.count_within(rate, seconds)
    replace(bench, requests=count, clients=1).measure(rate)


def _take_turns(
    benches: dict[str, Bench], system_tokens: int, options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    starts = {name: _start_rate(options, name, system_tokens) for name in benches}
    for repeat in range(options.repeats):
        searches = {
            name: RateSearch(starts[name], resolution=options.resolution, factor=options.factor)
            for name in benches
        }
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in benches}
        for name in _in_turn(benches, searches, runs, reverse=repeat % 2 == 1):
            starts[name] = searches[name].best or starts[name]
            yield {
                "server": name,
                "system_tokens": system_tokens,
                "repeat": repeat,
                "case": benches[name].describe(),
                "sustainable_rate": searches[name].best,
                "runs": runs[name],
            }


def _in_turn(
    benches: dict[str, Bench],
    searches: dict[str, RateSearch],
    runs: dict[str, list[dict[str, Any]]],
    *,
    reverse: bool,
) -> Iterator[str]:
    """Names of servers as their searches end."""
    active = list(benches)[:: -1 if reverse else 1]
    while active:
        for name in list(active):
            tokens = benches[name].workload.system_tokens
            print(f"{name}, system prompt of {tokens}: ", end="", file=sys.stderr, flush=True)
            run = benches[name].step(searches[name])
            if run is not None:
                runs[name].append(run)
                continue
            print(f"sustains {searches[name].best}", file=sys.stderr, flush=True)
            active.remove(name)
            yield name


def _against(searches: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """How many times the rate of another server `full` sustains, repeat by repeat."""
    rates: dict[int, dict[str, dict[int, float]]] = {}
    for search in searches:
        servers = rates.setdefault(search["system_tokens"], {})
        by_repeat = servers.setdefault(search["server"], {})
        by_repeat[search["repeat"]] = search["sustainable_rate"] or 0.0
    return {str(tokens): _ratios(servers, tokens) for tokens, servers in rates.items()}


def _ratios(servers: dict[str, dict[int, float]], system_tokens: int) -> dict[str, Any]:
    full = servers.get("full", {})
    out: dict[str, Any] = {}
    for name, by_repeat in servers.items():
        entry: dict[str, Any] = {"sustainable_rate": statistics.median(by_repeat.values())}
        pairs = [full[r] / rate for r, rate in by_repeat.items() if r in full and rate]
        if name != "full" and pairs:
            entry["full_against"] = {
                "median": statistics.median(pairs),
                "min": min(pairs),
                "max": max(pairs),
            }
            entry["asked"] = ASKED.get(system_tokens, {}).get(name.partition("-")[0])
        out[name] = entry
    return out


def _table(against: dict[str, dict[str, Any]]) -> Iterator[str]:
    yield "system prompt  server   requests/s  full against it  asked"
    for tokens, servers in against.items():
        for name, entry in servers.items():
            ratio = entry.get("full_against", {}).get("median")
            yield (
                f"{tokens:>13}  {name:8} {entry['sustainable_rate']:10.2f}  "
                f"{'' if ratio is None else f'{ratio:.2f}':>15}  {entry.get('asked') or ''}"
            )


if __name__ == "__main__":
    main()
