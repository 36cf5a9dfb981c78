"""RelayAttention (arXiv 2402.14808): one system prompt, many requests."""

from __future__ import annotations

from onestem.bench import BatchCase, Lengths
from onestem_lab.lengths import DATA_SETS, LogNormal
from onestem_lab.papers.attention import AttentionSweep, Decodes
from onestem_lab.papers.claims import Claim, Gain, Growth
from onestem_lab.papers.experiment import THEORY, Cell, Experiment, points
from onestem_lab.papers.jobs import JobRuns, Mode, Setting, job
from onestem_lab.papers.serve import SECONDS, SustainableRates

__all__ = ["EXPERIMENTS"]

PAPER = "RelayAttention"
SYSTEMS = (64, 128, 256, 512, 1024, 2048)
VLLM, STORED = "vLLM 0.2.6, nothing shared", "vLLM 0.2.6, prompt stored once"
OVER_VLLM, OVER_STORED = Gain("full", ("off",)), Gain("full", ("storage",))
THEIRS = {"full": "vLLM-RA", "storage": "vLLM-PS", "off": "vLLM"}
MODES = (
    Mode("full"),
    Mode("storage", "storage"),
    Mode("off", "off"),
)
LENGTHS = (
    "question and answer lengths are log-normal within table 1's bounds, with the means that "
    "PagedAttention reports of ShareGPT (161 and 338 tokens)"
)


def _chats(system: int) -> BatchCase:
    lengths = DATA_SETS["sharegpt"]
    return _job(system, 1000, lengths["question"], lengths["answer"])


def _job(system: int, requests: int, own: Lengths, output: Lengths) -> BatchCase:
    return job(1, (requests,), (system,), own, output)


def _few_shot(shots: int) -> Lengths:
    """Lengths of MMLU prompts, in proportion to the number of examples."""
    five = DATA_SETS["mmlu"]["prefix"]
    assert isinstance(five, LogNormal)
    part = shots / 5
    return LogNormal(five.median * part, five.sigma, int(five.least * part), int(five.most * part))


def _attention(contexts: tuple[int, ...], batches: tuple[int, ...]) -> AttentionSweep:
    return AttentionSweep(
        q_heads=52,
        kv_heads=52,
        theory=True,
        copies=True,
        settings=tuple(
            (
                {"context": context, "batch": batch, "system prompt": system},
                Decodes(prefix=system, own=context, degree=batch),
            )
            for context in contexts
            for batch in batches
            for system in (*SYSTEMS, 4096)
        ),
    )


def _table4(system: int, rows: dict[str, tuple[float, float, float]]) -> tuple[Cell, ...]:
    return tuple(
        Cell({"system prompt": system, "model": model}, series, value)
        for model, values in rows.items()
        for series, value in zip(("vLLM", "vLLM-PS", "vLLM-RA"), values, strict=True)
    )


