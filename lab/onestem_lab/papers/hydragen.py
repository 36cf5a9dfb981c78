"""Hydragen (arXiv 2402.05099): batches that decode behind shared prefixes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from onestem_lab.lengths import DATA_SETS, LogNormal
from onestem_lab.papers.attention import AttentionSweep, Decodes
from onestem_lab.papers.claims import Claim, Gain, Growth
from onestem_lab.papers.decode import DecodeSweep
from onestem_lab.papers.experiment import Cell, Experiment, grid, points
from onestem_lab.papers.jobs import JobRuns, Mode, Setting, job
from onestem_lab.papers.needles import Needles

__all__ = ["EXPERIMENTS"]

PAPER = "Hydragen"
PREFIXES = (1024, 2048, 4096, 8192, 16256)
THEIRS = {
    "full": "Hydragen",
    "storage": "vLLM",
    "off": "FlashAttention",
    "no-attention": "no attention",
}
EIGHT = "eight A100-40GB"
EQUAL = "full, equal batch"
VLLM, FLASH, CEILING = "vLLM 0.2.7", "FlashAttention", "no attention"
OF_CEILING, OVER_VLLM = Gain("full", ("no-attention",)), Gain("full", ("storage",))
OVER_FLASH = Gain("full", ("copies", "unshared"))
NONE = (None,) * 5
APPS = DATA_SETS["apps"]
PROBLEM = APPS["question"]
assert isinstance(PROBLEM, int)

Row = Sequence[float | None]
# batch -> (the ceiling; FlashAttention, Hydragen and vLLM at each prefix)
Rows = Mapping[int, tuple[float, Row, Row, Row]]


def _published(rows: Rows) -> tuple[Cell, ...]:
    cells: list[Cell] = []
    for i, series in enumerate(("FlashAttention", "Hydragen", "vLLM"), 1):
        values = {batch: row[i] for batch, row in rows.items()}
        cells += grid(series, "batch", "prefix", PREFIXES, values)  # type: ignore[arg-type]
    ceiling = {batch: (row[0],) * len(PREFIXES) for batch, row in rows.items()}
    cells += grid("no attention", "batch", "prefix", PREFIXES, ceiling)
    return tuple(cell for cell in cells if cell.value is not None)


# Thousands of tokens per second. None: out of memory in the paper, or not readable with certainty
# in its text.
TABLE2: Rows = {
    32: (3.1, (2.5, 2.2, 1.8, 1.3, 0.9), (2.7, 2.7, 2.6, 2.6, 2.5), (1.6, 1.6, 1.5, 0.6, 0.3)),
    64: (5.7, (4.2, 3.4, 2.6, 1.7, None), (5.0, 4.9, 4.9, 4.8, 4.6), (2.9, 2.8, 2.1, 0.7, 0.4)),
    128: (10.3, (5.7, 4.2, 2.7, None, None), (8.6, 8.5, 8.4, 8.3, 8.0), (4.9, 4.5, 2.7, 0.7, 0.4)),
    256: (
        15.8,
        (8.1, 5.7, None, None, None),
        (13.3, 13.3, 13.1, 12.8, 12.3),
        (6.9, 4.2, 2.5, 0.8, 0.4),
    ),
    512: (23.2, NONE, (19.6, 19.4, 19.1, 18.5, 17.5), (4.2, 2.5, 1.4, 0.8, 0.4)),
    1024: (30.1, NONE, (25.3, 25.1, 24.7, 23.9, 22.4), (4.2, 2.5, 1.4, 0.7, 0.4)),
    2048: (32.9, NONE, (27.9, 27.5, 26.7, 25.3, 22.8), (4.2, 2.5, 1.4, 0.7, 0.4)),
}
TABLE3: Rows = {
    32: (3.1, (2.4, 2.2, 1.8, 1.3, 0.9), (2.6, 2.6, 2.6, 2.5, 2.4), (1.6, 1.5, 1.5, 0.6, 0.3)),
    64: (5.7, (3.9, 3.4, 2.5, 1.7, None), (4.8, 4.8, 4.8, 4.7, 4.5), (2.8, 2.8, 2.3, 0.6, 0.4)),
    128: (10.2, (5.3, 4.1, 2.7, None, None), (8.2, 8.2, 8.1, 7.9, 7.7), (4.8, 4.0, 2.5, 0.7, 0.4)),
    256: (
        15.7,
        (7.4, None, None, None, None),
        (12.7, 12.6, 12.5, 12.2, 11.8),
        (6.5, 4.2, 2.5, 0.7, 0.4),
    ),
    512: (23.2, NONE, (18.4, 18.2, 18.0, 17.5, 16.6), (3.8, 2.4, 1.4, 0.7, 0.4)),
    1024: (30.0, NONE, (23.4, 23.2, 22.9, 22.2, 21.0), (3.9, 2.4, 1.4, 0.7, 0.4)),
}
TABLE4: Rows = {
    32: (2.3, (1.7, 1.4, 1.1, 0.7, None), (2.0, 2.0, 1.9, 1.8, 1.8), (1.6, 1.6, 1.5, 0.5, 0.3)),
    64: (4.2, (2.9, 2.3, 1.6, None, None), (3.6, 3.6, 3.6, 3.4, 3.4), (3.0, 2.9, 2.4, 0.6, 0.4)),
    128: (6.8, (4.0, 2.9, None, None, None), (5.8, 5.7, 5.6, 5.6, 5.7), (4.8, 3.8, 2.6, 0.7, 0.4)),
    256: (11.4, NONE, (9.6, 9.3, 9.4, 9.2, 8.8), (6.1, 4.5, 2.7, 0.7, 0.4)),
    512: (16.1, NONE, (13.4, 13.3, 13.2, 12.9, 12.3), (4.1, 2.4, 1.4, 0.8, 0.4)),
    1024: (18.5, NONE, (15.6, 15.5, 15.3, 14.8, 14.0), (4.2, 2.5, 1.4, 0.7, 0.4)),
}
TABLE5: Rows = {
    32: (2.3, (1.7, 1.4, 1.1, 0.7, None), (1.9, 1.9, 1.9, 1.8, 1.8), (1.6, 1.6, 1.5, 0.5, 0.3)),
    64: (4.2, (2.8, 2.2, 1.6, None, None), (3.5, 3.5, 3.4, 3.2, 3.3), (3.0, 2.7, 2.2, 0.6, 0.4)),
    128: (
        6.8,
        (None, 2.8, None, None, None),
        (None, 5.5, 5.3, 5.4, 5.2),
        (4.6, 3.7, 2.4, 0.7, 0.4),
    ),
    256: (
        11.3,
        (5.4, None, None, None, None),
        (8.9, 8.7, 8.8, 8.7, 8.4),
        (5.9, 4.3, 2.5, 0.7, 0.4),
    ),
    512: (16.1, NONE, (12.3, 12.3, 12.2, 12.0, 11.4), (3.8, 2.4, 1.4, 0.7, 0.4)),
}
TABLE6: Rows = {
    32: (1.6, (1.4, 1.4, 1.2, 1.0, 0.8), (1.4, 1.4, 1.4, 1.4, 1.4), (1.5, 1.3, 1.1, 0.5, 0.3)),
    64: (2.9, (2.5, 2.3, 2.1, 1.8, 1.3), (2.6, 2.6, 2.5, 2.5, 2.5), (2.4, 2.1, 1.6, 0.6, 0.4)),
    128: (4.4, (3.8, 3.4, 2.8, 2.1, None), (4.2, 4.1, 4.1, 4.0, 3.9), (3.4, 2.7, 2.0, 0.7, 0.4)),
    256: (7.2, (6.0, 5.3, 4.4, None, None), (6.6, 6.6, 6.5, 6.3, 5.9), (4.4, 3.3, 2.4, 0.8, 0.4)),
    512: (8.8, (7.0, 6.0, None, None, None), (8.2, 8.1, 8.0, 7.8, 7.3), (3.6, 2.4, 1.4, 0.8, 0.4)),
    1024: (9.9, NONE, (9.4, 9.2, 9.0, 8.5, 7.6), (3.7, 2.5, 1.4, 0.8, 0.4)),
    2048: (11.0, NONE, (10.4, 10.3, 10.0, 9.4, 8.5), (3.7, 2.4, 1.4, 0.8, 0.4)),
    4096: (11.6, NONE, (11.1, 11.0, 10.7, 10.2, 9.4), (3.5, 2.3, 1.3, 0.7, 0.4)),
}
TABLE7: Rows = {
    32: (1.5, (1.4, 1.3, 1.2, 1.1, 0.8), (1.4, 1.4, 1.4, 1.4, 1.3), (1.5, 1.3, 1.1, 0.5, 0.3)),
    64: (2.8, (2.5, 2.4, 2.1, 1.8, 1.3), (2.5, 2.5, 2.5, 2.5, 2.4), (2.3, 2.0, 1.6, 0.6, 0.4)),
    128: (4.5, (3.8, 3.4, 2.8, 2.1, None), (4.1, 4.1, 4.0, 4.0, 3.8), (3.2, 2.6, 2.0, 0.7, 0.4)),
    256: (7.1, (5.8, 5.3, 4.3, None, None), (6.5, 6.5, 6.4, 6.2, 5.8), (4.2, 3.3, 2.3, 0.7, 0.4)),
    512: (8.8, (6.8, 5.9, None, None, None), (8.0, 8.0, 7.9, 7.6, 7.2), (3.5, 2.3, 1.4, 0.7, 0.4)),
    1024: (9.9, NONE, (9.2, 9.1, 8.8, 8.3, 7.5), (3.6, 2.4, 1.4, 0.7, 0.4)),
    2048: (11.0, NONE, (10.3, 10.1, 9.8, 9.3, 8.4), (3.6, 2.4, 1.4, 0.7, 0.4)),
}


def _minutes(*minutes: float) -> dict[str, float]:
    """Table 1's times, in seconds."""
    methods = ("Hydragen", "Hydragen, equal batch", "FlashAttention")
    return {method: 60 * each for method, each in zip(methods, minutes, strict=True)}


