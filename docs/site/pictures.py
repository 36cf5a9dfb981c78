"""Draws the pictures of docs/concepts.md from plans of real steps and jobs; see `scripts/docs`.

A step's picture has a line for each query row and a column for each run, as wide as its tokens.
What a row may see is filled; a run that several rows see alike is one block, since it is read once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

import numpy as np

from onestem import LLM, SamplingParams
from onestem.ops.plan import AttentionPlan
from onestem.planner import plan_job

__all__ = ["PICTURES", "draw_all"]

PICTURES = Path(__file__).parents[1] / "pictures"
ROW, GAP, LEFT, TOP, WIDTH = 18, 6, 88, 44, 640
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #3c4043; }
.shared { fill: #1a73e8; } .own { fill: #9aa0a6; } .line { stroke: #dadce0; }
.number { fill: #fff; font-weight: 600; }
.a { fill: #1a73e8; } .b { fill: #e8710a; } .c { fill: #188038; }
@media (prefers-color-scheme: dark) {
  text { fill: #dadce0; } .line { stroke: #3c4043; } .own { fill: #80868b; }
  .number { fill: #202124; }
  .shared, .a { fill: #8ab4f8; } .b { fill: #fcad70; } .c { fill: #81c995; }
}
"""


@dataclass
class Step:
    """What a step's plan says, copied while it stands."""

    num_rows: int
    runs: np.ndarray  # tokens of each run
    spans: np.ndarray


def steps_of(llm: LLM, run: Callable[[LLM], object]) -> list[Step]:
    """The plans of all steps while something runs."""
    seen: list[Step] = []
    batch_rows = llm.engine.batch_rows
    apply = batch_rows.apply

    def watched(changes: object) -> None:
        apply(changes)
        if batch_rows.inputs.plans:
            seen.append(copied(next(iter(batch_rows.inputs.plans.values()))))

    batch_rows.apply = watched
    try:
        run(llm)
    finally:
        del batch_rows.apply
    return seen


def copied(plan: AttentionPlan) -> Step:
    return Step(plan.num_rows, plan.runs[:, 2].copy(), plan.spans.copy())


def draw_step(step: Step, title: str) -> str:
    """A step as SVG."""
    spans = [span for span in step.spans.tolist() if span[4] > 0]
    used = sorted({span[2] for span in spans}, key=lambda run: first_of(spans, run))
    lengths = {run: max(s[4] + (s[1] - 1) * s[5] for s in spans if s[2] == run) for run in used}
    room = WIDTH - LEFT - GAP * len(used)
    weight = {run: 10 + length**0.5 * 6 for run, length in lengths.items()}
    scale = room / sum(weight.values())
    left, places = float(LEFT), {}
    for run in used:
        places[run] = (left, weight[run] * scale)
        left += weight[run] * scale + GAP
    parts = [text(LEFT, 16, title)]
    for row in range(step.num_rows):
        y = TOP + row * ROW
        parts.append(f'<line class="line" x1="{LEFT}" x2="{WIDTH}" y1="{y}" y2="{y}"/>')
        parts.append(text(8, y + 13, f"row {row}"))
    for row, rows, run, first, end, moves in spans:
        x, width = places[run]
        part = width / lengths[run]
        y = TOP + row * ROW
        kind = "shared" if rows > 1 and not moves else "own"
        if not moves:
            parts.append(
                rectangle(kind, x + first * part, y + 1, (end - first) * part, rows * ROW - 2)
            )
        for j in range(rows if moves else 0):
            seen = (end + j - first) * part
            parts.append(rectangle(kind, x + first * part, y + j * ROW + 1, seen, ROW - 2))
    for run in used:
        x, width = places[run]
        if width >= 24:
            parts.append(text(x + width / 2, TOP - 6, str(lengths[run]), anchor="middle"))
    return svg(TOP + step.num_rows * ROW + 8, parts, title)


def first_of(spans: list[list[int]], run: int) -> tuple[int, int]:
    """Where a run stands in the picture: outer runs before those below them."""
    mine = [span for span in spans if span[2] == run]
    return (min(s[0] for s in mine), -sum(s[1] for s in mine))


