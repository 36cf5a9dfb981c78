"""Modules that are moved and repaired, with a tiny model of random weights."""

import json

import pytest
import torch
from safetensors.torch import save_file

from onestem_lab.modules import questions, real
from onestem_lab.modules.forward import Llama, cut, join
from onestem_lab.modules.ways import WAYS, Moved, highest

SIZES = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
LAYERS, WORDS, INNER = 3, 50, 48


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("llama")
    config = {"num_hidden_layers": LAYERS, "rms_norm_eps": 1e-5, "rope_theta": 1e4, **SIZES}
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {"embed_tokens.weight": (WORDS, 32), "norm.weight": (32,)}
    for layer in range(LAYERS):
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"layers.{layer}.{name}.weight"] = (32,)
        for name, size in {"q": (32, 32), "k": (16, 32), "v": (16, 32), "o": (32, 32)}.items():
            shapes[f"layers.{layer}.self_attn.{name}_proj.weight"] = size
        for name, size in {"gate": (INNER, 32), "up": (INNER, 32), "down": (32, INNER)}.items():
            shapes[f"layers.{layer}.mlp.{name}_proj.weight"] = size
    weights = {f"model.{name}": torch.randn(size) / 4 for name, size in shapes.items()}
    save_file(weights, folder / "model.safetensors")
    return Llama(folder, "cpu", torch.float32)


def moved(model: Llama) -> Moved:
    """A head of 4 tokens, modules of 40 and 37 that were computed behind it, 6 own tokens."""
    torch.manual_seed(1)
    ids = torch.randint(WORDS, (87,))
    parts = []
    for first, stop in ((4, 44), (44, 81)):
        alone = torch.cat((ids[:4], ids[first:stop]))
        kv = model.empty(len(alone))
        model.run(alone, torch.arange(len(alone)), kv, 1)
        parts.append(cut(kv, 0 if first == 4 else 4))
    kv = join([*parts, model.empty(6)])
    return Moved(model, ids, kv, [(44, 81)], torch.arange(81, 87))


@pytest.mark.parametrize("name", WAYS)
def test_a_way_keeps_to_its_share_of_the_moved_modules(model, name):
    here = moved(model)
    chosen = WAYS[name](here, 0.5).tolist()
    assert chosen == sorted(set(chosen))
    assert 0 < len(chosen) <= 18
    assert all(44 <= place < 81 for place in chosen)


def test_all_tokens_repaired_are_the_whole_prompt(model):
    here = moved(model)
    rows = torch.cat((WAYS["attention"](here, 1.0), here.own))
    assert rows.tolist() == list(range(44, 87))
    repaired = model.run(here.ids, rows, here.kv, 6)
    whole = model.run(here.ids, torch.arange(87), model.empty(87), 6)
    assert (repaired - whole).abs().max() < 1e-4


def test_the_highest_blocks_begin_at_their_module(model):
    here = moved(model)
    score = torch.zeros(87)
    score[61] = 1
    assert highest(here, score, 0.5, 16).tolist() == list(range(60, 76))


def test_questions_are_those_of_their_number():
    for ask in (questions.questions, real.questions):
        one, again = (list(ask(range(3, 4))) for _ in range(2))
        assert one == again
        assert len(one) == 8
        for question in one:
            text = " ".join(document.text for document in question.documents)
            assert question.judge(text)
