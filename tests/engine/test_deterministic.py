"""`deterministic`: a position's logits have the same bits whatever else an engine does; and what
cannot promise it yet is refused by name."""

from __future__ import annotations

import pytest
import torch

from onestem import LLM
from onestem.build import check_deterministic, kv_identity
from onestem.errors import OnestemError, RequestError
from onestem.models.config import ModelConfig
from onestem.options import EngineOptions
from tests.engine.pml_harness import compiled_prompts, pml_request

OUT = "or leave deterministic out"


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("llama", {"tensor_parallel_size": 2}, "tensor_parallel_size is 2"),
        ("llama", {"quantization": "int8"}, "weights are quantised (int8)"),
        ("llama", {"share": "no-attention"}, "share is no-attention"),
        ("mixtral", {}, "the model has experts"),
        ("llama", {"impl": "torch"}, "attention implementation 'torch' is not deterministic"),
    ],
)
def test_what_cannot_be_is_refused_by_name(tiny, family, options, message):
    with pytest.raises(OnestemError) as told:
        LLM(str(tiny(family)), deterministic=True, device="cpu", kv_memory="1MiB", **options)
    assert message in str(told.value)
    assert "leave deterministic out" in str(told.value)
    assert "\n" not in str(told.value)


def test_gpus_are_refused(tiny):
    config = ModelConfig.from_directory(tiny("llama"))
    asked = EngineOptions(deterministic=True)
    with pytest.raises(OnestemError, match=f"device is cuda:0, .*: use cpu, {OUT}"):
        check_deterministic(asked, config, torch.device("cuda:0"))
    check_deterministic(EngineOptions(), config, torch.device("cuda:0"))


def test_its_keys_values_and_jobs_are_kept_apart(tiny):
    path = tiny("llama")
    plain = EngineOptions(model=path, device="cpu", dtype="bfloat16")
    strict = plain.replace(deterministic=True)
    assert kv_identity(strict, path) == f"{kv_identity(plain, path)} deterministic"
    assert strict.job_identity(strict) == {**plain.job_identity(plain), "deterministic": True}


def test_modules_are_refused(tiny):
    path = str(tiny("llama"))
    with LLM(path, deterministic=True, device="cpu", kv_memory="1MiB") as llm:
        prompt = compiled_prompts("anchored")[0]
        with pytest.raises(RequestError, match=r"a prompt in PML .*: give its text, or leave"):
            llm.engine.add_request(pml_request("0", prompt))
