"""BatchLLM (arXiv 2412.03594): large jobs planned by what they share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from onestem.bench import BatchCase
from onestem.lengths import Lengths, Pareto, Poisson
from onestem.options import Levels
from onestem.paper.attention import AttentionSweep, Decodes, Mixed
from onestem.paper.experiment import Cell, Experiment, Measure, points
from onestem.paper.jobs import JobRuns, Mode, PlanSavings, Setting, job
from onestem.paper.trace import StepRows

__all__ = ["EXPERIMENTS"]

PAPER = "BatchLLM"
A100 = "an A100-80GB"
LRU = {"levels": "none"}
PLANNED = Mode("planned")
INPUT_ORDER = Mode("input order", "storage", LRU)
SORTED = Mode("sorted", "storage", {"levels": "none", "order": "sorted"})
OFF = Mode("off", "off", LRU)
CAPPED = {"max_num_seqs": 256}
QUERIES = Poisson(2.05)
DOCUMENTS_PER_REQUEST = 1 / 2.39  # as drawn
INDUSTRY = (
    "an instruction of 40 tokens, documents of about 1,530, and queries of about 30, shuffled; 30% "
    "of the documents have one query, the others 3 on average, so that 58.1% can be saved at most"
)
# What vLLM leaves of an A100-80GB, about 50 GiB, in tokens of each model.
LLAMA_8B_KV, QWEN_7B_KV = 400_000, 900_000


def _job(
    requests: int,
    degree: int,
    prefix: Lengths,
    own: Lengths,
    output: Lengths = 100,
) -> BatchCase:
    return job(requests // degree, (degree,), (prefix,), own, output)


def _industry(requests: int) -> BatchCase:
    """Section 4.2.2: an instruction, documents and queries; outputs as in the other jobs."""
    documents = round(requests * DOCUMENTS_PER_REQUEST)
    return job(1, (documents, QUERIES), (40, Poisson(1530)), Poisson(30), 100)


def _lengths(model: str, requests: int = 6400, *, poisson: bool = False, **weights: Any) -> Measure:
    """Requests of three lengths at several sharing degrees (section 4.2.1)."""

    def tokens(count: int) -> Lengths:
        return Poisson(count) if poisson else count

    return JobRuns(
        settings=tuple(
            Setting(
                {"prefix/own": f"{prefix}/{own}", "degree": degree},
                _job(requests, degree, tokens(prefix), tokens(own), tokens(100)),
                model,
            )
            for prefix, own in ((2000, 200), (2000, 1000), (1000, 1000))
            for degree in (2, 4, 8, 16)
        ),
        modes=(PLANNED, INPUT_ORDER, SORTED),
        **weights,
    )


def _sharing(requests: int) -> tuple[tuple[dict[str, int], BatchCase], ...]:
    """Sharing degrees by prefix lengths, 200 own tokens, 100 sampled (figures 7 and 9)."""
    by_degree = [(degree, 2000) for degree in (2, 4, 8, 16)]
    by_prefix = [(16, prefix) for prefix in (1000, 4000, 8000, 16000)]
    return tuple(
        ({"degree": degree, "prefix": prefix}, _job(requests, degree, prefix, 200))
        for degree, prefix in (*by_degree, *by_prefix)
    )


def _two_levels(name: str, prefixes: tuple[int, int]) -> tuple[dict[str, str], BatchCase]:
    """Table 3: 50 groups of 64 subgroups of 2 prompts of 1,000 tokens."""
    own = 1000 - sum(prefixes)
    return {"setting": name}, job(50, (64, 2), prefixes, own, 100)


TABLE3 = (_two_levels("A", (490, 11)), _two_levels("B", (400, 101)))
LEVELS: tuple[Levels, ...] = ("none", "heuristic", "one", "all")


def _kernel(prefix: int, own: int, group: int, decodes: int) -> tuple[dict[str, object], Decodes]:
    name = f"{prefix}/{own}/{'all' if group == decodes else group}"
    step = Decodes(prefix=prefix, own=own, degree=group, groups=decodes // group)
    return {"step": f"{decodes} decodes", "prefix/own/group": name}, step


KERNELS = tuple(
    _kernel(prefix, own, group, decodes)
    for decodes in (32, 256)
    for prefix, own, group in (
        (256, 2048, decodes),
        (2048, 256, decodes),
        (2048, 256, 16),
    )
)
MIXED = tuple(
    (
        {"step": "7 prompts, 256 decodes", "prefix/own/group": f"{prefix}/{own}/all"},
        Mixed(prefix=prefix, own=own, chunks=7, decodes=256),
    )
    for prefix, own in ((256, 2048), (2048, 256))
)
VLLM = "vLLM with prefix caching"
LRU_TOKENS = "lru: requests one after another through a prefix cache of {:,} tokens, as vLLM's"
THEIRS = {"planned": "BatchLLM", "input order": VLLM, "sorted": "vLLM, input sorted", "off": "vLLM"}


def _throughput(
    letter: str, title: str, measure: Measure, machine: str = A100, assumed: str = ""
) -> Experiment:
    published: tuple[Cell, ...] = ()
    if letter == "a":
        at = {"prefix/own": "2000/200", "degree": 16}
        values = {"BatchLLM": 18.0, VLLM: 6.0, "vLLM, input sorted": 13.02}
        published = tuple(Cell(at, series, value) for series, value in values.items())
    return Experiment(
        name=f"batch-fig6{letter}",
        source=f"{PAPER}, figure 6{letter}",
        title=title,
        claim="1.4 to 3 times vLLM's throughput, 1.2 to 2.5 times SGLang's.",
        machine=machine,
        unit="requests/s",
        measure=measure,
        published=published,
        theirs=THEIRS,
        ratio=("planned", "input order"),
        across="degree",
        assumed=assumed,
    )


BY_LENGTHS = "throughput by lengths:"
BIG = ("llama3.1-70b", 800)
IN_4_BITS = f"{BY_LENGTHS} 800 requests, Llama-3.1-70B in 4 bits"
FOUR_BITS = "random weights rounded to 4 bits, in symmetric groups of 128, in place of GPTQ's"

EXPERIMENTS = (
    _throughput("a", f"{BY_LENGTHS} 6,400 requests, Llama-3.1-8B", _lengths("llama3.1-8b")),
    _throughput("b", f"{BY_LENGTHS} 6,400 requests, Qwen2.5-14B", _lengths("qwen2.5-14b")),
    _throughput("c", IN_4_BITS, _lengths(*BIG, quantization="int4"), assumed=FOUR_BITS),
    _throughput(
        "d",
        f"{IN_4_BITS}, on two GPUs",
        _lengths(*BIG, quantization="int4", ranks=2),
        "two A100-80GB",
        FOUR_BITS,
    ),
    _throughput(
        "e",
        "the same as 6a with lengths drawn from Poisson distributions",
        _lengths("llama3.1-8b", poisson=True),
    ),
    Experiment(
        name="batch-fig7",
        source=f"{PAPER}, figure 7",
        title="throughput over the sharing degree and the prefix, 6,400 requests",
        claim="1.7 times vLLM's at degree 2, 10.8 times at degree 16 and prefixes of 16,000.",
        machine=A100,
        unit="requests/s",
        measure=JobRuns(
            settings=tuple(Setting(at, case, "llama3.1-8b") for at, case in _sharing(6400)),
            modes=(PLANNED, INPUT_ORDER),
        ),
        published=(
            Cell({"degree": 2, "prefix": 2000}, f"BatchLLM : {VLLM}", 1.7),
            Cell({"degree": 16, "prefix": 16000}, VLLM, 0.49),
            Cell({"degree": 16, "prefix": 16000}, "BatchLLM", 10.8 * 0.49),
        ),
        theirs=THEIRS,
        ratio=("planned", "input order"),
    ),
    Experiment(
        name="batch-fig9",
        source=f"{PAPER}, figure 9",
        title="saving of prompt tokens over the sharing degree and the prefix, by the plan alone",
        claim="85.2% at degree 16 and prefixes of 2,000 (vLLM 40.1%), 92.6% at 16,000 (6.3%).",
        machine=A100,
        unit="% of the prompt tokens saved",
        measure=PlanSavings(_sharing(6400), kv_tokens=LLAMA_8B_KV),
        published=(
            Cell({"degree": 16, "prefix": 2000}, "BatchLLM", 85.2),
            Cell({"degree": 16, "prefix": 2000}, VLLM, 40.1),
            Cell({"degree": 16, "prefix": 16000}, "BatchLLM", 92.6),
            Cell({"degree": 16, "prefix": 16000}, VLLM, 6.3),
            Cell({"degree": 16, "prefix": 16000}, "SGLang", 5.2),
        ),
        theirs={"one": "BatchLLM", "lru": VLLM},
        assumed=LRU_TOKENS.format(LLAMA_8B_KV),
    ),
    Experiment(
        name="batch-table1",
        source=f"{PAPER}, table 1",
        title="throughput of an industry workload, 8,000 requests, Qwen2.5-7B",
        claim="1.30 times vLLM with prefix caching and chunked prompts.",
        machine=A100,
        unit="requests/s",
        measure=JobRuns(
            settings=(Setting({"workload": "industry"}, _industry(8000), "qwen2.5-7b"),),
            modes=(PLANNED, INPUT_ORDER, OFF),
        ),
        published=points("workload", {"industry": {"BatchLLM": 8.67, VLLM: 6.71, "vLLM": 5.48}}),
        theirs=THEIRS,
        ratio=("planned", "input order"),
        assumed=f"{INDUSTRY}; 100 tokens sampled",
    ),
    Experiment(
        name="batch-industry",
        source=f"{PAPER}, section 4.2.2",
        title="saving of prompt tokens in the industry workload, by the plan alone",
        claim="55% with one level and 56% with all, of 58.1% at best; vLLM 35.8%.",
        machine=A100,
        unit="% of the prompt tokens saved",
        measure=PlanSavings((({"requests": 8000}, _industry(8000)),), kv_tokens=QWEN_7B_KV),
        published=points(
            "requests",
            {8000: {"BatchLLM": 55.0, "BatchLLM, all levels": 56.0, "at best": 58.1, VLLM: 35.8}},
        ),
        theirs={"one": "BatchLLM", "all": "BatchLLM, all levels", "lru": VLLM},
        assumed=f"{INDUSTRY}; {LRU_TOKENS.format(QWEN_7B_KV)}",
    ),
    Experiment(
        name="batch-table2",
        source=f"{PAPER}, table 2",
        title="throughput with heavy-tailed outputs: 20 groups of 16, Pareto(1.5) in 10..512",
        claim="17.02 requests/s against vLLM's 5.26: 3.2 times.",
        machine=A100,
        unit="requests/s",
        measure=JobRuns(
            settings=(
                Setting(
                    {"outputs": "Pareto"},
                    _job(320, 16, 2000, 200, Pareto(1.5, 25, 10, 512)),
                    "qwen2.5-7b",
                ),
            ),
            modes=(PLANNED, INPUT_ORDER, OFF),
        ),
        published=points("outputs", {"Pareto": {"BatchLLM": 17.02, VLLM: 5.26}}),
        theirs=THEIRS,
        ratio=("planned", "input order"),
    ),
    Experiment(
        name="batch-table3",
        source=f"{PAPER}, table 3, savings",
        title="saving of prompt tokens by grouping algorithms: 6,400 prompts in two levels",
        claim="48.6% (A) and 39.7% (B) with one level; the 50% heuristic finds about 25%.",
        machine=A100,
        unit="% of the prompt tokens saved",
        measure=PlanSavings(TABLE3, levels=LEVELS),
        published=points(
            "setting",
            {
                "A": {"no sharing": 0.0, "heuristic grouping": 25.0, "BatchLLM": 48.6},
                "B": {"no sharing": 0.0, "heuristic grouping": 25.0, "BatchLLM": 39.7},
            },
        ),
        theirs={"none": "no sharing", "heuristic": "heuristic grouping", "one": "BatchLLM"},
    ),
    Experiment(
        name="batch-table3-rates",
        source=f"{PAPER}, table 3, throughput",
        title="throughput by grouping algorithms: a quarter of the 6,400 prompts",
        claim="1.28 times the heuristic's throughput and 1.49 times that without sharing.",
        machine=A100,
        unit="requests/s",
        measure=JobRuns(
            settings=tuple(
                Setting(at, replace(case, groups=13), "llama3.1-8b") for at, case in TABLE3
            ),
            modes=(
                OFF,
                Mode("heuristic", options={"levels": "heuristic"}),
                Mode("one", options={"levels": "one"}),
                Mode("all"),
            ),
        ),
        published=points(
            "setting",
            {
                "A": {"no sharing": 10.7, "heuristic grouping": 12.4, "BatchLLM": 15.9},
                "B": {"no sharing": 10.7, "heuristic grouping": 12.3, "BatchLLM": 14.5},
            },
        ),
        theirs={"off": "no sharing", "heuristic": "heuristic grouping", "one": "BatchLLM"},
        ratio=("one", "off"),
        assumed="100 tokens sampled",
    ),
    Experiment(
        name="batch-table4",
        source=f"{PAPER}, table 4",
        title="throughput with and without a cap of 256 running requests, 3,000 industry requests",
        claim="Without the cap 1.03 times the throughput, and 1.04 times with sharing.",
        machine=A100,
        unit="requests/s",
        measure=JobRuns(
            settings=(Setting({"workload": "industry"}, _industry(3000), "qwen2.5-7b"),),
            modes=(
                PLANNED,
                Mode("planned, capped", options=CAPPED),
                OFF,
                Mode("off, capped", "off", LRU | CAPPED),
            ),
        ),
        published=points(
            "workload",
            {
                "industry": {
                    "BatchLLM": 8.47,
                    "BatchLLM, capped": 8.16,
                    "vLLM": 5.94,
                    "vLLM, capped": 5.79,
                }
            },
        ),
        theirs={
            "planned": "BatchLLM",
            "planned, capped": "BatchLLM, capped",
            "off": "vLLM",
            "off, capped": "vLLM, capped",
        },
        ratio=("planned", "planned, capped"),
        assumed=f"{INDUSTRY}; 100 tokens sampled",
    ),
    *(
        Experiment(
            name=f"batch-fig{number}",
            source=f"{PAPER}, figure {number}",
            title=title,
            claim=claim,
            machine=A100,
            unit="rows of a step",
            measure=StepRows(Setting({}, _industry(3000), "qwen2.5-7b"), (mode,)),
            assumed=f"{INDUSTRY}; 100 tokens sampled; sharing off, as in the paper",
        )
        for number, title, claim, mode in (
            (
                2,
                "tokens of each step with a cap of 256 requests, in input order",
                "With a cap of requests many steps are valleys.",
                Mode("capped, input order", "off", LRU | CAPPED),
            ),
            (
                10,
                "tokens of each step without a cap, requests ordered by R",
                "Ordered by R and bounded by memory alone, the valleys are gone.",
                Mode("no cap, ordered by R", "off"),
            ),
        )
    ),
    Experiment(
        name="batch-fig11",
        source=f"{PAPER}, figure 11",
        title="attention alone: decodes, and prompts among decodes",
        claim="As fast as CUDA kernels or faster, in Triton.",
        machine=A100,
        unit="ms",
        measure=AttentionSweep(q_heads=32, kv_heads=8, settings=(*KERNELS, *MIXED)),
        ratio=("full", "unshared"),
        better="less",
        assumed="settings but 256/2048/all, and chunks of 256 tokens",
    ),
    Experiment(
        name="batch-overhead",
        source=f"{PAPER}, section 4.3.1",
        title="seconds of planning 8,000 requests of the industry workload",
        claim="1.51 s of 919.54 s.",
        machine="an AMD EPYC 7V12",
        unit="seconds",
        measure=PlanSavings(
            (({"requests": 8000}, _industry(8000)),), levels=("one",), metric="seconds"
        ),
        published=points("requests", {8000: {"BatchLLM": 1.51}}),
        theirs={"one": "BatchLLM"},
        better="less",
        assumed=INDUSTRY,
    ),
)
