"""Prompt Cache (arXiv 2311.04934): reuse of modules' attention states."""

from __future__ import annotations

from typing import Any

from onestem_lab.papers.accuracy import Accuracy
from onestem_lab.papers.applications import Applications
from onestem_lab.papers.claims import Added, Claim, Gain, Growth
from onestem_lab.papers.experiment import Cell, Experiment, points
from onestem_lab.papers.memory import TokenMemories
from onestem_lab.papers.modules import FirstTokens

__all__ = ["EXPERIMENTS"]

PAPER = "Prompt Cache"
CONTEXT = 5000  # about as many tokens as the paper's prompts have
NEW = 50
WORDS = {  # of a context, on average: LongBench (arXiv 2308.14508), its table of task statistics
    "Narrative QA": 18405,
    "2 Wiki Multi-Hop QA": 4885,
    "MuSiQue": 7798,
    "GovReport": 8169,
    "QMSum": 10546,
    "MultiNews": 2113,
    "TriviaQA": 8015,
    "Passage Retrieval": 9288,
    "Qasper": 3619,
    "Multi-field QA": 4559,
    "HotpotQA": 9149,
    "Passage Count": 11141,
}
EIGHT = tuple(WORDS)[:8]
LENGTHS = f"LongBench's mean words as tokens, at most {CONTEXT}; {NEW} tokens of question"

# Table 3; table 1 has its first eight. Data -> baselines, then cached, in the order of `MODELS`.
SCORES = {
    "Narrative QA": (19.93, 19.38, 20.37, 19.94, 10.43, 11.33, 7.14, 8.87),
    "2 Wiki Multi-Hop QA": (16.63, 13.95, 14.59, 17.69, 10.44, 13.70, 14.42, 15.07),
    "MuSiQue": (7.31, 8.57, 10.03, 12.14, 7.38, 7.32, 4.81, 5.86),
    "GovReport": (24.67, 25.37, 28.13, 28.18, 26.96, 27.49, 22.39, 23.40),
    "QMSum": (19.24, 19.46, 18.80, 18.82, 15.19, 15.51, 12.84, 12.96),
    "MultiNews": (24.33, 24.22, 25.43, 26.23, 25.42, 25.66, 20.91, 21.19),
    "TriviaQA": (13.04, 12.33, 23.19, 22.38, 10.57, 9.17, 13.31, 11.42),
    "Passage Retrieval": (7.50, 4.25, 9.08, 6.50, 3.03, 3.85, 3.00, 3.45),
    "Qasper": (17.98, 19.31, 20.90, 17.79, 10.08, 13.71, 10.64, 8.90),
    "Multi-field QA": (28.61, 29.64, 32.12, 32.37, 25.15, 27.45, 17.49, 16.65),
    "HotpotQA": (18.32, 19.34, 22.21, 23.35, 18.97, 20.11, 12.37, 13.22),
    "Passage Count": (3.33, 4.00, 2.26, 2.95, 1.53, 1.81, 1.55, 1.59),
}
MODELS = ("Llama2 7B", "Llama2 13B", "MPT 7B", "Falcon 7B")


def _first_tokens(data: tuple[str, ...], model: str) -> FirstTokens:
    return FirstTokens(
        tuple(({"data": name}, model, min(WORDS[name], CONTEXT), NEW) for name in data)
    )


def _latency(numbers: tuple[int, ...], machine: str, claims: tuple[Claim, ...]) -> Experiment:
    name, *also = (f"cache-fig{number}" for number in numbers)
    figures = ", ".join(map(str, sorted(numbers)))
    return Experiment(
        name=name,
        also=tuple(also),
        source=f"{PAPER}, figures {figures}",
        title=f"time to the first token at {len(WORDS)} data sets' lengths",
        machine=machine,
        unit="ms",
        measure=_first_tokens(tuple(WORDS), "llama2-7b"),
        claims=claims,
        theirs={"off": "baseline"},
        ratio=("device", "off"),
        better="less",
        assumed=LENGTHS,
    )


def _scores(data: tuple[str, ...]) -> tuple[Cell, ...]:
    return tuple(
        Cell({"data": f"{name}, {model}"}, series, SCORES[name][2 * i + j])
        for name in data
        for i, model in enumerate(MODELS)
        for j, series in enumerate(("baseline", "cached"))
    )


def _application(number: int, name: str, what: str) -> Experiment:
    code = name == "code"
    return Experiment(
        name=f"cache-fig{number}",
        source=f"{PAPER}, figure {number}",
        title=f"time to the first token, cached and not: {what}",
        machine="an RTX 4090",
        unit="ms",
        measure=Applications((name,)),
        claims=(Claim(text="Code: four times sooner.", number=CACHED, theirs=BASE),)
        if code
        else (),
        stand_in="an embedded model of 8M parameters",
        published=(Cell({"application": name}, "cached : baseline", 4),) if code else (),
        theirs={"off": "baseline", "cached": "cached"},
        ratio=("cached", "off"),
        better="less",
        assumed="our own example and the embedded model, unless --model names another",
    )


BASE = "the same code, all computed"
CACHED, DEVICE, HOST = (Gain(series, ("off",)) for series in ("cached", "device", "host"))


