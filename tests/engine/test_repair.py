"""Documents that are repaired answer what a full pass with their mask answers, and are chosen by
what the question attends to in such a pass."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from onestem.answers import path_scores
from onestem.cache.storage import DiskStore
from onestem.engine.modules.prompt import ImportedRun, PmlPrompt, SequenceModules
from onestem.engine.schedule import admission
from onestem.errors import RequestError
from onestem.models.weights import load_decoder
from onestem.ops.reference import ReferenceAttention
from onestem.pml import Documents, DocumentsPrompt, Segment, with_documents
from onestem.request import Request, SamplingParams
from onestem.scores import completion_tree
from tests.engine.harness import (
    TOLERANCE,
    answer,
    assert_idle,
    make_engine,
    oracle_logprobs,
    record_logprobs,
    requests_for,
)
from tests.engine.pml_harness import (
    assert_seen,
    dense_logprobs,
    dense_weights,
    record,
)
from tests.engine.test_pml_exactness import FAMILIES
from tests.models.tiny import make_tiny
from tests.soak import soaked

HEAD = list(range(60, 70))
DOCUMENTS = [
    np.random.default_rng(i).integers(20, 250, n).tolist()
    for i, n in enumerate((37, 50, 33, 64, 9))
]
QUESTION = list(range(80, 91))


def prompt_of(order, repair: float, question=QUESTION, lead_in=()) -> DocumentsPrompt:
    """A prompt of some documents, each behind a token of its own."""
    ids, spans = list(HEAD), []
    for number in order:
        ids += [200 + number]
        spans += [(len(ids), len(ids) + len(DOCUMENTS[number]))]
        ids += DOCUMENTS[number]
    return with_documents(ids + list(question), Documents(tuple(spans), repair, lead_in))


def request_of(name: str, prompt: DocumentsPrompt, **params) -> Request:
    params = {"temperature": 0, "ignore_eos": True, "max_tokens": 4, **params}
    return Request(
        request_id=name,
        prompt_token_ids=prompt.ids.tolist(),
        params=SamplingParams(**params),
        documents=prompt.documents,
    )


def repaired(path, prompt: DocumentsPrompt, layers) -> DocumentsPrompt:
    """The prompt as the definition repairs it."""
    decoder = load_decoder(path, dtype=torch.float32, device="cpu")
    weights = dense_weights(decoder, prompt)
    total = sum(weights[layer] for layer in layers) if layers else torch.zeros(1)
    attended = np.zeros(len(prompt.ids))
    if layers:
        asks = (torch.from_numpy(prompt.positions) >= prompt.question).numpy()
        np.add.at(attended, prompt.positions, total.numpy()[asks].sum(0))
    return prompt.repaired(attended)


def check(path, prompts, *, alone=False, **options):
    engine = make_engine(path, **options)
    seen = record(engine)
    requests = [request_of(str(i), one) for i, one in enumerate(prompts)]
    outputs = {}
    for part in [[one] for one in requests] if alone else [requests]:
        outputs |= answer(engine, part)
    decoder = load_decoder(path, dtype=torch.float32, device="cpu")
    for i, prompt in enumerate(prompts):
        want = prompt
        if prompt.num_repaired:
            want = repaired(path, prompt, sorted(engine.launcher.runner.choosing_layers))
        new = outputs[str(i)].outputs[0].token_ids
        assert len(new) == 4
        assert_seen(seen, str(i), want, dense_logprobs(decoder, want, new), new)
    return engine, outputs


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(tiny, family):
    orders = ((0, 2), (1, 2)) if family == "gpt2" else ((0, 1, 2, 3), (1, 3, 0))  # 128 positions
    check(tiny(family), [prompt_of(order, 0.5) for order in orders])


@pytest.mark.parametrize(
    ("chunk", "page_size", "share"), [(7, 16, "full"), (64, 1, "storage"), (64, 16, "off")]
)
def test_chunks_and_pages(tiny, chunk, page_size, share):
    prompts = [
        prompt_of((0, 1, 2, 3), 0.5),
        prompt_of((0, 2, 3, 1, 4), 0.2),
        prompt_of((3, 2), 0.0),
    ]
    check(tiny("llama"), prompts, max_step_tokens=chunk, page_size=page_size, share=share)


@pytest.mark.parametrize(
    ("chunk", "page_size", "share"), [(7, 16, "full"), (900, 24, "full"), (64, 4, "storage")]
)
def test_hidden_blocks_are_left_out_of_page_lists(tiny, monkeypatch, chunk, page_size, share):
    """Where an implementation takes parts of pages as pages, beside rows that decode."""
    sizes = []
    prepare = ReferenceAttention.prepare
    monkeypatch.setattr(
        ReferenceAttention,
        "prepare",
        lambda self, plan, **how: sizes.append(plan.page_size) or prepare(self, plan, **how),
    )
    prompts = [prompt_of(one, 0.5) for one in ((0, 1, 2, 3), (0, 2, 3, 1, 4), (3, 2))]
    options = {
        "max_step_tokens": chunk,
        "page_size": page_size,
        "share": share,
        "impl": "reference",
    }
    check(tiny("llama"), [*prompts, prompts[0]], **options)
    assert set(sizes) == {page_size, min(8, page_size)}


def test_copies_serve_other_orders(tiny):
    prompts = [prompt_of(order, 0.2) for order in ((0, 1, 2, 3), (0, 3, 1, 2), (0, 2, 3, 1))]
    engine, outputs = check(tiny("llama"), prompts, alone=True)
    layers = sorted(engine.launcher.runner.choosing_layers)
    # An ordinary prefix, then each prompt's own tokens twice, whose positions jump.
    assert [len(run.label.jumps) > 0 for run in engine.cache.tree] == [False] + [True] * 6
    for i in (1, 2):
        want = repaired(tiny("llama"), prompts[i], layers)
        behind = [*HEAD, 200]  # an ordinary prefix, and the first document sees that alone
        own = prompts[i].num_computed_tokens - len(behind)
        again = want.num_computed_tokens - len(behind)
        assert own < again <= own + prompts[i].num_repaired
        # What is behind them is one run, whose tokens see other tokens when some are repaired.
        assert outputs[str(i)].metrics.num_computed_tokens == own + again


@pytest.mark.parametrize("family", ["llama", "gemma3", *map(soaked, ("gpt2", "mpt", "gpt_oss"))])
def test_documents_behind_a_lead_in(tiny, family):
    """It is stored once, and no prompt sees it."""
    lead_in = tuple(range(100, 124))
    orders = ((0, 2), (0, 3)) if family == "gpt2" else ((0, 1, 2, 3), (0, 3, 1, 2), (0, 4, 1))
    prompts = [prompt_of(order, 0.3, lead_in=lead_in) for order in orders]
    engine, _ = check(tiny(family), prompts, alone=True, page_size=4)
    copies = [run for run in engine.cache.modules if tuple(run.tokens) == lead_in]
    assert len(copies) == 1


def test_a_restart_finds_documents_at_other_places(tiny, tmp_path):
    """They are stored at one place, whichever prompt is first."""
    lead_in = tuple(range(100, 124))
    for first in (0, 3):  # of 37 tokens, and of 64
        ids, spans = list(HEAD), []
        for number in (first, 1, 2):
            spans += [(len(ids), len(ids) + len(DOCUMENTS[number]))]
            ids += DOCUMENTS[number]
        prompt = with_documents(ids + QUESTION, Documents(tuple(spans), 0.2, lead_in))
        engine = make_engine(tiny("llama"))
        engine.keep_below("model", host=None, disk=DiskStore(tmp_path, 1 << 24, "model"))
        answer(engine, [request_of("0", prompt)])
        engine.tiers.stores.flush()
    assert engine.tiers.stats.from_disk_tokens == sum(map(len, DOCUMENTS[1:3]))


def test_a_repaired_prompt_is_found_again(tiny):
    prompt = prompt_of((0, 1, 2, 3), 0.2)
    _, outputs = check(
        tiny("llama"), [prompt, prompt, prompt_of((0, 1, 2, 3), 0.2, [99, *QUESTION])], alone=True
    )
    # Rows that choose are always computed, and the last row.
    assert outputs["1"].metrics.num_computed_tokens == len(QUESTION) + 1


@pytest.mark.parametrize("layers", [9, soaked(12)])
def test_several_layers_choose(tmp_path, layers):
    """From the middle to two thirds; of rows that choose, none goes further."""
    path = make_tiny("llama", tmp_path, changes={"num_hidden_layers": layers})
    shares = (0.3, 0.3, 0.0)
    prompts = [
        prompt_of(order, one) for order, one in zip(((0, 1, 2, 3), (0, 3, 2, 1)) * 2, shares)
    ]
    engine, _ = check(path, prompts, alone=True)
    runner = engine.launcher.runner
    assert sorted(runner.choosing_layers) == {9: [4, 5], 12: [5, 6]}[layers]


def test_what_chose_is_found_by_none_that_answer(tiny):
    prompts = [prompt_of((0, 1, 2, 3), repair) for repair in (0.2, 0.0, 0.3)]
    _, outputs = check(tiny("llama"), prompts, alone=True)
    computed = [outputs[name].metrics.num_computed_tokens for name in ("1", "2")]
    assert computed[0] == len(QUESTION) + 3  # what leads documents
    assert computed[1] < computed[0] + prompts[2].num_repaired + len(QUESTION) + 3


def test_what_all_may_find_goes_through_all_layers(tiny):
    """The step that chooses begins with the last token that sees no document."""
    before = len(HEAD) + 1
    stored = before + sum(map(len, DOCUMENTS[:3]))  # the head too
    engine = make_engine(tiny("llama"), max_step_tokens=stored + before - 1, page_size=1)
    prompt = prompt_of((0, 1, 2), 0.3)
    answer(engine, [request_of("0", prompt)])
    found, given = record_logprobs(engine), prompt.ids[: before + 9].tolist()
    output = answer(engine, requests_for([given], max_tokens=1))["0"]
    assert output.metrics.num_cached_tokens == before
    (values,) = found.values()
    assert (values - oracle_logprobs(tiny("llama"), given)[-1]).abs().max() < TOLERANCE


def test_questions_of_other_lengths_in_one_step(tiny):
    asked = [QUESTION, QUESTION[:2], [*QUESTION, *QUESTION]]
    orders = ((0, 1, 2, 3), (3, 2, 1), (1, 3, 0, 2))
    pairs = zip(orders, asked, strict=True)
    check(tiny("llama"), [prompt_of(order, 0.3, one) for order, one in pairs], max_step_tokens=900)


def test_a_document_ends_the_prompt(tiny):
    engine, _ = check(tiny("llama"), [prompt_of((0, 1, 2), 0.5, ()), prompt_of((1, 0), 0.2, ())])
    assert_idle(engine)


def test_several_answers_that_lose_their_memory(tiny):
    orders = ((0, 1, 2, 3), (3, 1, 2, 0), (2, 1, 0))
    requests = [
        request_of(str(i), prompt_of(order, 0.4), n=3, temperature=1, seed=i, max_tokens=9)
        for i, order in enumerate(orders)
    ]
    alone = {}
    for request in requests:
        alone |= answer(make_engine(tiny("llama")), [request])
    engine, outputs = make_engine(tiny("llama"), max_step_tokens=40), {}
    for request in requests:
        engine.add_request(request)
    while engine.has_unfinished():
        for output in engine.step():
            outputs[output.request_id] = output
        engine.check()
        if engine.stats.steps % 7 == 3:
            engine.scheduler.room.preempt_all()
    assert_idle(engine)
    assert engine.scheduler.room.num_preempted > 9
    for name, output in outputs.items():
        for mine, its in zip(output.outputs, alone[name].outputs, strict=True):
            assert mine.token_ids == its.token_ids


@pytest.mark.parametrize("share", ["full", "off"])
def test_given_tokens_are_scored(tiny, share):
    """After what is repaired, beside others, and with the memory lost."""
    given = ([5, 6, 7, 8], [5, 9], [11])
    tree, paths = completion_tree(given)
    prompts = [prompt_of(*one) for one in (((0, 1, 2, 3), 0.5), ((3, 1), 0.2), ((2, 0), 0.0))]
    engine, outputs = make_engine(tiny("llama"), max_step_tokens=40, share=share), {}
    for i, prompt in enumerate(prompts):
        request = request_of(str(i), prompt, max_tokens=1)
        engine.add_request(replace(request, paths=tuple(paths)))
    while engine.has_unfinished():
        outputs |= {output.request_id: output for output in engine.step()}
        engine.check()
        if share == "full" and engine.stats.steps % 7 == 3:
            engine.scheduler.room.preempt_all()
    assert_idle(engine)
    layers = sorted(engine.launcher.runner.choosing_layers)
    decoder = load_decoder(tiny("llama"), dtype=torch.float32, device="cpu")
    for i, prompt in enumerate(prompts):
        prompt = repaired(tiny("llama"), prompt, layers) if prompt.num_repaired else prompt
        for ids, score in zip(given, tree.scores(path_scores(outputs[str(i)])), strict=True):
            want = dense_logprobs(decoder, prompt, ids)[prompt.num_tokens - 1 : -1]
            want = want.gather(1, torch.tensor(ids)[:, None])[:, 0]
            assert (torch.tensor(score.token_logprobs) - want).abs().max() < TOLERANCE


def test_ends_while_it_chooses(tiny):
    engine = make_engine(tiny("llama"), max_step_tokens=16)
    for name in ("0", "1"):
        engine.add_request(request_of(name, prompt_of((0, 1, 2, 3), 0.4), n=2))
    request = request_of("2", prompt_of((0, 1, 2, 3), 0.4), max_tokens=1)
    engine.add_request(replace(request, paths=tuple(completion_tree([[5], [6]])[1])))
    while not any(s.choosing for s in engine.scheduler.running):
        engine.step()
    output = engine.abort("0")
    assert [one.finish_reason for one in output.outputs] == ["abort", "abort"]
    assert engine.abort("2").scores is None
    ended = []
    while engine.has_unfinished():
        ended += engine.step()
        engine.check()
    assert [one.request_id for one in ended] == ["1"]
    assert_idle(engine)


def test_without_a_share_nothing_is_chosen(tiny):
    prompt = prompt_of((0, 1, 2, 3), 0.0)
    check(tiny("llama"), [prompt])
    assert prompt.num_repaired == 0


def not_hidden(monkeypatch):
    """What is repaired is seen as it is stored, too."""
    monkeypatch.setattr(Segment, "seen", property(lambda one: iter([(0, one.in_use)])))


def others_chosen(monkeypatch):
    """What is attended to least is repaired."""
    repaired = DocumentsPrompt.repaired
    monkeypatch.setattr(DocumentsPrompt, "repaired", lambda self, given: repaired(self, -given))


def found_by_answers(monkeypatch):
    """Rows that chose, which went through some layers alone, are found by those that answer."""
    monkeypatch.setattr(admission, "PmlPrompt", lambda *of, **_: PmlPrompt(*of))


def without_head(monkeypatch):
    """Documents are computed with nothing before them."""
    monkeypatch.setattr(SequenceModules, "attended", lambda self, index: [])


def not_moved(monkeypatch):
    """What is stored elsewhere is taken for being here."""
    monkeypatch.setattr(ImportedRun, "shift", property(lambda self: 0))


@pytest.mark.parametrize(
    "fault", [not_hidden, others_chosen, found_by_answers, without_head, not_moved]
)
@pytest.mark.steps_fail
def test_the_check_sees(tiny, monkeypatch, fault):
    prompts = [prompt_of((0, 1, 2, 3), 0.3), *(prompt_of((0, 3, 2, 1), one) for one in (0.3, 0.0))]
    wanted = {}
    if fault is others_chosen:  # the definition must not have the fault
        decoder = load_decoder(tiny("llama"), dtype=torch.float32, device="cpu")
        engine = make_engine(tiny("llama"))
        layers = sorted(engine.launcher.runner.choosing_layers)
        wanted = {id(one): repaired(tiny("llama"), one, layers) for one in prompts}
        del decoder
    fault(monkeypatch)
    if wanted:
        monkeypatch.setattr(
            "tests.engine.test_repair.repaired", lambda path, prompt, layers: wanted[id(prompt)]
        )
    with pytest.raises(AssertionError):
        check(tiny("llama"), prompts, alone=True)


@pytest.mark.parametrize("share", ["full", "storage", "off"])
def test_what_is_taken_has_room(tiny, share):
    prompt, found = prompt_of((0, 1, 2, 3), 0.1, lead_in=tuple(range(30, 69))), []
    for num_pages in range(14, 48):
        engine = make_engine(tiny("llama"), num_pages=num_pages, share=share)
        try:
            (output,) = answer(engine, [request_of("0", prompt)]).values()
        except RequestError:
            found.append(False)
            continue
        assert output.outputs[0].finish_reason == "length", (num_pages, output.outputs[0])
        found.append(True)
    assert found == sorted(found)
    assert found[-1]
    with pytest.raises(RequestError, match="pages for them: raise kv_memory"):
        answer(make_engine(tiny("llama"), num_pages=14, share=share), [request_of("0", prompt)])


def test_refuses_what_it_cannot(tiny):
    engine = make_engine(tiny("llama"), num_pages=18)
    with pytest.raises(RequestError, match="KV memory has"):
        engine.add_request(request_of("0", prompt_of((0, 1, 2, 3), 0.5)))

    with pytest.raises(RequestError, match=r"with repair, .*: leave them, or repair, out"):
        engine.add_request(request_of("2", prompt_of((0, 1), 0.5), prompt_logprobs=1))
    with pytest.raises(RequestError, match="or leave repair, or the engine's option"):
        make_engine(tiny("llama"), deterministic=True).add_request(
            request_of("3", prompt_of((0, 1), 0.5))
        )
