"""The engine on a GPU, with CUDA graphs: the same tokens as on a CPU. Skipped without a GPU."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from onestem.engine.step import graphs
from onestem.ops.triton import Workspace
from tests.engine.harness import answer, engine_on, requests_for, shared_prompts
from tests.models.changed import changed_model, tensors_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

GPU_FAMILIES = ["llama", "qwen2", "qwen3", "mistral", "falcon_40b", "mpt", "phi", "gpt2"]
GPU_FAMILIES += ["gemma2", "gemma3", "phi4_mini", "olmo2", "granite", "glm4", "ministral3"]
GPU_FAMILIES += ["gemma4", "gemma4_moe", "gemma4_image"]
GPU_FAMILIES += ["qwen3_next", "qwen3_5", "qwen3_5_moe"]
GPU_FAMILIES += ["mixtral", "qwen2_moe", "qwen3_moe", "glm4_moe", "gpt_oss"]


@pytest.mark.parametrize("share", ["full", "storage", "off"])
@pytest.mark.parametrize("family", GPU_FAMILIES)
def test_tokens_are_those_of_the_cpu(tiny, family: str, share: str) -> None:
    path = tiny(family)
    requests = requests_for(shared_prompts(), max_tokens=24)
    want = answer(engine_on("cpu", path, impl="torch"), requests)
    found = answer(engine_on("cuda", path, share=share), requests)
    for name, output in want.items():
        assert found[name].outputs[0].token_ids == output.outputs[0].token_ids


def test_draws_are_those_of_the_cpu(tiny) -> None:
    requests = requests_for(
        shared_prompts(), max_tokens=16, temperature=0.8, top_p=0.9, n=3, seed=4
    )
    want = answer(engine_on("cpu", tiny("llama"), impl="torch"), requests)
    found = answer(engine_on("cuda", tiny("llama")), requests)
    for name, output in want.items():
        assert [o.token_ids for o in found[name].outputs] == [o.token_ids for o in output.outputs]


@contextmanager
def no_synchronisation() -> Iterator[None]:
    """What waits for the GPU is an error, except waiting for an event."""
    with warnings.catch_warnings():
        # said by some versions of torch: the mode does not find everything
        warnings.filterwarnings("ignore", "Synchronization debug mode", UserWarning)
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


GREEDY = {"temperature": 0}
SAMPLING = [
    GREEDY,
    {"temperature": 0.8},
    {"temperature": 0.8, "top_p": 0.9, "min_p": 0.01, "logprobs": 0},
    {"temperature": 0.8, "top_k": 20, "logprobs": 3},
    {"temperature": 0.8, "presence_penalty": 0.5, "repetition_penalty": 1.2, "logprobs": 2},
    {"temperature": 0, "logit_bias": {3: 2.0}, "min_tokens": 40, "stop_token_ids": [4, 5]},
]


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        *(("llama", fields) for fields in SAMPLING),
        ("gpt_oss", SAMPLING[0]),
        ("glm4_moe", SAMPLING[0]),
    ],
    ids=str,
)
def test_decode_steps_wait_for_sampled_ids_alone(tiny, family: str, fields: dict) -> None:
    """Steps of decodes, with the work list made anew and own runs that grow by pages."""
    assert graphs.LIST_STEPS < 24
    prompts = shared_prompts()
    requests = requests_for(prompts, max_tokens=60, seed=5, **fields)
    want = answer(engine_on("cpu", tiny(family), impl="torch", page_size=4), requests)
    engine, found = engine_on("cuda", tiny(family), page_size=4), {}
    engine.launcher.sampler.tell_ranks()
    for request in requests:
        engine.add_request(request)
    for _ in range(20):  # prompts, compilers, and the graph
        engine.step()
    with no_synchronisation():
        for _ in range(24):
            engine.step()
    while engine.has_unfinished():
        found |= {output.request_id: output for output in engine.step()}
    for name, output in want.items():
        made = found[name].outputs[0]
        assert made.token_ids == output.outputs[0].token_ids
        for token, entry in zip(made.token_ids, made.logprobs or (), strict=False):
            leading = list(entry)[: fields["logprobs"]]
            if token in leading:
                assert entry.rank == leading.index(token) + 1
            else:
                assert entry.rank > len(leading)


def test_a_small_pool_sets_back(tiny) -> None:
    requests = requests_for(shared_prompts(), max_tokens=40)
    pool = {"num_pages": 24, "page_size": 4}
    want = answer(engine_on("cpu", tiny("llama"), impl="torch", **pool), requests)
    engine = engine_on("cuda", tiny("llama"), **pool)
    found = answer(engine, requests)
    assert engine.stats.num_preempted > 0
    for name, output in want.items():
        assert found[name].outputs[0].token_ids == output.outputs[0].token_ids


@pytest.mark.parametrize("sizes", [graphs.BATCH_SIZES, (1, 8, 64, 256)])
def test_large_batches(tiny, monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...]) -> None:
    """Steps of 1,100 rows are a graph, or larger than any and launched kernel by kernel."""
    monkeypatch.setattr(graphs, "BATCH_SIZES", sizes)
    prompts = [[5 + i % 200, 7, 9 + i // 200] for i in range(1100)]
    requests = requests_for(prompts, max_tokens=5)
    want = answer(engine_on("cpu", tiny("llama"), impl="torch", num_pages=2048), requests)
    found = answer(engine_on("cuda", tiny("llama"), num_pages=2048), requests)
    differ = [n for n in want if want[n].outputs[0].token_ids != found[n].outputs[0].token_ids]
    assert not differ


@pytest.mark.parametrize("family", ["llama", "mistral"])  # without and with a window
def test_work_lists_made_anew(tiny, monkeypatch, family) -> None:
    """Own runs take pages all the while; tokens are those of a list that is kept, and the CPU's."""
    write, written = Workspace.write, []

    def counted(*args, **named):
        written.append(args)
        return write(*args, **named)

    monkeypatch.setattr(Workspace, "write", counted)
    requests = requests_for(shared_prompts(), max_tokens=60)
    want = answer(engine_on("cpu", tiny(family), impl="torch", page_size=4), requests)
    lists = []
    for steps in (1000, graphs.LIST_STEPS, 3):
        monkeypatch.setattr(graphs, "LIST_STEPS", steps)
        written.clear()
        found = answer(engine_on("cuda", tiny(family), page_size=4), requests)
        lists.append(len(written))
        for name, output in want.items():
            assert found[name].outputs[0].token_ids == output.outputs[0].token_ids
    assert lists[0] < lists[1] < lists[2] - 5


