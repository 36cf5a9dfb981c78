"""`onestem pml memory`: the table of the paper, and what is stored with fewer KV heads."""

from __future__ import annotations

import json
import math

import pytest
from typer.testing import CliRunner

from onestem.cli.app import app
from onestem.errors import ConfigError
from onestem.models import find
from onestem.models.memory import token_memory
from tests.models.as_gguf import write_gguf
from tests.models.tiny import make_tiny


def falcon(layers: int, hidden: int, heads: int, **more) -> dict:
    return {
        "model_type": "falcon",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        **more,
    }


def llama(layers: int, hidden: int, heads: int, kv_heads: int) -> dict:
    return {
        "model_type": "llama",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }


# Sizes from the published configs; MB per token as in Prompt Cache's table 2, which cuts its
# figures off behind two digits; MiB that are stored.
TABLE_2 = {
    "BERT": (
        {
            "model_type": "bert",
            "num_hidden_layers": 12,
            "hidden_size": 768,
            "num_attention_heads": 12,
        },
        0.03,
        0.0352,
    ),
    "Falcon 1B": (falcon(24, 2048, 32, multi_query=False), 0.18, 0.1875),
    "Llama 7B": (llama(32, 4096, 32, 32), 0.50, 0.5),
    "Llama 13B": (llama(40, 5120, 40, 40), 0.78, 0.7813),
    "MPT 30B": (
        {"model_type": "mpt", "n_layers": 48, "d_model": 7168, "n_heads": 64},
        1.31,
        1.3125,
    ),
    "Falcon 40B": (
        falcon(60, 8192, 128, new_decoder_architecture=True, num_kv_heads=8),
        1.87,
        0.1172,
    ),
    "Llama 70B": (llama(80, 8192, 64, 8), 2.5, 0.3125),
    "Falcon 180B": (
        falcon(80, 14848, 232, new_decoder_architecture=True, num_kv_heads=8),
        4.53,
        0.1563,
    ),
}


@pytest.mark.parametrize("name", TABLE_2)
def test_the_papers_table(name):
    config, paper, stored = TABLE_2[name]
    size = token_memory(config)
    assert math.floor(100 * size.all_heads) / 100 == paper
    assert size.kv_heads == pytest.approx(stored, abs=1e-4)


def test_other_spellings():
    one_head = falcon(32, 4544, 71, multi_query=True, num_kv_heads=71)
    assert token_memory(one_head).kv_heads == 2 * 2 * 32 * 64 / 2**20
    gpt2 = {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12}
    assert token_memory(gpt2, num_bytes=4).all_heads == 2 * token_memory(gpt2).kv_heads
    wide = llama(28, 1024, 16, 8) | {"head_dim": 128}
    assert token_memory(wide).kv_heads == 2 * 2 * 28 * 8 * 128 / 2**20
    with pytest.raises(ConfigError, match=r"none of num_hidden_layers, n_layer, n_layers"):
        token_memory({"hidden_size": 8})


def test_the_short_name_of_a_gguf_file(tmp_path, monkeypatch):
    """As `onestem models` lists it."""
    path = write_gguf(make_tiny("llama", tmp_path / "llama"), tmp_path / "small.gguf")
    monkeypatch.setattr(find, "find_local", {"small": path}.get)
    names = ["--model", "small", "--model", str(path)]
    table = CliRunner().invoke(app, ["pml", "memory", *names])
    assert table.exit_code == 0, table.output
    rows = [line.split()[:2] for line in table.stdout.splitlines()[1:]]
    assert rows[0] == rows[1]


def test_command(tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(TABLE_2["Llama 70B"][0]))
    runner = CliRunner()
    table = runner.invoke(app, ["pml", "memory", "--model", str(config), "--model", "embedded"])
    assert table.exit_code == 0, table.output
    assert table.stdout.splitlines()[1].split() == ["2.5000", "0.3125", str(config)]
    assert len(table.stdout.splitlines()) == 3
    facts = runner.invoke(app, ["pml", "memory", "--json", "--model", str(tmp_path)])
    assert json.loads(facts.stdout)["mib_per_token"] == {"all_heads": 2.5, "kv_heads": 0.3125}
    config.write_text("[")
    failed = runner.invoke(app, ["pml", "memory", "--model", str(config)])
    assert "cannot be read as JSON" in str(failed.exception)
