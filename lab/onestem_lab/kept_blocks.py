"""What it costs a trained model that blocks of a GGUF file stay as they are on a CPU: perplexity
and right answers, beside the same numbers in 32 and in 16 bits.

    python -m onestem_lab.kept_blocks MODEL.gguf [...] [--windows 20] [--questions 300]
        [--peer DIR --kinds q8_0,q4_0,q5_0,q5_1,q4_k_m,q6_k]

With `--kinds` the numbers of the first file are rounded to these types too, by the llama.cpp of
DIR (`lab/onestem_lab/peers/install llama_cpp DIR`); a width that is no multiple of 256 gets Q5_0,
Q5_1 or Q8_0 in place of a K type. Each form runs in a process of its own:

* `float32`: blocks become numbers of 32 bits (the oracle),
* `bfloat16`: of 16 bits,
* `rows of 16 bits`: blocks stay, and rows of products keep 16 bits (the way of AVX-512 without
  VNNI),
* `rows of bytes`: blocks stay, and rows are rounded to bytes by each group's maximum (VNNI).

Text and questions are those of `onestem_lab.quality`. What is said of two forms is of their pairs:
the mean over windows of differences of log-probabilities, answers right in one alone, and the
standard errors of both. Results: lab/results/kept-blocks.json, in which each file replaces its own.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from onestem import LLM
from onestem.models import weights
from onestem.ops.cpu.extension import ISA_VARIABLE
from onestem_lab.quality import WINDOW, by_chats, questions, window_scores
from onestem_lab.results import RESULTS, ROOT, hardware, write

ORACLE = "float32"
# dtype, whether blocks stay, instruction set (none: the machine's best)
FORMS = {
    ORACLE: ("float32", False, ""),
    "bfloat16": ("bfloat16", False, ""),
    "rows of 16 bits": ("bfloat16", True, "avx512"),
    "rows of bytes": ("bfloat16", True, "avx512_bf16"),
}


def measured(path: str, form: str, windows: int, asked: int) -> dict[str, Any]:
    """Log-probabilities by window, and answers, of a file in a form."""
    dtype, kept, _ = FORMS[form]
    if not kept:
        weights.kept_by = lambda target, quantization: lambda scheme: False
    with LLM(path, device="cpu", dtype=dtype, kv_memory="512MiB") as llm:
        scores = window_scores(llm, windows)
        answers = by_chats(llm, questions()[:asked]) if asked else []
        return {"scores": scores, "answers": answers}


def in_process(path: str, form: str, options: argparse.Namespace) -> dict[str, Any]:
    sizes = f"{options.windows}-{options.questions}"
    kept: Path = options.work / f"{Path(path).stem}-{form.replace(' ', '-')}-{sizes}.json"
    if not kept.exists():
        command = [sys.executable, "-m", __spec__.name, path, "--form", form]
        command += ["--windows", str(options.windows), "--questions", str(options.questions)]
        environment = os.environ | {ISA_VARIABLE: FORMS[form][2]}
        done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE)
        options.work.mkdir(parents=True, exist_ok=True)
        kept.write_bytes(done.stdout)
    found: dict[str, Any] = json.loads(kept.read_bytes())
    return found


def told(found: dict[str, Any], exact: dict[str, Any]) -> dict[str, Any]:
    """What a form gives, and how far it is from the oracle."""
    values, others = flat(found["scores"]), flat(exact["scores"])
    rows: dict[str, Any] = {
        "perplexity": math.exp(-fmean(values)),
        "mean difference of a log-probability": fmean(map(abs, map(float.__sub__, values, others))),
    }
    if found["answers"]:
        rows["right"] = sum(right_of(found["answers"]))
        rows["answers of float32"] = sum(map(str.__eq__, found["answers"], exact["answers"]))
    return rows


def paired(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """How much worse `one` is: the logarithm of perplexity and right answers, each with the
    standard error of its pairs."""
    pairs = zip(one["scores"], other["scores"], strict=True)
    more = [fmean(theirs) - fmean(own) for own, theirs in pairs]
    rows: dict[str, Any] = {
        "log perplexity more": [fmean(more), stdev(more) / math.sqrt(len(more))]
    }
    if not one["answers"]:
        return rows
    ours, theirs = right_of(one["answers"]), right_of(other["answers"])
    lost = sum(b and not a for a, b in zip(ours, theirs, strict=True))
    won = sum(a and not b for a, b in zip(ours, theirs, strict=True))
    spread = math.sqrt(lost + won - (lost - won) ** 2 / max(1, len(ours)))
    return rows | {"right less": [lost - won, spread], "lost, won": [lost, won]}


def right_of(answers: Sequence[str]) -> list[bool]:
    asked = questions()[: len(answers)]
    return [one.right.lower() in text.lower() for one, text in zip(asked, answers, strict=True)]


def flat(scores: Sequence[Sequence[float]]) -> list[float]:
    return [value for window in scores for value in window]


def compared(path: str, options: argparse.Namespace) -> dict[str, Any]:
    found = {form: in_process(path, form, options) for form in FORMS}
    rows: dict[str, Any] = {form: told(one, found[ORACLE]) for form, one in found.items()}
    rows["pairs"] = {
        f"{one} against {other}": paired(found[one], found[other])
        for other, one in combinations(FORMS, 2)
    }
    return rows


def rounded(source: Path, kind: str, options: argparse.Namespace) -> str:
    """The file of another type, under `options.work`; written unless it is there."""
    options.work.mkdir(parents=True, exist_ok=True)
    code = (
        "import sys; from pathlib import Path; from gguf_random import quantised; "
        "source, target, kind = sys.argv[1:]; quantised(Path(source), Path(target), kind, 2)"
    )
    target = options.work.resolve() / f"{source.stem.rpartition('.')[0]}.{kind.upper()}.gguf"
    python = options.peer.resolve() / "bin" / "python"
    command = [str(one) for one in (python, "-c", code, source.resolve(), target, kind)]
    runners = Path(__file__).parent / "peers" / "runners"
    subprocess.run(command, cwd=runners, check=True, stderr=subprocess.DEVNULL)
    return str(target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", metavar="MODEL.gguf")
    parser.add_argument("--peer", type=Path, help="llama.cpp's environment")
    parser.add_argument("--kinds", default="", help="types that the first file is rounded to")
    parser.add_argument("--windows", type=int, default=20, help=f"of {WINDOW} tokens of text")
    parser.add_argument("--questions", type=int, default=len(questions()))
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "kept-blocks",
                        help="what was found of a form is taken from there")  # fmt: skip
    parser.add_argument("--form", help="measure this one here, and print what is found")
    parser.add_argument("--out", type=Path, default=RESULTS / "kept-blocks.json")
    options = parser.parse_args()
    if options.form is not None:
        (path,) = options.models
        print(json.dumps(measured(path, options.form, options.windows, options.questions)))
        return
    files = json.loads(options.out.read_text())["files"] if options.out.exists() else {}
    kinds = [kind for kind in options.kinds.split(",") if kind]
    made = [rounded(Path(options.models[0]), kind, options) for kind in kinds]
    for path in [*options.models, *made]:
        files[Path(path).stem] = compared(path, options)
        print(path, json.dumps(files[Path(path).stem], indent=1), flush=True)
        result = {
            "command": "python -m onestem_lab.kept_blocks MODEL.gguf "
            f"--windows {options.windows} --questions {options.questions}",
            "machine": hardware("cpu"),
            "files": files,
        }
        write(options.out, result)


if __name__ == "__main__":
    main()
