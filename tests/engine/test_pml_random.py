"""Random schemas and prompts: whatever they look like, the engine answers what a full pass does."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings

from onestem.models.weights import load_decoder
from onestem.pml import Encoding, PmlError, compile_prompt, lay_out
from tests.engine.harness import answer, make_engine
from tests.engine.pml_harness import assert_seen, dense_logprobs, pml_request, record
from tests.pml.characters import Characters
from tests.pml.random_pml import schemas_with_prompts


class FewCharacters(Characters):
    """Any text in the ids of a tiny vocabulary."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids = [7 + ord(character) % 270 for character in text]
        return [*self.begin, *ids] if add_special_tokens else ids

    def encode_control(self, text: str) -> list[int]:
        return self.encode(text)


@pytest.fixture(scope="module")
def decoder(tiny):
    return load_decoder(tiny("llama"), dtype=torch.float32, device="cpu")


@pytest.mark.parametrize("isolation", ["anchored", "isolated", "off"])
@settings(max_examples=12, suppress_health_check=list(HealthCheck))
@given(drawn=schemas_with_prompts(3))
def test_answers_are_those_of_a_full_pass(tiny, decoder, isolation, drawn):
    schema, *prompts = drawn
    layout = lay_out(schema, FewCharacters())
    encoding = Encoding(layout, isolation)
    try:
        compiled = [compile_prompt(layout, p, isolation, encoding=encoding) for p in prompts]
    except PmlError:
        assume(False)
    engine = make_engine(tiny("llama"), page_size=4, num_pages=128, max_step_tokens=9)
    seen = record(engine)
    requests = [pml_request(i, one, max_tokens=3) for i, one in enumerate(compiled)]
    outputs = answer(engine, requests)
    for number, one in enumerate(compiled):
        new = outputs[str(number)].outputs[0].token_ids
        assert_seen(seen, str(number), one, dense_logprobs(decoder, one, new), new)
