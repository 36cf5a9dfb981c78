"""BatchLLM (arXiv 2412.03594): large jobs planned by what they share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from onestem.bench import BatchCase, Lengths
from onestem.options import Levels
from onestem_lab.lengths import Pareto, Poisson
from onestem_lab.papers.attention import AttentionSweep, Decodes, Mixed
from onestem_lab.papers.claims import Claim, Gain, Value
from onestem_lab.papers.experiment import Cell, Experiment, Measure, points
from onestem_lab.papers.jobs import JobRuns, Mode, PlanSavings, Setting, job
from onestem_lab.papers.trace import StepRows

__all__ = ["EXPERIMENTS"]

PAPER = "BatchLLM"
A100 = "an A100-80GB"
LRU = {"levels": "none"}
PLANNED = Mode("planned")
INPUT_ORDER = Mode("input order", "storage", LRU)
SORTED = Mode("sorted", "storage", {"levels": "none", "order": "sorted"})
OFF = Mode("off", "off", LRU)
CAPPED = {"max_num_seqs": 256}
CAPPED_STEPS = Mode("capped, input order", "off", LRU | CAPPED)
FREE = Mode("no cap, ordered by R", "off")
CACHING, SORTED_INPUT, SGLANG = (
    "vLLM 0.6.4, prefix caching, chunked",
    "the same, input sorted",
    "SGLang",
)
OVER_VLLM = Gain("planned", ("vllm", "input order"))
OVER_SORTED = Gain("planned", ("vllm, sorted", "sorted"))
OVER_SGLANG = Gain("planned", ("sglang",))
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
    sorted_input: tuple[Claim, ...] = ()
    if letter == "a":
        at = {"prefix/own": "2000/200", "degree": 16}
        values = {"BatchLLM": 18.0, VLLM: 6.0, "vLLM, input sorted": 13.02}
        published = tuple(Cell(at, series, value) for series, value in values.items())
        text = "1.38 times vLLM's with sorted prompts, at 2000/200 and degree 16."
        sorted_input = (Claim(text=text, number=OVER_SORTED, theirs=SORTED_INPUT),)
    return Experiment(
        name=f"batch-fig6{letter}",
        source=f"{PAPER}, figure 6{letter}",
        title=title,
        claims=(
            Claim(
                text="1.4 to 3 times vLLM's throughput.",
                number=OVER_VLLM,
                stated=(1.4, 3.0),
                theirs=CACHING,
            ),
            *sorted_input,
            Claim(
                text="1.2 to 2.5 times SGLang's.",
                number=OVER_SGLANG,
                stated=(1.2, 2.5),
                theirs=SGLANG,
            ),
        ),
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
        claims=(
            Claim(
                text="1.7 times vLLM's at degree 2; 10.8 at degree 16, prefixes of 16,000.",
                number=OVER_VLLM,
                theirs=CACHING,
            ),
            Claim(
                text="The gain grows with the degree.",
                number=OVER_VLLM,
                at={"prefix": 2000},
                stated=1.0,
                along="degree",
                theirs=CACHING,
            ),
            Claim(
                text="... and with the prefix.",
                number=OVER_VLLM,
                at={"degree": 16},
                stated=1.0,
                along="prefix",
                theirs=CACHING,
            ),
            Claim(
                text="1.5 to 9.5 times SGLang's.",
                number=OVER_SGLANG,
                stated=(1.5, 9.5),
                theirs=SGLANG,
            ),
        ),
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
        claims=(
            Claim(
                text="At degree 16 the plan saves 85.2% (prefixes of 2,000) and 92.6% (16,000).",
                number=Value("one"),
            ),
            Claim(
                text="That is 2.12 and 14.7 times what vLLM's cache saves.",
                number=Gain("one", ("vllm", "lru")),
                theirs=CACHING,
            ),
        ),
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
        claims=(
            Claim(text="1.3 times vLLM's throughput.", number=OVER_VLLM, theirs=CACHING),
            Claim(
                text="1.32 times that of vLLM of January 2026.",
                number=Gain("planned", ("vllm",)),
                stated=1.32,
                theirs="vLLM of 2026-01-16",
            ),
            Claim(
                text="1.58 times vLLM's without its prefix cache.",
                number=Gain("planned", ("off",)),
                theirs="vLLM 0.6.4, chunked",
            ),
            Claim(
                text="Nothing is recomputed for want of memory.",
                number=Value("planned", "num_preempted"),
                whole=True,
                stated=0.0,
                bound="most",
            ),
            Claim(
                text="Planning takes 0.16% of the job's time.",
                number=Value("planned", "planning_share"),
                whole=True,
                stated=0.0016,
                bound="most",
            ),
        ),
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
        claims=(
            Claim(text="One level saves 55% of the prompts' tokens.", number=Value("one")),
            Claim(text="All levels save 56%.", number=Value("all")),
            Claim(
                text="One level saves nearly what all levels save.",
                number=Gain("one", ("all",)),
                theirs="all levels",
            ),
        ),
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
        claims=(Claim(text="3.2 times vLLM's throughput.", number=OVER_VLLM, theirs=CACHING),),
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
        claims=(
            Claim(text="One level saves 48.6% (A) and 39.7% (B).", number=Value("one")),
            Claim(
                text="... which is 1.94 and 1.59 times what a 50% heuristic saves.",
                number=Gain("one", ("heuristic",)),
                theirs="heuristic grouping",
            ),
        ),
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
        claims=(
            Claim(
                text="1.28 (A) and 1.18 (B) times the heuristic's throughput.",
                number=Gain("one", ("heuristic",)),
                theirs="heuristic grouping",
            ),
            Claim(
                text="1.49 (A) and 1.36 (B) times that with nothing shared.",
                number=Gain("one", ("off",)),
                theirs="vLLM 0.6.4, nothing shared",
            ),
        ),
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
        claims=(
            Claim(
                text="Planned, without the cap: 1.04 times the throughput.",
                number=Gain("planned", ("planned, capped",)),
                theirs="BatchLLM, capped",
            ),
            Claim(
                text="Nothing shared, without the cap: 1.03 times.",
                number=Gain("off", ("off, capped",)),
                theirs="vLLM 0.6.4, chunked",
            ),
        ),
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
    Experiment(
        name="batch-fig2",
        also=("batch-fig10",),
        source=f"{PAPER}, figures 2 and 10",
        title="tokens of each step: a cap of 256 requests, and none with requests ordered by R",
        claims=(
            Claim(
                text="Without the cap and ordered by R, fewer steps are valleys.",
                number=Gain(FREE.name, (CAPPED_STEPS.name,)),
                at={"valleys": "% of the steps"},
                stated=1.0,
                theirs="vLLM 0.6.4, chunked",
            ),
        ),
        machine=A100,
        unit="rows of a step",
        measure=StepRows(Setting({}, _industry(3000), "qwen2.5-7b"), (CAPPED_STEPS, FREE)),
        better="less",
        assumed=f"{INDUSTRY}; 100 tokens sampled; sharing off, as in the paper",
    ),
    Experiment(
        name="batch-fig11",
        source=f"{PAPER}, figure 11",
        title="attention alone: decodes, and prompts among decodes",
        claims=tuple(
            Claim(
                text=f"As fast as {name} or faster.",
                number=Gain("full", peers),
                stated=1.0,
                theirs=theirs,
            )
            for name, peers, theirs in (
                ("a cascade of CUDA kernels", ("flashinfer",), "FlashInfer's cascade 0.1.4"),
                ("FlashAttention", ("flash_attn3", "flash_attn"), "FlashAttention 2.6.1"),
            )
        ),
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
