"""Can a tenant tell from its time to first token what another tenant has asked?

    python -m onestem_lab.serve.tenants [--probes 500] [--prompt-tokens 512] [--short]

Two keys, alice and bob, and a server with the embedded model. Each probe: a fresh prompt; alice
sends it, or another one of the same length (a coin from the seed); then bob sends it and notes the
time to his first token. A classifier that calls the quick ones "alice has sent this" is as good as
its area under the ROC curve (AUC, the probability that a primed probe is quicker than another one;
0.5 is a guess): asked is at most 0.55. A control, interleaved with the probes: the same with bob
himself in alice's place (the method sees what there is to see: AUC near 1). Written to
lab/results/serve-tenants.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx2
import numpy as np

from onestem_lab.load.client import Target, open_client
from onestem_lab.load.figures import Outcome, distribution
from onestem_lab.load.run import model_name
from onestem_lab.load.server import free_port, onestem_command, serving
from onestem_lab.load.workload import FIRST_ID, Ask
from onestem_lab.results import RESULTS, machine, write

KEYS = {"alice": "key-of-alice-0001", "bob": "key-of-bob-0002"}
LIMIT = 0.55
VOCAB = 2560  # of the embedded model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--probes", type=int, default=500)
    parser.add_argument("--controls", type=int, default=100, help="probes with bob priming himself")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--short", action="store_true", help="40 probes, no result file")
    options = parser.parse_args()
    if options.short:
        options.probes, options.controls = 40, 20
    most = (VOCAB - FIRST_ID) // 2
    if options.probes + options.controls > most:
        parser.error(f"probes and controls together are at most {most}")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        url = stack.enter_context(_server(folder))
        found = asyncio.run(_measure(url, options))
    result = {
        "command": "python -m onestem_lab.serve.tenants " + " ".join(sys.argv[1:]),
        "machine": machine(),
        "prompt_tokens": options.prompt_tokens,
        **found,
        "limit": LIMIT,
        "good": found["other_tenant"]["auc"] <= LIMIT
        and found["other_tenant"]["cached_tokens"] == 0
        and found["same_tenant"]["auc"] > 0.9,
    }
    print(json.dumps({key: value for key, value in result.items() if key != "seconds"}, indent=1))
    if not options.short:
        path = RESULTS / "serve-tenants.json"
        write(path, result)
    sys.exit(not result["good"])


def _server(folder: Path) -> Any:
    (folder / "keys").write_text("".join(f"{name}:{key}\n" for name, key in KEYS.items()))
    port = free_port()
    options = ["--model=embedded", "--kv-memory=256MiB", f"--api-key-file={folder / 'keys'}"]
    return serving(onestem_command(port, folder, options), port)


async def _measure(url: str, options: argparse.Namespace) -> dict[str, Any]:
    rng = np.random.default_rng(options.seed)
    target = Target(model_name(url, KEYS["bob"]))
    kinds = ["alice"] * options.probes + ["bob"] * options.controls
    rng.shuffle(kinds)
    firsts = rng.permutation(np.arange(FIRST_ID, VOCAB)).tolist()
    found: dict[str, list[tuple[bool, float, int]]] = {"alice": [], "bob": []}
    async with (
        open_client(url, KEYS["alice"], 60.0) as alice,
        open_client(url, KEYS["bob"], 60.0) as bob,
    ):
        clients = {"alice": alice, "bob": bob}
        for number, kind in enumerate(kinds):
            prompt, other = rng.integers(FIRST_ID, VOCAB, (2, options.prompt_tokens)).tolist()
            # No two prompts begin alike: what is cached was asked before as it stands.
            prompt[0], other[0] = firsts[2 * number : 2 * number + 2]
            primed = bool(rng.integers(2))
            await _first_token(clients[kind], target, prompt if primed else other)
            seconds, cached = await _first_token(bob, target, prompt)
            # The first few are slower for reasons of their own, whatever they are.
            if number >= 4:
                found[kind].append((primed, seconds, cached))
    return {
        "other_tenant": classified(found["alice"]),
        "same_tenant": classified(found["bob"]),
    }


async def _first_token(
    client: httpx2.AsyncClient, target: Target, prompt: list[int]
) -> tuple[float, int]:
    """Seconds to the first token, and how much of the prompt came from the cache."""
    began = asyncio.get_running_loop().time()
    outcome = Outcome(0, 0, 0.0, 2)
    await target.send(client, Ask(0, 0, [], prompt, 2), outcome, began)
    if not outcome.ok:
        raise RuntimeError(f"a probe failed: {outcome.failure or outcome.faults}")
    return outcome.token_times[0] - outcome.sent, outcome.cached_tokens


def classified(probes: Sequence[tuple[bool, float, int]]) -> dict[str, Any]:
    """AUC of the quickest classifier, its standard error, and what went into it."""
    primed = [seconds for was, seconds, _ in probes if was]
    others = [seconds for was, seconds, _ in probes if not was]
    return {
        "probes": len(probes),
        "primed": len(primed),
        "auc": auc(primed, others),
        "standard_error": ((len(probes) + 1) / (12 * len(primed) * len(others))) ** 0.5,
        "cached_tokens": sum(cached for _, _, cached in probes),
        "seconds_primed": distribution(primed),
        "seconds_others": distribution(others),
    }


def auc(quicker: Sequence[float], slower: Sequence[float]) -> float:
    """How often a value of the first is below one of the second, ties half (Mann-Whitney)."""
    values = np.concatenate([quicker, slower])
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    below = ranks[len(quicker) :].sum() - len(slower) * (len(slower) + 1) / 2
    return float(below / (len(quicker) * len(slower)))


if __name__ == "__main__":
    main()