def draw_order(prompts: list[list[int]], colours: list[str], title: str) -> str:
    """A job in the order of its input, and as it is planned."""
    plan = plan_job(prompts)
    cell = (WIDTH - LEFT - 8) / len(prompts)
    parts = [text(LEFT, 16, title)]
    for line, (name, order) in enumerate(
        (("as given", range(len(prompts))), ("as planned", plan.order.tolist()))
    ):
        y = TOP + line * 48
        parts.append(text(8, y + 18, name))
        for place, index in enumerate(order):
            x = LEFT + place * cell
            parts.append(rectangle(colours[index], x, y, cell - 3, 28))
            parts.append(text(x + cell / 2 - 1, y + 18, str(index), "number", "middle"))
    report = plan.report
    told = f"{report.logical_prompt_tokens} prompt tokens, {report.processed_tokens} computed"
    parts.append(text(LEFT, TOP + 100, told))
    return svg(TOP + 112, parts, title)


def rectangle(kind: str, x: float, y: float, width: float, height: float) -> str:
    return (
        f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
        ' rx="2"/>'
    )


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<text{named} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def svg(height: float, parts: list[str], title: str) -> str:
    body = "\n".join(parts)
    box = f"0 0 {WIDTH + 8} {height:.0f}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}" role="img">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n{body}\n</svg>\n"
    )


GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
MODULES = """<schema name="s">
<module name="a">The museum is in the town of Eapra.</module>
<module name="b">The ticket price is 64 pounds, and the director is Opulm Lushot.</module>
</schema>"""


def ids(start: int, count: int) -> list[int]:
    """Token ids that no other call gives."""
    return list(range(300 + start, 300 + start + count))


def pictures() -> Iterator[tuple[str, str]]:
    with LLM(device="cpu", dtype="float32", kv_memory="32MiB", max_step_tokens=16) as llm:
        prefix = ids(0, 40)
        asked = [prefix + ids(100 * i, 4 + i) for i in (1, 2, 3, 4)]
        steps = steps_of(llm, lambda llm: llm.generate(asked, GREEDY))
        yield "runs", draw_step(steps[-8], "Four decodes behind one prefix of 40 tokens")
        problems = [prefix + ids(100 * i, 16) for i in (5, 6)]
        three = GREEDY.replace(n=3)
        steps = steps_of(llm, lambda llm: llm.generate(problems, three))
        yield "tree", draw_step(steps[-4], "Two problems behind one header, three answers each")
        several = [prefix + ids(700 + i, 9) for i in (0, 20, 40)] + [ids(900, 40)]
        steps = steps_of(llm, lambda llm: llm.generate(several, GREEDY))
        yield (
            "mixed",
            draw_step(last_mixed(steps), "A mixed step: decodes, and a chunk of a prompt"),
        )
        llm.add_schema(MODULES)
        imports = ("<a/>Where?", "<a/><b/>What does it cost?", "<b/>Who?")
        markup = [f'<prompt schema="s">{one}</prompt>' for one in imports]
        steps = steps_of(llm, lambda llm: llm.generate_pml(markup, GREEDY))
        yield "modules", draw_step(steps[-4], "Three prompts that import two modules")
    documents = [ids(0, 40), ids(200, 60), ids(400, 30)]
    place = [0, 1, 2, 1, 0, 2, 1, 0, 2, 0, 1, 2]
    prompts = [documents[one] + ids(1000 + 20 * i, 8) for i, one in enumerate(place)]
    colours = ["abc"[one] for one in place]
    yield "order", draw_order(prompts, colours, "Twelve questions about three documents")


def last_mixed(steps: list[Step]) -> Step:
    """The last step that has decodes and a chunk of a prompt."""
    return [step for step in steps if {True, False} <= {s[5] > 0 and s[1] > 1 for s in step.spans}][
        -1
    ]


def draw_all(folder: Path = PICTURES) -> None:
    folder.mkdir(exist_ok=True)
    for name, drawn in pictures():
        (folder / f"{name}.svg").write_text(drawn)


if __name__ == "__main__":
    draw_all()
