"""Plan jobs of millions of prompts: seconds and memory of each stage.

    python -m onestem_lab.plan_stream [--prompts 100000 1000000 10000000] [--replicas 8 64 1024]
        [--folder DIR] [--out FILE]

Prompts of about 500 tokens: one of 8 headers of 32 tokens, a document of 150 to 550, a question of
60 to 176. Pareto numbers of questions (1.1, 20,000 at most) are about one document; their order is
random.
Tokens are drawn log-uniformly from 32,768, so that unlike texts begin alike by chance as words do.
The spool is written as `onestem plan` writes it from lines; reading and tokenising lines are
measured apart, with `--read`, since they go on by the line. Needs 4 KB of disk for each prompt.

Replicas are Llama-3.1-8B in bf16 on H200s. Their costs are added up; what the one with most of them
takes is predicted.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import numpy as np

from onestem.batch import JobInput, Rules, SpooledPrompts
from onestem.batch.first_lines import FirstLines
from onestem.batch.first_pass import write_spool
from onestem.batch.spool import LINE, Spool
from onestem.batch.workplace import Workplace
from onestem.cost import Work
from onestem.engine.text.tokenizer import Tokenizer
from onestem.forecasts import Dealt, Target, dealt_parts
from onestem.models.config import ModelConfig
from onestem.models.find import find_model
from onestem.options import EngineOptions
from onestem.planner import planner_of
from onestem.planner.sort import IntArray
from onestem_lab.results import write

MODEL, DEVICE = "shape:llama3.1-8b", "h200"
VOCABULARY_BITS = 15
HEADERS, HEADER = 8, 32
DOCUMENT, OWN = (150, 550), (60, 176)
LARGEST = 20_000
MAX_TOKENS = 100
TEXT = 1 << 26  # tokens, of which prompts are pieces
STRIDE = 50
BLOCK = 20_000  # prompts written at once
READ_TEXTS = 20_000


class Job:
    """Which document each prompt is about, and how long its parts are."""

    def __init__(self, prompts: int) -> None:
        rng = np.random.default_rng(0)
        sizes = np.minimum(2 * (1 + rng.pareto(1.1, prompts // 2 + 2)), LARGEST).astype(np.int64)
        sizes = sizes[: int(np.searchsorted(np.cumsum(sizes), prompts)) + 1]
        sizes[-1] -= sizes.sum() - prompts
        self.documents = np.repeat(np.arange(len(sizes)), sizes)
        rng.shuffle(self.documents)
        self.prefix = rng.integers(*DOCUMENT, len(sizes))
        self.own = rng.integers(*OWN, prompts)
        self._own_at = rng.integers(0, TEXT - OWN[1], prompts)
        exponent = rng.random(TEXT, np.float32) * VOCABULARY_BITS
        self._text = np.exp2(exponent).astype(np.int32)

    def __len__(self) -> int:
        return len(self.documents)

    def lengths(self, requests: slice) -> IntArray:
        return HEADER + self.prefix[self.documents[requests]] + self.own[requests]

    def ids(self, requests: slice) -> np.ndarray:
        """Token ids of some prompts, one prompt after the other."""
        text, parts = self._text, []
        document = self.documents[requests]
        # No two documents begin at the same place of the text.
        places = document * STRIDE % (TEXT - DOCUMENT[1])
        for kind, at, length, own_at, own in zip(
            (document % HEADERS).tolist(),
            places.tolist(),
            self.prefix[document].tolist(),
            self._own_at[requests].tolist(),
            self.own[requests].tolist(),
            strict=True,
        ):
            parts += [
                text[kind * HEADER : (kind + 1) * HEADER],
                text[at : at + length],
                text[own_at : own_at + own],
            ]
        return np.concatenate(parts)


def write_job(prompts: int, place: Workplace) -> None:
    """The spool of a job, as `write_spool` makes it."""
    job, first_id, first_byte = Job(prompts), 0, 0
    with (
        place.ids.open("wb") as ids,
        place.requests.open("wb") as requests,
        place.lines.open("wb") as table,
    ):
        for begin in range(0, prompts, BLOCK):
            part = slice(begin, min(prompts, begin + BLOCK))
            flat = job.ids(part)
            flat.tofile(ids)
            records = [
                b'{"custom_id": "%d", "kind": "completion", "sampling": '
                b'{"max_tokens": %d, "temperature": 0}}\n' % (i, MAX_TOKENS)
                for i in range(part.start, part.stop)
            ]
            requests.write(b"".join(records))
            rows = np.empty((len(records), len(LINE)), np.int64)
            lengths, sizes = job.lengths(part), np.array([len(record) for record in records])
            rows[:, 0] = np.arange(part.start, part.stop) + 1
            rows[:, 1] = first_id + np.cumsum(lengths) - lengths
            rows[:, 2] = lengths
            rows[:, 3] = first_byte + np.cumsum(sizes) - sizes
            rows[:, 4] = sizes - 1
            rows[:, 5] = MAX_TOKENS
            ends = np.cumsum(lengths)
            prompts_of_part = np.split(flat, ends[:-1])
            rows[:, 6] = [zlib.crc32(prompt.tobytes()) for prompt in prompts_of_part]
            rows[:, 7] = [zlib.crc32(record[:-1]) for record in records]
            rows.tofile(table)
            first_id += int(lengths.sum())
            first_byte += int(sizes.sum())


class Stages:
    """Seconds and memory of each stage of a process."""

    def __init__(self) -> None:
        self.found: dict[str, dict[str, float]] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        began, spent = time.monotonic(), time.process_time()
        with _most_held() as most:
            yield
        self.found[name] = {
            "seconds": round(time.monotonic() - began, 2),
            "processor_seconds": round(time.process_time() - spent, 2),
            "most_held_mib": most[0] >> 20,
            "peak_rss_mib": _status("VmHWM") >> 20,
        }
        print(name, self.found[name], file=sys.stderr, flush=True)


def _status(name: str) -> int:
    """Bytes that the kernel says of this process."""
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith(name))
    return 1024 * int(line.split()[1])


@contextmanager
def _most_held() -> Iterator[list[int]]:
    """Most bytes that the process holds meanwhile; files that are mapped are not counted."""
    most, ended = [0], threading.Event()

    def look() -> None:
        while True:
            most[0] = max(most[0], _status("RssAnon"))
            if ended.wait(0.05):
                return

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield most
    finally:
        ended.set()
        thread.join()


def measure(place: Workplace, replicas: list[int]) -> dict[str, Any]:
    """Plan the job of a spool, predict it, deal it."""
    options = EngineOptions(model=MODEL, device=DEVICE)
    target = Target.of(options, ModelConfig.from_directory(find_model(MODEL)), predicts=True)
    stages = Stages()
    with stages("start"):
        assert target.rates is not None
    with closing(Spool(place, "plan")) as spool:
        prompts = SpooledPrompts(spool, spool.is_request.nonzero()[0])
        with stages("plan"):
            plan = planner_of(options, target.kv_tokens)(
                prompts, output_lengths=spool.output_lengths(np.arange(len(prompts)))
            )
        with stages("answers"):
            answers = prompts.answers()
        work = Work.of(plan, spool.max_output, answers)
        with stages("predict"):
            whole = target.forecast(work, "full")
        dealt: list[dict[str, Any]] = []
        for count in replicas:
            dealt.append({"replicas": count})
            for how in get_args(Dealt):
                with stages(f"deal {count} {how}"):
                    owner, cuts = target.deal(plan, work, "full", count, how)
                with stages(f"replicas {count} {how}"):
                    dealt[-1][how] = summed(target, work, owner, count) | {"num_cuts": cuts}
    report = asdict(plan.report)
    report["largest_groups"] = report["largest_groups"][:3]
    return {
        "prompts": len(prompts),
        "nodes": plan.tree.num_nodes,
        "report": report,
        "one_replica": asdict(whole),
        "dealt": dealt,
        "stages": stages.found,
    }


def summed(target: Target, work: Work, owner: IntArray, replicas: int) -> dict[str, Any]:
    """What the replicas come to. Their costs add up; the time of who has most is predicted."""
    weights = target.weights(work, "full")
    computed, seconds, largest = 0, [], None
    for part in dealt_parts(work, owner, replicas):
        own = part.own()
        prompts = int(own.sum() + part.opened().sum())
        sampled = part.outputs * (weights.sampled + weights.context * own)
        computed += prompts
        seconds.append(weights.prompt * prompts + float(sampled.sum()))
        if seconds[-1] == max(seconds):
            largest = part
    assert largest is not None
    last = target.forecast(largest, "full")
    return {
        "computed_prompt_tokens": computed,
        "seconds": last.seconds,
        "peak_kv_tokens": last.peak_kv_tokens,
        "added_seconds": {"first": min(seconds), "last": max(seconds)},
    }


def measure_reading(folder: Path) -> dict[str, Any]:
    """Lines a second of the first pass: token ids, and texts of as many tokens."""
    path = find_model("embedded")
    tokenizer = Tokenizer.from_directory(path)
    assert tokenizer is not None
    job, found = Job(READ_TEXTS), {}
    words = [f"{word:x}" for word in range(2**VOCABULARY_BITS)]
    for kind in ("token ids", "texts"):
        with (folder / "in.jsonl").open("w") as file:
            for i in range(READ_TEXTS):
                ids = job.ids(slice(i, i + 1)).tolist()
                prompt = ids if kind == "token ids" else " ".join(words[one] for one in ids[:200])
                body = {"prompt": prompt, "max_tokens": MAX_TOKENS}
                line = {"custom_id": str(i), "method": "POST", "url": "/v1/completions"}
                file.write(json.dumps(line | {"body": body}) + "\n")
        place = Workplace(folder / "read.jsonl")
        place.folder.mkdir(exist_ok=True)
        began = time.process_time()
        source = JobInput(folder / "in.jsonl")
        write_spool(
            source,
            place,
            "plan",
            Rules(tokenizer=tokenizer, validate=lambda request: None),
            on_chunk=lambda num_bytes: None,
            first_lines=FirstLines(source, keep_going=False, tell=None),
        )
        spent = time.process_time() - began
        tokens = place.ids.stat().st_size // 4
        found[kind] = {
            "tokens_per_line": tokens / READ_TEXTS,
            "lines_per_processor_second": READ_TEXTS / spent,
            "tokens_per_processor_second": tokens / spent,
        }
    return found


def in_process(*given: object) -> dict[str, Any]:
    """This module's answer, from a process of its own."""
    command = [sys.executable, "-m", "onestem_lab.plan_stream", *map(str, given)]
    answer: dict[str, Any] = json.loads(subprocess.run(command, check=True, stdout=-1).stdout)
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, nargs="+", default=[100_000, 1_000_000, 10_000_000])
    parser.add_argument("--replicas", type=int, nargs="+", default=[8, 64, 1024])
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--keep", action="store_true", help="Leave spools in the folder.")
    parser.add_argument("--read", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--spool", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.spool is not None:
        print(json.dumps(measure(Workplace(given.spool), given.replicas)))
        return
    found: dict[str, Any] = {"model": MODEL, "device": DEVICE, "jobs": []}
    with tempfile.TemporaryDirectory(dir=given.folder) as temporary:
        if given.read:
            found["reading"] = measure_reading(Path(temporary))
        for prompts in given.prompts:
            place = Workplace((given.folder or Path(temporary)) / f"{prompts}.jsonl")
            if not place.lines.exists():
                place.folder.mkdir()
                write_job(prompts, place)
            found["jobs"].append(in_process("--spool", place.output, "--replicas", *given.replicas))
            if not given.keep:
                shutil.rmtree(place.folder)
            if given.out is not None:
                write(given.out, found)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
