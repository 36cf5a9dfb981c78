"""One copy of a module serves it at every position, and answers are those of one computed there."""

from __future__ import annotations

from itertools import permutations, repeat

import numpy as np
import pytest
import torch

from onestem.engine.modules.prompt import ImportedRun, PmlPrompt, SequenceModules
from onestem.engine.step.runner import Runner
from onestem.models.weights import load_decoder
from onestem.pml import Encoding, Import, Module, Parameter, Prompt, Schema, compile_prompt
from onestem.pml.segments import CompiledPrompt, Segment, segment_key
from tests.engine.harness import answer, make_engine
from tests.engine.pml_harness import (
    assert_seen,
    dense_logprobs,
    laid_out,
    pml_request,
    record,
)
from tests.soak import one_in

MODULES = [
    Module("a", ["Alpha is first ", Parameter("x", 6, ""), " and beta"]),
    Module("b", ["short one"]),
    Module("c", ["a longer member, of more tokens than a page"]),
]


def library(name: str, *parts: object) -> Schema:
    """Modules by number, and text."""
    return Schema(name, [MODULES[part] if isinstance(part, int) else part for part in parts])


# The same modules in four orders, with text and without; "twice" has one at two places.
SCHEMAS = [
    library("first", 0, 1, 2),
    library("swapped", 1, 0, 2),
    library("last", "Words before. ", 2, " between ", 1, 0),
    library("middle", 1, "other text, so that all moves ", 0, 2),
    Schema("twice", [MODULES[1], MODULES[2], Module("again", MODULES[2].body)]),
]
EVERYTHING = {"a": Import("a", {"x": "12"}), "b": Import("b"), "c": Import("c")}


def prompts(isolation: str = "isolated") -> list[CompiledPrompt]:
    """Each schema's, the first one twice."""
    made = []
    for schema, names in zip(
        [SCHEMAS[0], *SCHEMAS], ["abc", "abc", "abc", "abc", "cab", "bc"], strict=True
    ):
        layout = laid_out(schema)
        imports = [EVERYTHING[name] for name in names]
        imports += [Import("again")] if schema.name == "twice" else []
        prompt = Prompt(schema.name, [*imports, "Ask. "])
        encoding = Encoding(layout, isolation)
        made.append(compile_prompt(layout, prompt, isolation, encoding=encoding))
    return made


def documents() -> list[CompiledPrompt]:
    """Prompts of texts in each order, between text of their own."""
    before, *texts = [np.arange(70, 70 + n, dtype=np.int32) for n in (20, 9, 33, 17)]
    keys = [segment_key("documents", ids, []) for ids in texts]
    compiled, end = [], sum(map(len, (before, *texts)))
    for order in permutations(range(3)):
        segments, at = [], len(before)
        for i in order:
            segments.append(Segment("cached", texts[i], at, "document", key=keys[i]))
            at += len(texts[i])
        own = [Segment("text", before, 0, "prompt"), Segment("text", texts[0][:4], end, "prompt")]
        compiled.append(CompiledPrompt("documents", "anchored", (*segments, *own), end + 4))
    return compiled


def check(path, *, alone: bool = True, n: int = 1, tokens: int = 5, compiled=None, **options):
    """Answers of all prompts, one after the other or all at once, against a full pass for each.
    Returns the engine."""
    engine = make_engine(path, **options)
    compiled = compiled or prompts()
    fields = {"n": n, "temperature": 1.0, "seed": 3} if n > 1 else {}
    fields["max_tokens"] = tokens
    requests = [pml_request(i, one, **fields) for i, one in enumerate(compiled)]
    seen, outputs = record(engine), {}
    for part in [[request] for request in requests] if alone else [requests]:
        outputs |= answer(engine, part)
    decoder = load_decoder(path, dtype=torch.float32, device="cpu")
    for number, one in enumerate(compiled):
        for completion in outputs[str(number)].outputs:
            new = completion.token_ids
            want = dense_logprobs(decoder, one, new)
            if n == 1:
                assert_seen(seen, str(number), one, want, new)
                continue
            for step, row in enumerate(range(one.num_tokens, one.num_tokens + len(new) - 1)):
                got = seen[str(number), completion.index, one.next_position + step]
                assert (got - want[row]).abs().max() < 1e-4
    return engine


def stored(engine) -> dict[object, int]:
    """How often the store has each key."""
    keys = [run.name[1] for run in engine.cache.modules]
    return {key: keys.count(key) for key in keys}


# RoPE, whole and partial, scaled, with norms over heads, with two bases and windows; ALiBi; sinks.
MOVE = ["llama", "llama_linear_rope", "mistral", "qwen2_windows", "qwen3", "phi", "falcon_rw"]
MOVE += ["mpt", "gemma2", "gemma3", "smollm3", "phi4_mini", "gpt_oss", "gemma4"]