EXPERIMENTS = (
    Experiment(
        name="relay-fig1",
        source=f"{PAPER}, figure 1",
        title="attention time over the system prompt's length, Llama-30B heads, batch 32",
        claims=(
            Claim(
                text="Attention gains more, the longer the system prompt.",
                number=Gain("full", ("copies", "unshared")),
                stated=1.0,
                along="system prompt",
                theirs="PagedAttention",
            ),
        ),
        machine="an A40",
        unit="ms",
        measure=_attention((128,), (32,)),
        ratio=("full", "unshared"),
        better="less",
    ),
    Experiment(
        name="relay-fig6",
        source=f"{PAPER}, figure 6",
        title="speed-up of attention alone over the system prompt's length, with eq. 10",
        claims=(
            Claim(
                text="The speed-up is close to what eq. 10 predicts (read as: 0.8 of it or more).",
                number=Gain("full", ("copies", "unshared"), of=THEORY),
                stated=0.8,
                theirs="PagedAttention",
            ),
        ),
        machine="an A40",
        unit="ms",
        measure=_attention((128, 256), (4, 8, 16, 32)),
        ratio=("full", "unshared"),
        better="less",
        plot_ratio=True,
    ),
    Experiment(
        name="relay-fig7",
        source=f"{PAPER}, figure 7",
        title="throughput of 1,000 ShareGPT requests over the system prompt's length",
        claims=(
            Claim(
                text="Storing the prompt once gives up to 2.08 times the throughput.",
                number=Gain("storage", ("off",)),
                stated=2.08,
                best=True,
                theirs=VLLM,
            ),
            Claim(text="Reading it once, too: 1.06 to 4.36.", number=OVER_VLLM, theirs=VLLM),
            Claim(
                text="The gain grows with the system prompt.",
                number=OVER_VLLM,
                stated=1.0,
                along="system prompt",
                theirs=VLLM,
            ),
        ),
        machine="an A40, an A100-40GB and an A100-80GB",
        unit="tokens/s",
        measure=JobRuns(
            settings=tuple(
                Setting({"system prompt": system}, _chats(system), "llama2-7b")
                for system in SYSTEMS
            ),
            modes=MODES,
            metric="output_tokens_per_s",
        ),
        published=points(
            "system prompt",
            {64: {"vLLM-RA : vLLM": 1.06}, 2048: {"vLLM-RA : vLLM": 4.36}},
        ),
        theirs=THEIRS,
        ratio=("full", "off"),
        assumed=LENGTHS + "; the least and the largest published ratio stand at the ends",
    ),
    Experiment(
        name="relay-table3",
        source=f"{PAPER}, table 3",
        title="seconds of MMLU few-shot, 57 subjects",
        claims=(
            Claim(
                text="1.1 to 1.37 times as fast as with the examples stored once.",
                number=OVER_STORED,
                theirs=STORED,
            ),
            Claim(
                text="1.64 to 4.14 times as fast as with nothing shared.",
                number=OVER_VLLM,
                theirs=VLLM,
            ),
            Claim(
                text="Five examples raise the accuracy from 37.6 to 43.2%.",
                number=Growth("accuracy", {"shots": 1}),
                at={"shots": 5},
                stated=1.15,
                theirs="one example",
                remark="weights are random here",
            ),
        ),
        requests=57 * (14042 // 57),
        machine="an A100-80GB",
        unit="seconds",
        measure=JobRuns(
            settings=tuple(
                Setting(
                    {"shots": shots},
                    job(
                        57,
                        (14042 // 57,),
                        (_few_shot(shots),),
                        DATA_SETS["mmlu"]["question"],
                        DATA_SETS["mmlu"]["answer"],
                    ),
                    "llama2-7b",
                )
                for shots in (1, 3, 5)
            ),
            modes=MODES,
            metric="seconds",
        ),
        published=points(
            "shots",
            {
                1: {"vLLM": 502, "vLLM-PS": 336, "vLLM-RA": 306},
                3: {"vLLM": 851, "vLLM-PS": 378, "vLLM-RA": 311},
                5: {"vLLM": 1308, "vLLM-PS": 432, "vLLM-RA": 316},
            },
        ),
        theirs=THEIRS,
        ratio=("full", "off"),
        better="less",
        assumed=(
            "table 1 gives ranges alone: prompts of 5 shots and questions are log-normal in them; "
            "no accuracy, since weights are random"
        ),
    ),
    Experiment(
        name="relay-table4",
        source=f"{PAPER}, table 4",
        title="throughput of 1,000 ShareGPT requests, four models",
        claims=(
            Claim(
                text="Four models: 1.09 to 1.82 times the throughput of storage alone.",
                number=OVER_STORED,
                theirs=STORED,
            ),
            Claim(
                text="Four models: 1.6 to 2.56 times that with nothing shared.",
                number=OVER_VLLM,
                theirs=VLLM,
            ),
        ),
        machine="an A40; the 30B model two A100-80GB",
        unit="requests/s",
        measure=JobRuns(
            settings=tuple(
                Setting({"system prompt": system, "model": model}, _chats(system), model)
                for model in ("llama2-13b", "llama-30b", "phi-2", "mistral-7b")
                for system in (512, 1024)
            ),
            modes=MODES,
        ),
        published=(
            *_table4(
                512,
                {
                    "llama2-13b": (0.99, 1.44, 1.71),
                    "llama-30b": (2.15, 3.01, 3.65),
                    "phi-2": (5.03, 6.29, 8.85),
                    "mistral-7b": (3.68, 5.40, 5.90),
                },
            ),
            *_table4(
                1024,
                {
                    "llama2-13b": (0.66, 1.23, 1.69),
                    "llama-30b": (1.52, 2.55, 3.64),
                    "phi-2": (3.54, 4.82, 8.76),
                    "mistral-7b": (2.60, 4.92, 5.85),
                },
            ),
        ),
        theirs=THEIRS,
        ratio=("full", "off"),
        assumed=LENGTHS,
    ),
    Experiment(
        name="relay-fig8",
        source=f"{PAPER}, figure 8",
        title="sustainable request rate of a server, ShareGPT lengths",
        claims=(
            Claim(
                text="A higher request rate than with the prompt stored once, at 2,048 tokens.",
                number=OVER_STORED,
                at={"system prompt": 2048},
                stated=1.0,
                theirs=STORED,
            ),
            Claim(
                text="2.2 times the request rate of vLLM, at 2,048 tokens.",
                number=OVER_VLLM,
                theirs=VLLM,
            ),
        ),
        machine="an A40",
        unit="requests/s",
        measure=SustainableRates("llama2-7b", systems=(64, 512, 2048)),
        published=points("system prompt", {2048: {"vLLM-RA : vLLM": 2.2}}),
        theirs=THEIRS,
        ratio=("full", "off"),
        assumed=(
            f"{LENGTHS}; nine of ten requests stay within the paper's 0.5 s per token, where it "
            f"reads a mean off its figure; each rate arrives for {SECONDS:g} s"
        ),
    ),
    Experiment(
        name="relay-fig10",
        source=f"{PAPER}, figure 10",
        title="throughput of requests of equal lengths over the system prompt's length",
        claims=(
            Claim(
                text="At 256 + 512 tokens and a system prompt of 2,048: 2.2 times the throughput.",
                number=OVER_VLLM,
                theirs=VLLM,
            ),
        ),
        machine="an A40",
        unit="tokens/s",
        measure=JobRuns(
            settings=tuple(
                Setting(
                    {"user + answer": f"{own} + {output}", "system prompt": system},
                    _job(system, 256, own, output),
                    "llama2-7b",
                )
                for own, output in ((64, 128), (128, 256), (256, 512))
                for system in SYSTEMS
            ),
            modes=MODES,
            metric="output_tokens_per_s",
        ),
        published=(
            Cell({"user + answer": "256 + 512", "system prompt": 2048}, "vLLM-RA : vLLM", 2.2),
        ),
        theirs=THEIRS,
        ratio=("full", "off"),
        assumed="256 requests",
    ),
)
