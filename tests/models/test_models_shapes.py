"""Shapes are the published models: parameters, KV memory, and tensors as in transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

from onestem.errors import ConfigError, WeightsError
from onestem.llm import LLM
from onestem.models.config import ModelConfig
from onestem.models.find import find_model
from onestem.models.memory import token_memory
from onestem.models.names import Role
from onestem.models.tensors import Tensors
from onestem.request import SamplingParams
from onestem.shapes import find_shape, is_shape, shape_names

DOCS = Path(__file__).parents[2] / "docs" / "reference" / "shapes.md"

# Thousand millions of parameters, as published.
PUBLISHED = {
    "llama2-7b": 6.74, "llama2-13b": 13.0, "llama-30b": 32.5, "codellama-7b": 6.74,
    "codellama-13b": 13.0, "codellama-34b": 33.7, "mistral-7b": 7.24, "phi-2": 2.78,
    "yi-6b-200k": 6.06, "qwen2.5-0.5b": 0.494, "qwen2.5-7b": 7.62, "qwen2.5-14b": 14.8,
    "llama3.1-8b": 8.03, "llama3.1-70b": 70.6, "falcon-7b": 7.22, "falcon-40b": 41.8,
    "mpt-7b": 6.65, "mpt-30b": 30.0,
    "mixtral-8x7b": 46.7, "qwen3-4b": 4.02, "qwen3-30b-a3b": 30.5, "gpt-oss-20b": 20.9,
    "llama3.2-1b": 1.24, "gemma3-12b": 11.8,  # the text part
    "qwen3.5-0.8b": 0.752, "qwen3.5-9b": 8.95, "qwen3.6-35b-a3b": 34.7,
    "gemma4-e2b": 4.63, "gemma4-26b-a4b": 25.2, "gemma4-31b": 30.7,
}  # fmt: skip
OURS = {"0.1b", "0.5b", "nothing"}
# Their files hold the tied head once more, and it is counted.
HEAD_COUNTED_TWICE = {"falcon-7b", "falcon-40b"}


def parameters(name: str) -> int:
    return Tensors(ModelConfig.from_directory(find_shape(name))).num_parameters


def test_every_shape_is_checked_here():
    assert set(shape_names()) == PUBLISHED.keys() | OURS


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_that_are_published(name):
    config = ModelConfig.from_directory(find_shape(name))
    twice = config.vocab_size * config.hidden_size if name in HEAD_COUNTED_TWICE else 0
    # Figures are published with three digits.
    assert float(f"{(parameters(name) + twice) / 1e9:.3g}") == pytest.approx(
        PUBLISHED[name], rel=0.005
    )


@pytest.mark.parametrize(
    ("name", "mib"),
    [("llama2-7b", 0.5), ("llama2-13b", 0.78125), ("mpt-30b", 1.3125), ("falcon-40b", 1.875)],
)
def test_kv_memory_of_a_token_is_prompt_caches(name, mib):
    """Table 2, in MiB at 16 bits, which counts a key and a value for each query head."""
    config = ModelConfig.from_directory(find_shape(name))
    stored = 2 * config.kv_values_per_token / 2**20
    memory = token_memory(json.loads((find_shape(name) / "config.json").read_text()))
    assert memory.all_heads == mib
    assert memory.kv_heads == stored == mib * config.num_kv_heads / config.num_q_heads


@pytest.mark.parametrize("name", shape_names())
def test_tensors_are_those_of_transformers(name, tmp_path):
    """Of a model of one layer: names and shapes; of mxfp4, before it was packed."""
    values = json.loads((find_shape(name) / "config.json").read_text())
    layers = "n_layers" if "n_layers" in values else "num_hidden_layers"
    values |= {layers: 1, "quantization_config": None}
    values |= {"layer_types": values["layer_types"][:1]} if "layer_types" in values else {}
    values |= {"num_kv_shared_layers": 0} if "num_kv_shared_layers" in values else {}
    (tmp_path / "config.json").write_text(json.dumps(values))
    config = ModelConfig.from_directory(tmp_path)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.from_pretrained(tmp_path)
        )
    theirs = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
    if config.tie_embeddings:
        del theirs[f"{config.tensor_names[Role.HEAD]}.weight"]
    assert Tensors(config).shapes == theirs


def test_a_shape_is_its_config_with_random_weights():
    options = {"device": "cpu", "dtype": "float32", "kv_memory": "1MiB"}
    params = SamplingParams(max_tokens=8, temperature=0)
    answers = []
    for model, more in (("shape:nothing", {}), (find_shape("nothing"), {"random_weights": True})):
        with LLM(model, **options, **more) as llm:
            assert llm.options.random_weights is True
            (answer,) = llm.generate([[5, 6, 7]], params)
            answers.append(answer.outputs[0].token_ids)
    assert len(answers[0]) == 8
    assert answers[0] == answers[1]
    with pytest.raises(WeightsError, match="or ask for random weights"):
        LLM("shape:nothing", random_weights=False, **options)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("shape:8b", "there is no shape '8b': did you mean llama3.1-8b or qwen3.5-0.8b?"),
        ("shape:llama2-7B", "did you mean llama2-7b?"),
        ("shape:llama-7b", "did you mean llama2-7b?"),
        ("shape:", "expected one of 0.1b, 0.5b, codellama-13b"),
        ("shape:../shapes/8b", "there is no shape"),
    ],
)
def test_an_unknown_shape_names_the_nearest(name, says):
    assert is_shape(name)
    with pytest.raises(ConfigError) as told:
        find_model(name)
    assert says in str(told.value)


def test_docs_have_every_shape():
    """With its parameters in thousand millions, and KiB of KV memory per token at 16 bits."""
    text = DOCS.read_text()
    for name in shape_names():
        config = ModelConfig.from_directory(find_shape(name))
        row = f"| `{name}` | {parameters(name) / 1e9:.3g} | {config.kv_values_per_token / 512:g} |"
        assert row in text, row
