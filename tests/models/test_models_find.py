"""What is no model's directory is named, with the way out."""

from __future__ import annotations

import pytest

from onestem.errors import ConfigError, WeightsError
from onestem.models.find import find_model
from onestem.models.shards import file_bytes

FORMATS = {
    "model.ONNX": "is an ONNX graph, which is not loaded: give the directory of the original",
    "model.safetensors": "is a file of weights alone: give its directory, with config.json",
    "pytorch_model.bin": "is a file of pickled weights, which are not loaded: convert it to saf",
    "model.gguf.gz": "is packed: unpack it",
    "model.pth": "is a file of pickled weights, which are not loaded: convert it",
    "config.json": "is a file: give its directory",
    "model.mlx": "is a file: give a model's directory",
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_file_is_told_for_what_it_is(tmp_path, name):
    (tmp_path / name).touch()
    with pytest.raises(ConfigError) as refused:
        find_model(tmp_path / name)
    assert FORMATS[name] in str(refused.value)


def test_a_name_that_cannot_be_a_file_is_told():
    with pytest.raises(ConfigError, match="cannot be read: File name too long"):
        find_model("x" * 300)


def test_a_repository_of_gguf_files_says_how_to_give_one(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(tmp_path))
    (tmp_path / "README.md").touch()
    with pytest.raises(ConfigError, match=r"has no config\.json on the hub: .*o/a-GGUF FILE\.gguf"):
        find_model("o/a-GGUF")


def test_a_gguf_file_is_a_model(tmp_path):
    """By its name, or by its first bytes."""
    for name in ("model-q4.gguf", "sha256-abc"):
        (tmp_path / name).write_bytes(b"GGUF")
        assert find_model(tmp_path / name) == tmp_path / name
    (tmp_path / "sha256-abc").write_bytes(b"GGML")
    with pytest.raises(ConfigError, match="is a file: give a model's directory"):
        find_model(tmp_path / "sha256-abc")


def test_a_directory_with_a_gguf_file_says_to_give_it(tmp_path):
    (tmp_path / "model-q4.gguf").touch()
    told = r"has no config\.json, but model-q4\.gguf, a GGUF file: give its path"
    with pytest.raises(ConfigError, match=told):
        find_model(tmp_path)


@pytest.mark.parametrize("name", ["model.ONNX", "pytorch_model.bin", "model.pth"])
def test_a_directory_of_another_format_is_told_for_what_it_is(tmp_path, name):
    """Without config.json, and with it."""
    (tmp_path / name).touch()
    (tmp_path / "tokenizer.json").touch()
    told = FORMATS[name].removeprefix("is ")
    with pytest.raises(ConfigError) as refused:
        find_model(tmp_path)
    assert f"has no config.json, but {name}, {told}" in str(refused.value)
    (tmp_path / "config.json").write_text("{}")
    assert find_model(tmp_path) == tmp_path
    with pytest.raises(WeightsError) as refused:
        file_bytes(tmp_path)
    assert f"index.json, but {name}, {told}" in str(refused.value)


def test_an_adapter_is_told_for_what_it_is(tmp_path):
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).touch()
    with pytest.raises(
        ConfigError, match=r"no config\.json, but a LoRA adapter: merge the adapter"
    ):
        find_model(tmp_path)


def test_weights_of_another_name_are_told(tmp_path):
    (tmp_path / "consolidated.safetensors").touch()
    with pytest.raises(WeightsError, match=r"but consolidated\.safetensors: write the weights as"):
        file_bytes(tmp_path)


@pytest.mark.parametrize("name", ["models/foo.gguf", "foo.GGUF", "m/a.safetensors"])
def test_a_file_that_is_not_there_is_not_looked_up_on_the_hub(name, monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: pytest.fail("asked"))
    with pytest.raises(ConfigError, match=f"model '{name}': there is no such file"):
        find_model(name)
