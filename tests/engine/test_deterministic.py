"""`deterministic`: a position's logits have the same bits whatever else an engine does; and what
cannot promise it yet is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from onestem import LLM
from onestem.build import bits_identity, kv_identity
from onestem.cache.host import HostStore
from onestem.cache.storage import DiskStore
from onestem.engine.engine import Engine
from onestem.engine.sequence import Sequence
from onestem.errors import OnestemError, RequestError
from onestem.jobs import run_file
from onestem.models import linear
from onestem.models.decoder import Decoder
from onestem.models.linear import Layout, choose_layout
from onestem.models.weights import load_decoder
from onestem.ops import DeltaOps
from onestem.ops.cpu import CpuAttention, CpuDelta, chosen_isa
from onestem.options import EngineOptions
from onestem.request import Request, RequestOutput, SamplingParams
from tests.engine.harness import answer, engine_with, watch_logits
from tests.engine.pml_harness import compiled_prompts, pml_request
from tests.soak import one_in, seeds


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("llama", {"tensor_parallel_size": 2}, "tensor_parallel_size is 2"),
        ("llama", {"quantization": "int8"}, "weights are quantised (int8)"),
        ("llama", {"share": "no-attention"}, "share is no-attention"),
        ("mixtral", {}, "the model has experts"),
        ("qwen3_5_moe", {}, "the model has experts"),
        ("llama", {"impl": "torch"}, "attention implementation 'torch' is not deterministic"),
    ],
)
def test_what_cannot_be_is_refused_by_name(tiny, family, options, message):
    with pytest.raises(OnestemError) as told:
        LLM(str(tiny(family)), deterministic=True, device="cpu", kv_memory="1MiB", **options)
    assert message in str(told.value)
    assert "leave deterministic out" in str(told.value)
    assert "\n" not in str(told.value)


def test_its_keys_values_and_jobs_are_kept_apart(tiny):
    path = tiny("llama")
    plain = EngineOptions(model=path, device="cpu", dtype="bfloat16")
    strict = plain.replace(deterministic=True)
    settled = [strict.replace(threads=threads) for threads in (1, 2)]
    one, two = (kv_identity(each.replace(bits=bits_identity(each)), path) for each in settled)
    assert one.startswith(f"{kv_identity(plain, path)} 1 threads, ")
    assert one != two
    assert strict.job_identity(strict) == {**plain.job_identity(plain), "deterministic": True}


def test_a_job_goes_on_where_bits_are_the_same(tiny, tmp_path, monkeypatch):
    path, asked = str(tiny("llama")), []
    monkeypatch.setattr(
        "onestem.jobs.run.run_job", lambda *_, **more: asked.append(more["options"])
    )
    for more in ({}, {"deterministic": True}):
        with LLM(path, device="cpu", kv_memory="1MiB", **more) as llm:
            run_file(llm, tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    plain, strict = asked
    bits = strict.pop("bits")
    assert strict == {**plain, "deterministic": True}
    assert bits == f"{torch.get_num_threads()} threads, {chosen_isa()}, torch {torch.__version__}"


def test_modules_are_refused(tiny):
    path = str(tiny("llama"))
    with LLM(path, deterministic=True, device="cpu", kv_memory="1MiB") as llm:
        prompt = compiled_prompts("anchored")[0]
        with pytest.raises(RequestError, match=r"a prompt in PML .*: give its text, or leave"):
            llm.engine.add_request(pml_request("0", prompt))


VOCAB = 270
Key = tuple[str, int, int]  # request, sequence, index of the last token seen


def tree_of_requests(seed: int, longest: int = 600, scored: int = 4) -> list[Request]:
    """Requests of all kinds: prompts that share heads of several lengths, equal ones, prefixes of
    others and single tokens; greedy and sampled ones, several answers; one in `scored` scores."""
    rng = np.random.default_rng(seed)

    def draw(most: int) -> list[int]:
        return rng.integers(3, VOCAB, int(rng.integers(1, most))).tolist()

    heads: list[list[int]] = [[], draw(40), draw(longest)]
    for _ in range(4):
        parent = heads[int(rng.integers(len(heads)))]
        cut = int(rng.integers(len(parent) + 1))
        heads.append(parent[: max(cut, len(parent) - 5)] + draw(80))
    prompts = [heads[int(rng.integers(len(heads)))] + draw(50) for _ in range(9)]
    prompts += [prompts[0], prompts[1][:-1], prompts[2] + draw(9), draw(2)]
    requests = []
    for number, prompt in enumerate(prompts):
        params = SamplingParams(
            max_tokens=int(rng.choice([3, 11, 80])),
            temperature=float(rng.choice([0.0, 0.9])),
            n=int(rng.choice([1, 1, 3])),
            seed=number,
            logprobs=2,
            ignore_eos=True,
        )
        score_from = int(rng.integers(len(prompt))) if number % scored == 0 else None
        requests.append(
            Request(
                request_id=str(number),
                prompt_token_ids=prompt,
                params=params,
                score_from=score_from,
            )
        )
    return requests


def watched(engine: Engine, note: Callable[[Key, Tensor], None]) -> Engine:
    """An engine that tells each row of log-probabilities that it samples from or scores."""

    def told(sequence: Sequence, index: int, values: Tensor) -> None:
        note((sequence.state.request.request_id, sequence.index, index), values)

    watch_logits(engine, told)
    return engine


def alone(
    decoder: Decoder, requests: Iterable[Request]
) -> tuple[dict[Key, Tensor], dict[str, RequestOutput]]:
    """Rows and outputs of each request alone, with nothing cached."""
    rows: dict[Key, Tensor] = {}
    outputs = {}
    engine = watched(engine_with(decoder, num_pages=200, deterministic=True), rows.setdefault)
    for request in requests:
        assert engine.reset_prefix_cache()
        outputs |= answer(engine, [request])
    return rows, outputs


class Traffic:
    """Engines that answer requests in different ways, against each request alone.

    Attributes:
        compared: rows. differing: of these and of outputs, those that differ in some bit.
        hits: requests with tokens that were in the cache. splits, preempted, forks: how many.
        from_below: tokens that came from host memory and a disk.
    """

    def __init__(self, decoder: Decoder, requests: list[Request]) -> None:
        self.decoder, self.requests = decoder, requests
        self.rows, self.outputs = alone(decoder, requests)
        self.compared = self.differing = 0
        self.hits = self.splits = self.preempted = self.forks = self.from_below = 0

    def compare(self, key: Key, values: Tensor) -> None:
        self.compared += 1
        self.differing += not torch.equal(
            values.view(torch.int32), self.rows[key].view(torch.int32)
        )

    def run(self, rng: np.random.Generator, below: Path | None = None, **options: Any) -> None:
        """Answer all requests in a random order, some of them once others run; then again with what
        is in the cache, or was kept in host memory and in a folder."""
        engine = watched(engine_with(self.decoder, deterministic=True, **options), self.compare)
        if below is not None:
            stores = HostStore(1 << 20), DiskStore(below, 64 << 20, "model")
            engine.keep_below("model", host=stores[0], disk=stores[1])
        tree, split = engine.cache.tree, engine.cache.tree.split

        def counted(*where: Any) -> Any:
            self.splits += 1
            return split(*where)

        tree.split = counted
        for _ in range(2):
            waiting = [self.requests[place] for place in rng.permutation(len(self.requests))]
            while waiting or engine.has_unfinished():
                for request in waiting[: int(rng.integers(0, 6))]:
                    engine.add_request(waiting.pop(waiting.index(request)))
                    self.forks += request.params.n - 1
                for output in engine.step():
                    want = self.outputs[output.request_id]
                    counts = output.metrics
                    self.hits += counts.num_cached_tokens > 0
                    self.from_below += counts.num_host_tokens + counts.num_disk_tokens
                    told = output.outputs, output.prompt_logprobs
                    self.differing += told != (want.outputs, want.prompt_logprobs)
                engine.check()
        self.preempted += engine.stats.num_preempted
        if below is not None:
            engine.close()


SHARES = ("full", "full", "storage", "off")


def traffic(
    decoder: Decoder, seed: int, shares: Iterable[str] = SHARES, scored: int = 4
) -> Traffic:
    """A tree of requests in several engines, the first with more KV memory than it takes."""
    rng = np.random.default_rng(seed)
    made = Traffic(decoder, tree_of_requests(seed, scored=scored))
    longest = max(len(one.prompt_token_ids) + one.params.max_tokens for one in made.requests)
    for number, share in enumerate(shares):
        size = int(rng.choice([1, 3, 8, 16, 48]))
        tight = longest // size + 3
        made.run(
            rng,
            page_size=size,
            num_pages=tight if number else 20 * tight,
            max_step_tokens=int(rng.choice([5, 33, 64, 200, 2048])),
            share=share,
            **states(decoder, rng),
        )
    return made


def states(decoder: Decoder, rng: np.random.Generator) -> dict[str, int]:
    """Slots of recurrent states, of layers that keep some: few, so that most snapshots give way, or
    many."""
    return {"num_states": int(rng.choice([5, 12, 64]))} if decoder.state_bytes else {}


RECURRENT = ("qwen3_5", "qwen3_next_dense")
FAMILIES = ("llama", "gemma2", "qwen3", "gemma3", "phi", "qwen2", "mistral", "gemma4", "falcon_rw")
FAMILIES += RECURRENT
DTYPES = ("bfloat16", "float32", "float16")


@pytest.mark.parametrize("seed", seeds(1, 3))
@pytest.mark.parametrize(("family", "dtype"), one_in(4, FAMILIES, DTYPES))
def test_company_changes_no_bit(tiny, family, dtype, seed):
    decoder = load_decoder(
        tiny(family), dtype=getattr(torch, dtype), device="cpu", deterministic=True
    )
    # The first seed has one way of storing for every third family.
    some = (("full", "full"), ("full", "storage"), ("full", "full", "off"))
    made = traffic(decoder, seed, SHARES if seed else some[FAMILIES.index(family) % 3])
    assert made.differing == 0, f"{made.differing} of {made.compared}"
    assert min(made.hits, made.splits, made.forks) > 0
    assert made.preempted > 0 or seed != 0  # other seeds draw shorter answers


@pytest.mark.parametrize(("family", "dtype"), one_in(3, ("llama", *RECURRENT), DTYPES))
def test_what_was_kept_below_changes_no_bit(tiny, tmp_path, family, dtype):
    """Nor does a restart in between."""
    decoder = load_decoder(
        tiny(family), dtype=getattr(torch, dtype), device="cpu", deterministic=True
    )
    rng, made = np.random.default_rng(0), Traffic(decoder, tree_of_requests(0, 200))
    for _ in range(2):
        made.run(
            rng, tmp_path, page_size=8, num_pages=50, max_step_tokens=64, **states(decoder, rng)
        )
    assert made.differing == 0, f"{made.differing} of {made.compared}"
    assert min(made.from_below, made.splits, made.forks) > 0


@pytest.mark.parametrize("name", ["delta_rule", "gates"])
def test_a_layer_with_states_as_it_comes_is_found(tiny, monkeypatch, name):
    """The delta rule in chunks; PyTorch's gates."""
    monkeypatch.setattr(CpuDelta, name, getattr(DeltaOps, name))
    path = tiny("qwen3_next_dense")
    decoder = load_decoder(path, dtype=torch.float32, device="cpu", deterministic=True)
    assert traffic(decoder, 0, SHARES[:1]).differing > 0


