"""Right answers of the engine with documents that are repaired, against whole prompts.

    python -m onestem_lab.modules.answers MODEL [--dtype bfloat16] [--prompts 125]
                                          [--shares 0 0.1 0.2 0.3 0.5] [--sets written real]

Eight questions are asked about each choice of three documents (`questions`, `real`), through
`LLM.chat`. For each share: right answers, those with the whole prompt's text, prompt tokens
computed. Written to lab/results/modules-answers.json.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from onestem import LLM, SamplingParams
from onestem_lab.modules import questions, real
from onestem_lab.results import RESULTS, machine, write

SETS = {"written": questions.questions, "real": real.questions}
PARAMS = SamplingParams(temperature=0, max_tokens=12)


def answers(
    llm: LLM, asked: list[questions.Question], repair: float
) -> tuple[list[str], int, float]:
    """Texts, prompt tokens computed, and seconds."""
    chats = [
        [
            {"role": "system", "content": questions.SYSTEM},
            {"role": "user", "content": one.text},
            {"role": "assistant", "content": one.start},
        ]
        for one in asked
    ]
    documents = [[{"title": doc.title, "text": doc.text} for doc in one.documents] for one in asked]
    began = time.perf_counter()
    outputs = llm.chat(
        chats,
        PARAMS,
        documents=documents,
        repair=repair,
        add_generation_prompt=False,
        continue_final_message=True,
    )
    seconds = time.perf_counter() - began
    computed = sum(one.metrics.num_computed_tokens for one in outputs)
    return [one.outputs[0].text for one in outputs], computed, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--prompts", type=int, default=125, help="choices of documents")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.0, 0.1, 0.2, 0.3, 0.5])
    parser.add_argument("--sets", nargs="+", choices=SETS, default=["written"])
    parser.add_argument("--kv-memory", default="2GiB")
    parser.add_argument("--out", type=Path, default=RESULTS / "modules-answers.json")
    options = parser.parse_args()
    llm = LLM(
        options.model, dtype=options.dtype, device=options.device, kv_memory=options.kv_memory
    )
    result: dict[str, Any] = {
        "command": " ".join(["python -m onestem_lab.modules.answers", *sys.argv[1:]]),
        "model": options.model.name,
        "dtype": options.dtype,
        "machine": machine(),
    }
    for name in options.sets:
        asked = list(SETS[name](range(options.prompts)))
        whole: list[str] = []
        rows: dict[str, Any] = {}
        for share in (1.0, *options.shares):
            texts, computed, seconds = answers(llm, asked, share)
            whole = whole or texts
            rows[f"{share:g}"] = {
                "right": sum(one.judge(text) for one, text in zip(asked, texts, strict=True)),
                "equal": sum(a == b for a, b in zip(texts, whole, strict=True)),
                "tokens computed": computed,
                "seconds": round(seconds, 1),
            }
            print(name, len(asked), share, rows[f"{share:g}"], flush=True)
        result[name] = {"questions": len(asked), "shares": rows}
    write(options.out, result)


if __name__ == "__main__":
    main()