FIGURE3 = (  # the paper's, from the column of table 4 at a prefix of 2,048
    Claim(
        text="Prefix 2,048: at least half of the rate without attention at each batch.",
        number=OF_CEILING,
        at={"prefix": 2048},
        stated=0.5,
        theirs=CEILING,
    ),
    Claim(
        text="Prefix 2,048: the gain grows with the batch.",
        number=OVER_VLLM,
        at={"prefix": 2048},
        stated=1.0,
        along="batch",
        theirs=VLLM,
    ),
)


def _throughput(
    number: int,
    model: str,
    new: int,
    rows: Rows,
    also: tuple[str, ...] = (),
    more: tuple[Claim, ...] = (),
) -> Experiment:
    return Experiment(
        name=f"hydragen-table{number}",
        also=also,
        source=f"{PAPER}, table {number}",
        title=f"decoding throughput, {model}, {new} new tokens, batch by prefix",
        claims=(
            Claim(
                text="Times vLLM's rate, at each batch and prefix.", number=OVER_VLLM, theirs=VLLM
            ),
            Claim(
                text="Share of the rate without attention, at each batch and prefix.",
                number=OF_CEILING,
                theirs=CEILING,
            ),
            *more,
        ),
        machine=EIGHT,
        unit="thousand tokens/s",
        measure=DecodeSweep(model, tuple(rows), PREFIXES, new),
        published=_published(rows),
        theirs=THEIRS,
        ratio=("full", "no-attention"),
        across="prefix",
    )