@pytest.fixture
def other_products():
    """Numbers of rows are tried out anew, here and afterwards."""
    linear.numbers_of.cache_clear()
    yield
    linear.numbers_of.cache_clear()


@pytest.mark.usefixtures("other_products")
@pytest.mark.skipif(
    choose_layout(torch.float32, torch.device("cpu")) is Layout.PLAIN, reason="torch without oneDNN"
)
@pytest.mark.parametrize("in_any_rows", [False, True])
def test_a_library_that_divides_sums_by_rows(tiny, monkeypatch, in_any_rows):
    """It changes no bit at numbers of rows that agree, and is found at others."""
    product = linear.packed_product

    def divided(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
        if len(x) % 2 == 0:
            return product(x, packed, bias)
        weight, half = packed.to_dense(), x.shape[1] // 2
        return F.linear(x[:, :half], weight[:, :half]) + F.linear(x[:, half:], weight[:, half:])

    monkeypatch.setattr(linear, "packed_product", divided)
    if in_any_rows:
        monkeypatch.setattr(linear, "in_parts", lambda multiply, x, _: multiply(x))
    decoder = load_decoder(tiny("llama"), dtype=torch.float32, device="cpu", deterministic=True)
    assert (traffic(decoder, 0, SHARES[:1]).differing > 0) == in_any_rows


def test_attention_as_it_comes_is_found(tiny, monkeypatch):
    plain = CpuAttention()
    monkeypatch.setattr("onestem.engine.engine.resolve", lambda *_, **__: plain)
    decoder = load_decoder(tiny("llama"), dtype=torch.bfloat16, device="cpu", deterministic=True)
    assert traffic(decoder, 0, SHARES[:1]).differing > 0


@pytest.fixture
def few_graphs(monkeypatch):
    """Engines are made sooner."""
    from onestem.engine.step import graphs

    monkeypatch.setattr(graphs, "BATCH_SIZES", (1, 2, 8, 32, 64))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.usefixtures("few_graphs")
@pytest.mark.parametrize(("family", "dtype"), one_in(3, FAMILIES, DTYPES))
def test_company_changes_no_bit_on_a_gpu(tiny, family, dtype):
    decoder = load_decoder(
        tiny(family), dtype=getattr(torch, dtype), device="cuda", deterministic=True
    )
    made = traffic(decoder, 0)
    assert made.differing == 0, f"{made.differing} of {made.compared}"
    assert min(made.hits, made.splits, made.forks, made.preempted) > 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.usefixtures("few_graphs")
def test_attention_as_it_comes_is_found_on_a_gpu(tiny, monkeypatch):
    from onestem.ops.triton import TritonAttention

    plain = TritonAttention()
    monkeypatch.setattr("onestem.engine.engine.resolve", lambda *_, **__: plain)
    decoder = load_decoder(tiny("llama"), dtype=torch.bfloat16, device="cuda", deterministic=True)
    assert traffic(decoder, 0, SHARES[:1]).differing > 0
