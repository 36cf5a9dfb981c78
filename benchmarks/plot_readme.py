"""The README's picture: seconds of whole jobs beside vLLM on the same machine, light and dark.

    python -m benchmarks.plot_readme

Reads benchmarks/results/peers-CASE-amx.json, writes docs/beside-vllm-light.svg and -dark.svg.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]

JOBS = {
    "0.1b-60x8": "480 questions over 60 documents, shuffled",
    "0.1b-1x64": "64 requests behind one prefix of 4,096",
    "0.1b-4x16": "64 requests over 4 prefixes of 1,000",
    "0.5b-1x64": "0.5B: 64 behind one prefix of 4,096",
    "0.1b-64x1": "64 unrelated prompts",
    "0.5b-64x1": "0.5B: 64 unrelated prompts",
}
THEMES = {
    "light": {"ink": "#1f2328", "soft": "#59636e", "onestem": "#2a7f62", "vllm": "#b4bac2"},
    "dark": {"ink": "#f0f6fc", "soft": "#9198a1", "onestem": "#3fb98f", "vllm": "#5b6470"},
}
LEFT, WIDTH, BAR, ROW, TOP = 300, 720, 12, 40, 34


def main() -> None:
    results = {
        case: json.loads((ROOT / f"benchmarks/results/peers-{case}-amx.json").read_text())
        for case in JOBS
    }
    for theme, colours in THEMES.items():
        path = ROOT / "docs" / f"beside-vllm-{theme}.svg"
        path.write_text(drawn(results, colours))


def drawn(results: dict[str, dict[str, Any]], colours: dict[str, str]) -> str:
    """An SVG: for each job a bar of each engine, in parts of the slower one's seconds."""
    parts = [
        _text(LEFT, 20, "Onestem", colours["onestem"], weight=600),
        _text(LEFT + 72, 20, "vLLM", colours["soft"], weight=600),
        _text(WIDTH - 4, 20, "seconds, less is better", colours["soft"], anchor="end"),
    ]
    room = WIDTH - LEFT - 120
    for number, (case, name) in enumerate(JOBS.items()):
        seconds = results[case]["median_seconds"]
        times = results[case]["onestem_against"]["vllm"]["median"]
        ours, theirs = seconds["onestem"], seconds["vllm"]
        top = TOP + ROW * number
        parts.append(_text(LEFT - 12, top + 17, name, colours["ink"], anchor="end"))
        for place, (engine, value) in enumerate((("onestem", ours), ("vllm", theirs))):
            width, y = room * value / max(ours, theirs), top + place * (BAR + 2)
            parts.append(
                f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" height="{BAR}" rx="2" '
                f'fill="{colours[engine]}"/>'
            )
            told = f"{value:.1f}" if engine == "vllm" else f"{value:.1f}  ({times:.1f}x)"
            parts.append(_text(LEFT + width + 6, y + BAR - 2, told, colours["ink"], size=11))
    height = TOP + ROW * len(JOBS)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="Seconds of whole jobs, Onestem and vLLM">\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _text(
    x: float, y: float, text: str, fill: str, *, anchor: str = "start", size: int = 13,
    weight: int = 400,
) -> str:  # fmt: skip
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-family="system-ui, sans-serif" font-size="{size}" '
        f'font-weight="{weight}" text-anchor="{anchor}" fill="{fill}">{text}</text>'
    )


if __name__ == "__main__":
    main()