def _sooner(text: str, number: Gain, stated: tuple[float, float], **more: Any) -> Claim:
    return Claim(text=text, number=number, stated=stated, theirs=BASE, **more)


GPU = (
    _sooner("Modules in GPU memory: 3.7 to 11.7 times sooner.", DEVICE, (3.7, 11.7)),
    _sooner("... in host memory: 1.5 to 3.1.", HOST, (1.5, 3.1)),
    _sooner("Eight of the sets, in GPU memory: 5 to 10.", DEVICE, (5.0, 10.0), at={"data": EIGHT}),
    _sooner("... in host memory: 1.5 to 3.", HOST, (1.5, 3.0), at={"data": EIGHT}),
)
CPU = (_sooner("On two CPUs 9.3 to 63.7 times sooner.", DEVICE, (9.3, 63.7)),)
I9, RYZEN = "an Intel i9-13900K", "an AMD Ryzen 9 7950X"

EXPERIMENTS = (
    Experiment(
        name="cache-fig5",
        source=f"{PAPER}, figure 5",
        title="time to the first token over the tokens cached, Llama2-7B and 13B",
        claims=(
            Claim(
                text="Computing takes time in the square of the tokens: 25 times from 1K to 5K.",
                number=Growth("off", {"tokens": 1000}),
                at={"tokens": 5000},
                stated=25.0,
                theirs="1K tokens",
            ),
            Claim(
                text="Copying takes time in the tokens alone: 5 times from 1K to 5K.",
                number=Growth("host", {"tokens": 1000}),
                at={"tokens": 5000},
                stated=5.0,
                bound="most",
                theirs="1K tokens",
            ),
            Claim(
                text="The gain grows with the tokens.",
                number=HOST,
                stated=1.0,
                along="tokens",
                theirs=BASE,
            ),
            Claim(text="Ten times sooner with 3K tokens and 7B.", number=HOST, theirs=BASE),
            Claim(
                text="From 7B to 13B computing adds 7.3 times what copying adds, at 3K tokens.",
                number=Added("host", "off", {"model": "llama2-7b"}),
                at={"model": "llama2-13b", "tokens": 3000},
                stated=7.33,
                theirs=BASE,
            ),
        ),
        machine=f"an RTX 4090, an A40 and {I9}",
        unit="ms",
        measure=FirstTokens(
            tuple(
                ({"model": model, "tokens": tokens}, model, tokens, 1)
                for model in ("llama2-7b", "llama2-13b")
                for tokens in (1000, 2000, 3000, 4000, 5000)
            )
        ),
        published=(
            Cell({"model": "llama2-7b", "tokens": 3000}, "baseline", 900),
            Cell({"model": "llama2-7b", "tokens": 3000}, "cached", 90),
        ),
        theirs={"off": "baseline", "host": "cached"},
        ratio=("host", "off"),
        better="less",
        assumed="one token of new text; the published numbers are those of the RTX 4090",
    ),
    _application(6, "code", "code generation, files as modules"),
    _application(7, "tutor", "personalisation, traits as unions"),
    _application(8, "travel", "a trip, with a parameter"),
    _latency((9, 3, 10, 11), "an RTX 4090, an A100 and an A40", GPU),
    _latency((12, 4, 13), f"{I9} and {RYZEN}", CPU),
    Experiment(
        name="cache-table2",
        source=f"{PAPER}, table 2",
        title="memory of one cached token",
        machine="",
        unit="MiB",
        measure=TokenMemories(
            {
                "BERT": (12, 768, 12, 12),
                "Falcon 1B": (24, 2048, 32, 1),
                "Llama 7B": (32, 4096, 32, 32),
                "Llama 13B": (40, 5120, 40, 40),
                "MPT 30B": (48, 7168, 64, 64),
                "Falcon 40B": (60, 8192, 128, 8),
                "Llama 70B": (80, 8192, 64, 8),
                "Falcon 180B": (80, 14848, 232, 8),
            }
        ),
        published=points(
            "model",
            {
                model: {"MB/token": value}
                for model, value in {
                    "BERT": 0.03,
                    "Falcon 1B": 0.18,
                    "Llama 7B": 0.50,
                    "Llama 13B": 0.78,
                    "MPT 30B": 1.31,
                    "Falcon 40B": 1.87,
                    "Llama 70B": 2.5,
                    "Falcon 180B": 4.53,
                }.items()
            },
        ),
        theirs={"all heads": "MB/token"},
        better="less",
    ),
    Experiment(
        name="cache-table3",
        also=("cache-table1",),
        source=f"{PAPER}, tables 1 and 3",
        title=f"accuracy with cached modules (theirs: {len(WORDS)} LongBench sets)",
        machine="one GPU of 40 GB",
        unit="% right; theirs F1, ROUGE-L or accuracy",
        measure=Accuracy(),
        claims=(
            Claim(
                text="Scores with cached modules are those without, at each set and model.",
                number=Gain("anchored", ("off",)),
                theirs=BASE,
            ),
        ),
        stand_in="an embedded model and invented documents",
        published=_scores(tuple(WORDS)),
        theirs={"off": "baseline", "anchored": "cached"},
        assumed=(
            "the embedded model and its documents; `python -m onestem_lab.longbench` runs "
            "LongBench itself, given its files and a model"
        ),
    ),
)