@pytest.mark.parametrize("family", MOVE)
def test_one_copy_serves_every_position(tiny, family):
    engine = check(tiny(family), max_step_tokens=48)
    assert set(stored(engine).values()) == {1}
    again = prompts()
    before = engine.stats.processed_prompt_tokens
    answer(engine, [pml_request(f"again {i}", one) for i, one in enumerate(again)])
    assert engine.stats.processed_prompt_tokens - before == len(again)  # their last tokens


@pytest.mark.parametrize("family", ["gpt2", "ministral3"])
def test_models_with_places_of_their_own_compute_each(tiny, family):
    """Learned positions, and queries that grow."""
    engine = check(tiny(family))
    assert max(stored(engine).values()) > 1


def test_texts_without_a_schema(tiny):
    """Text of the prompt before them is a prefix like any other."""
    compiled = documents()
    engine = check(tiny("llama"), compiled=compiled)
    assert set(stored(engine).values()) == {1}
    end = compiled[0].next_position - 4
    assert engine.stats.processed_prompt_tokens == end + 4 * len(compiled)


@pytest.mark.parametrize("isolation", ["anchored", "isolated"])
def test_both_isolations(tiny, isolation):
    engine = check(tiny("llama"), compiled=prompts(isolation))
    assert set(stored(engine).values()) == {1}


@pytest.mark.parametrize(
    ("page_size", "chunk", "share", "alone"),
    one_in(2, (1, 16), (1, 7, 4096), ("full", "storage", "off"), (True, False)),
)
def test_chunks_and_pages(tiny, page_size, chunk, share, alone):
    """Rows of several shifts in one step; chunks of modules that see moved parts of their own."""
    check(tiny("gemma3"), alone=alone, share=share, page_size=page_size, max_step_tokens=chunk)


@pytest.mark.parametrize("impl", ["reference", "torch", "cpu"])
def test_every_implementation(tiny, impl):
    check(tiny("llama"), alone=False, impl=impl, max_step_tokens=48)


@pytest.mark.parametrize("alone", [True, False])
def test_n_sequences(tiny, alone):
    check(tiny("llama"), alone=alone, n=3, max_step_tokens=64)


def test_a_small_pool_sets_back(tiny):
    """Parts of modules are evicted and computed again beside parts that were stored elsewhere."""
    compiled = prompts() * 2
    options = {"page_size": 4, "num_pages": 70, "max_step_tokens": 32}
    engine = check(tiny("llama"), alone=False, tokens=60, compiled=compiled, **options)
    assert engine.stats.num_preempted > 0


def shift_ignored(monkeypatch):
    monkeypatch.setattr(ImportedRun, "shift", 0)


def other_sign(monkeypatch):
    monkeypatch.setattr(
        ImportedRun, "shift", property(lambda self: self.run.position - self.position)
    )


def not_rotated(monkeypatch):
    """A moved row asks as its product made it."""

    def change(sources, angles, moved):
        for cos, sin in angles:
            cos[moved], sin[moved] = 1, 0

    change_queries(monkeypatch, change)


def other_rows(monkeypatch):
    """A moved row takes the query of the row after its own."""

    def change(sources, angles, moved):
        sources[moved] = sources[moved].roll(1)

    change_queries(monkeypatch, change)


def change_queries(monkeypatch, change):
    queries = Runner.queries

    def mutated(self, inputs):
        found = queries(self, inputs)
        if found is not None:
            change(*found, slice(len(inputs.positions), None))
        return found

    monkeypatch.setattr(Runner, "queries", mutated)


def module_elsewhere(monkeypatch):
    """A module sees what it attends to where it was stored."""
    attended = SequenceModules.attended
    monkeypatch.setattr(
        SequenceModules,
        "attended",
        lambda self, index: [(run, 7) for run, _ in attended(self, index)],
    )


def places_forgotten(monkeypatch):
    """What prompts compute is found without regard to where their modules are."""

    def spaces(self, tokens):
        return repeat((self.salt, *sorted(self.encoded[i.segment].key for i in self.imports)))

    monkeypatch.setattr(PmlPrompt, "_spaces", spaces)


MUTATIONS = [shift_ignored, other_sign, not_rotated, other_rows, module_elsewhere]
MUTATIONS += [places_forgotten]


@pytest.mark.parametrize("mutate", MUTATIONS)
def test_the_check_sees(tiny, monkeypatch, mutate):
    mutate(monkeypatch)
    with pytest.raises((AssertionError, KeyError)):
        check(tiny("llama"), alone=False, compiled=[*prompts(), *documents()])