EXPERIMENTS = (
    Experiment(
        name="hydragen-fig4",
        source=f"{PAPER}, figure 4",
        title="decoding throughput over the prefix, CodeLlama-13b, batch 1,024",
        claims=(
            Claim(text="3 to more than 30 times vLLM's rate.", number=OVER_VLLM, theirs=VLLM),
            Claim(
                text="At least 70% of the rate without attention at each prefix.",
                number=OF_CEILING,
                stated=0.7,
                theirs=CEILING,
            ),
            Claim(
                text="At most 15% of the rate is lost from 1K to 16K.",
                number=Growth("full", {"prefix": 1024}),
                at={"prefix": PREFIXES[-1]},
                stated=0.85,
                theirs="a prefix of 1K",
            ),
        ),
        machine=EIGHT,
        unit="thousand tokens/s",
        measure=DecodeSweep("codellama-13b", (1024,), PREFIXES, 128),
        published=tuple(cell for cell in _published(TABLE4) if cell.at["batch"] == 1024),
        theirs=THEIRS,
        ratio=("full", "no-attention"),
        across="prefix",
    ),
    Experiment(
        name="hydragen-fig5",
        source=f"{PAPER}, figure 5",
        title="attention alone over the suffix, 8 query heads on 1 KV head",
        claims=(
            Claim(
                text="More than 12 times FlashAttention's speed at batch 4,096, prefix 8,192.",
                number=OVER_FLASH,
                theirs=FLASH,
            ),
        ),
        machine="an A100-40GB",
        unit="ms",
        measure=AttentionSweep(
            q_heads=8,
            kv_heads=1,
            copies=True,
            settings=tuple(
                (
                    {"batch": batch, "prefix": 2 * batch, "suffix": suffix},
                    Decodes(prefix=2 * batch, own=max(suffix, 1), degree=batch),
                )
                for batch in (512, 1024, 2048, 4096)
                for suffix in (0, 128, 256, 512)
            ),
        ),
        published=(
            Cell({"batch": 4096, "prefix": 8192, "suffix": 0}, "Hydragen : FlashAttention", 12),
        ),
        theirs={"full": "Hydragen", "copies": "FlashAttention"},
        ratio=("full", "copies"),
        better="less",
        assumed="a suffix of one token stands for none",
        plot_ratio=True,
    ),
    Experiment(
        name="hydragen-fig8",
        source=f"{PAPER}, figure 8",
        title="attention alone on other GPUs: batch by prefix",
        claims=(
            Claim(
                text="The gain grows with the batch.",
                number=OVER_FLASH,
                stated=1.0,
                along="batch",
                theirs=FLASH,
            ),
            Claim(
                text="The gain grows with the prefix.",
                number=OVER_FLASH,
                stated=1.0,
                along="prefix",
                theirs=FLASH,
            ),
        ),
        machine="an H100 and an L40S",
        unit="ms",
        measure=AttentionSweep(
            q_heads=8,
            kv_heads=1,
            copies=True,
            settings=tuple(
                (
                    {"suffix": 128, "batch": batch, "prefix": prefix},
                    Decodes(prefix=prefix, own=128, degree=batch),
                )
                for batch in (16, 256, 1024, 4096)
                for prefix in (1024, 2048, 4096, 8192)
            ),
        ),
        theirs={"full": "Hydragen", "copies": "FlashAttention"},
        ratio=("full", "copies"),
        better="less",
        across="prefix",
        assumed="the suffix, 128 tokens",
        plot_ratio=True,
    ),
    Experiment(
        name="hydragen-fig6",
        source=f"{PAPER}, figure 6",
        title="seconds to answer questions on a document of 19,947 tokens, Yi-6B-200k",
        claims=(
            Claim(
                text="256 questions take less time than 64 with nothing shared.",
                number=Gain("full", ("off",), other_at={"batch": 64}),
                at={"batch": 256},
                stated=1.0,
                theirs=FLASH,
            ),
            Claim(
                text="At most 1.6 times the time without attention (0.625 of its speed).",
                number=OF_CEILING,
                stated=0.625,
                theirs=CEILING,
            ),
        ),
        machine="four A100-40GB",
        unit="seconds",
        measure=DecodeSweep(
            "yi-6b-200k",
            (32, 64, 128, 256, 512, 1024),
            (19947,),
            32,
            modes=("full", "off", "no-attention"),
            metric="seconds",
            needles=Needles(),
        ),
        theirs=THEIRS,
        ratio=("full", "no-attention"),
        better="less",
        across="batch",
        assumed=(
            "answers of 32 tokens; common words in place of War and Peace; ids where weights are "
            "random; the document's time is left out, as in the paper, and so is the questions'"
        ),
    ),
    Experiment(
        name="hydragen-fig7",
        source=f"{PAPER}, figure 7",
        title="seconds of 120 APPS problems, 128 samples each: one level of sharing, and two",
        claims=(
            Claim(
                text="A second level takes 18% less time at equal batch.",
                number=Gain(EQUAL, (EQUAL,), {"sharing": "one level"}),
                at={"sharing": "two levels"},
                stated=1.22,
                theirs="one level",
            ),
            Claim(
                text="With the batch that then fits it takes 55% less.",
                number=Gain("full", ("full",), {"sharing": "one level"}),
                at={"sharing": "two levels"},
                stated=2.22,
                theirs="one level",
            ),
        ),
        requests=120 * 128,
        machine=EIGHT,
        unit="seconds",
        measure=JobRuns(
            settings=tuple(
                Setting(
                    {"sharing": name},
                    job(1, degrees, prefixes, own, APPS["answer"]),
                    "codellama-7b",
                )
                for name, degrees, prefixes, own in (
                    ("one level", (120 * 128,), (APPS["prefix"],), PROBLEM),
                    ("two levels", (120, 128), (APPS["prefix"], PROBLEM - 1), 1),
                )
            ),
            modes=(Mode("full"), Mode(EQUAL, batch=1)),
            metric="seconds",
        ),
        better="less",
        assumed=(
            f"problems of {PROBLEM} tokens; one level repeats each problem for each of its "
            "samples, as the paper's does; the batch is what KV memory holds, the equal one what "
            "it holds of one level"
        ),
    ),
    Experiment(
        name="hydragen-table1",
        source=f"{PAPER}, table 1",
        title="seconds of GSM8K with self-consistency: 8-shot, 40 samples",
        claims=(
            Claim(
                text="1.37 to 1.47 times as fast at equal batch.",
                number=Gain(EQUAL, ("off",)),
                theirs=FLASH,
            ),
            Claim(
                text="2.09 to 2.14 times with the batch that then fits.",
                number=Gain("full", ("off",)),
                theirs=FLASH,
            ),
        ),
        requests=1319 * 40,
        machine=EIGHT,
        unit="seconds",
        measure=JobRuns(
            settings=tuple(
                Setting(
                    {"model": model},
                    job(
                        1,
                        (1319, 40),
                        (900, LogNormal(60, 0.4, 20, 250)),
                        1,
                        LogNormal(110, 0.4, 20, 400),
                    ),
                    model,
                )
                for model in ("llama2-7b", "llama2-13b")
            ),
            modes=(Mode("full"), Mode(EQUAL, batch=0), Mode("off", "off", batch=0)),
            metric="seconds",
        ),
        published=points(
            "model",
            {
                "llama2-7b": _minutes(19.94, 28.39, 41.63),
                "llama2-13b": _minutes(32.88, 51.31, 70.49),
            },
        ),
        theirs={"full": "Hydragen", EQUAL: "Hydragen, equal batch", "off": "FlashAttention"},
        ratio=("full", "off"),
        better="less",
        assumed=(
            "a header of 900 tokens, questions of about 60 and answers of about 110; the batch is "
            "what KV memory holds, the equal one and that of `off` what it holds without sharing"
        ),
    ),
    _throughput(2, "codellama-7b", 128, TABLE2),
    _throughput(3, "codellama-7b", 256, TABLE3),
    _throughput(4, "codellama-13b", 128, TABLE4, ("hydragen-fig3",), FIGURE3),
    _throughput(5, "codellama-13b", 256, TABLE5),
    _throughput(6, "codellama-34b", 128, TABLE6),
    _throughput(7, "codellama-34b", 256, TABLE7),
)
