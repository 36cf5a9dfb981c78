"""Right answers of the engine with documents that are repaired, against whole prompts.

    python -m onestem_lab.modules.answers MODEL [--dtype bfloat16] [--prompts 125]
                                          [--shares 0 0.1 0.2 0.3 0.5] [--sets written real]
                                          [--lead-in 0 600 1000]

Eight questions are asked about each choice of three documents (`questions`, `real`), through
`LLM.chat`. For each share: right answers, those that the whole prompt alone or this share alone has
(`lost`, `won`), those with the whole prompt's text, and prompt tokens computed. Further by how much
less likely its first token is, and each token of its text. A share of 1 asks whole prompts again,
found in the cache: what that changes is the spread of a row. Written to
lab/results/modules-answers.json.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from onestem import LLM, SamplingParams
from onestem.request import Answer
from onestem_lab.modules import questions, real
from onestem_lab.results import RESULTS, machine, write

SETS = {"written": questions.questions, "real": real.questions}
PARAMS = SamplingParams(temperature=0, max_tokens=12, logprobs=20)


def answers(
    llm: LLM,
    asked: list[questions.Question],
    repair: float,
    params: SamplingParams | list[SamplingParams] = PARAMS,
    lead_in: dict[str, str] | None = None,
) -> tuple[list[Answer], float]:
    """Outputs, and seconds. lead_in: see `LLM.chat`."""
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
        params,
        documents=documents,
        repair=repair,
        lead_in=lead_in,
        add_generation_prompt=False,
        continue_final_message=True,
    )
    seconds = time.perf_counter() - began
    return outputs, seconds


def token_logprob(
    llm: LLM,
    asked: list[questions.Question],
    whole: list[Answer],
    repair: float,
    lead_in: dict[str, str] | None = None,
) -> float:
    """The mean log-probability of the tokens of whole prompts' texts."""
    pairs = [(one, its.outputs[0].text) for one, its in zip(asked, whole, strict=True)]
    params = [SamplingParams(choices=(text,)) for _, text in pairs if text]
    outputs, _ = answers(llm, [one for one, text in pairs if text], repair, params, lead_in)
    found = [one.outputs[0] for one in outputs]
    return fmean((one.cumulative_logprob or 0.0) / len(one.token_ids) for one in found)


def document_like(tokens: int) -> dict[str, str]:
    """A document like the written ones."""
    one = questions.document(random.Random("lead-in"), "Greta", tokens)
    return {"title": one.title, "text": one.text}


def row(
    asked: list[questions.Question], whole: list[Answer], outputs: list[Answer]
) -> dict[str, Any]:
    """What a share's outputs are beside those of whole prompts."""
    pairs = [(a.outputs[0], b.outputs[0]) for a, b in zip(whole, outputs, strict=True)]
    right = [
        (one.judge(its.text), one.judge(mine.text))
        for one, (its, mine) in zip(asked, pairs, strict=True)
    ]
    less = []
    for its, mine in pairs:
        assert its.logprobs is not None
        assert mine.logprobs is not None
        token, found = its.token_ids[0], mine.logprobs[0]
        least = min(one.logprob for one in found.values())  # at most that, where it is not shown
        its_own = its.logprobs[0][token].logprob
        less.append(its_own - (found[token].logprob if token in found else least))
    return {
        "right": sum(mine for _, mine in right),
        "lost": right.count((True, False)),
        "won": right.count((False, True)),
        "equal": sum(its.text == mine.text for its, mine in pairs),
        "first token, log-probability less": round(fmean(less), 4),
        "tokens computed": sum(one.metrics.num_computed_tokens for one in outputs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--prompts", type=int, default=125, help="choices of documents")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.0, 0.1, 0.2, 0.3, 0.5])
    parser.add_argument("--sets", nargs="+", choices=SETS, default=["written"])
    help_ = "tokens of a `lead_in` like the written documents; 0: none, the engine's own prose"
    parser.add_argument("--lead-in", type=int, nargs="+", default=[0], help=help_)
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
        whole: list[Answer] = []
        rows: dict[str, Any] = {}
        best = 0.0
        for share, tokens in [(1.0, 0), *product(options.shares, options.lead_in)]:
            lead_in = document_like(tokens) if tokens else None
            outputs, seconds = answers(llm, asked, share, lead_in=lead_in)
            label = f"{share:g}, behind {tokens} tokens" if tokens else f"{share:g}"
            label = label if whole else "whole"
            whole = whole or outputs
            rows[label] = {**row(asked, whole, outputs), "seconds": round(seconds, 1)}
            of_text = token_logprob(llm, asked, whole, share, lead_in)
            best = of_text if label == "whole" else best
            rows[label]["each token, log-probability less"] = round(best - of_text, 4)
            print(name, len(asked), label, rows[label], flush=True)
        result[name] = {"questions": len(asked), "shares": rows}
    write(options.out, result)


if __name__ == "__main__":
    main()