@pytest.mark.parametrize("share", ["full", "storage", "off"])
@pytest.mark.parametrize("family", ["llama", "mistral", "mpt"])
def test_who_joins_answers_as_on_the_cpu(tiny, family: str, share: str) -> None:
    """Newcomers at every other step, while steps are in flight."""
    prompts = [ids for seed in range(4) for ids in shared_prompts(seed)]
    requests = requests_for(prompts, max_tokens=33, temperature=0.7, seed=3)
    want = answer(engine_on("cpu", tiny(family), impl="torch", num_pages=1024), requests)
    engine = engine_on("cuda", tiny(family), share=share, num_pages=1024)
    late, found = list(requests), {}
    while late or engine.has_unfinished():
        if late and engine.scheduler.step % 2 == 0:
            engine.add_request(late.pop())
        found |= {output.request_id: output for output in engine.step() if output.finished}
    for name, output in want.items():
        assert found[name].outputs[0].token_ids == output.outputs[0].token_ids


@pytest.mark.parametrize("level", [None, 1, 2])
def test_other_weights_while_requests_run_and_sleep(tiny, tmp_path, level: int | None) -> None:
    """Graphs are kept by an update, made anew after a sleep, and read the new weights."""
    from onestem import LLM, SamplingParams

    before = tiny("llama")
    after = changed_model(before, tmp_path / "after")
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, n=2)
    options = {"dtype": "float32", "kv_memory": "16MiB", "seed": 0}
    with LLM(before, device="cuda", **options) as llm:
        captured = dict(llm.engine.launcher.runner.graphs)
        last, done = {}, False
        for number, answer_ in enumerate(llm.stream(shared_prompts(), params)):
            last[answer_.index] = answer_
            if number == 60:
                if level is not None:
                    used = torch.cuda.memory_allocated()
                    llm.sleep(level)
                    assert used - torch.cuda.memory_allocated() > 16 * 2**20
                    llm.wake_up(["weights"])
                llm.update_weights(tensors_of(after).items())
                llm.wake_up()
                done = True
        assert done
        kept = llm.engine.launcher.runner.graphs
        assert (kept == captured) is (level is None)
        assert kept.keys() == captured.keys()
    with LLM(before, device="cpu", **options) as old, LLM(after, device="cpu", **options) as new:
        crossed = 0
        for index, prompt in enumerate(shared_prompts()):
            for one in last[index].outputs:
                at = one.weight_versions.count(0)
                crossed += 0 < at < 40
                assert one.weight_versions == [0] * at + [1] * (40 - at)
                for llm, first, end in [(old, 0, at), (new, at, 40)]:
                    if end > first:
                        some = params.replace(n=1, max_tokens=end - first)
                        (want,) = llm.generate([[*prompt, *one.token_ids[:first]]], some)
                        assert want.outputs[0].token_ids == one.token_ids[first:end]
        assert crossed > len(shared_prompts())
