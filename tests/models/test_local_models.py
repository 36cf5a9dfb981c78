"""Models that other programs keep on this machine."""

from __future__ import annotations

import json
import os

import pytest
from typer.testing import CliRunner

from onestem.cli.app import app
from onestem.errors import ConfigError
from onestem.models import local
from onestem.models.find import find_model
from onestem.models.local import find_local, local_models, names_of


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home with nothing in it, and no packages that have models."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.delenv("OLLAMA_MODELS", raising=False)
    monkeypatch.setattr(local, "distributions", list)
    monkeypatch.setattr(local, "OLLAMA", local.OLLAMA[:1])
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return tmp_path


def make(path, content="x"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    return path


def ollama(store, name, tag, digest, kind=local.MODEL_LAYER):
    layers = [{"mediaType": "other", "digest": "sha256:no"}, {"mediaType": kind, "digest": digest}]
    manifest = store / "manifests" / "registry.ollama.ai" / "library" / name / tag
    make(manifest, json.dumps({"layers": layers}))


def test_nothing_is_here(home):
    assert local_models() == []
    assert find_local("smollm2") is None


def test_what_programs_keep_is_found(home):
    hub = home / "hub" / "models--Owner--Small-1B"
    make(hub / "refs" / "main", "abc")
    make(hub / "snapshots" / "abc" / "config.json", "{}")
    weights = make(hub / "snapshots" / "abc" / "model.safetensors", "12345")
    make(home / "hub" / "models--Owner--No-Weights" / "snapshots" / "abc" / "config.json", "{}")
    store = home / ".ollama" / "models"
    ollama(store, "Llama3.2", "latest", "sha256:aa")
    ollama(store, "llama3.2", "1b", "sha256:bb")
    ollama(store, "gone", "latest", "sha256:cc")
    ollama(store, "adapter", "latest", "sha256:aa", kind="application/vnd.ollama.image.adapter")
    make(store / "manifests" / "broken", "{")
    latest, small = (make(store / "blobs" / f"sha256-{name}", "xyz") for name in ("aa", "bb"))
    here = make(home / "here" / "Tiny-Q4.gguf")
    parts = [make(home / "here" / f"big-0000{i}-of-00002.gguf", "1234") for i in (1, 2)]
    cached = make(home / ".cache" / "llama.cpp" / "deep" / "Other.gguf")
    found = {(one.name, one.kept_by): one for one in local_models()}
    assert {key: one.path.resolve() for key, one in found.items()} == {
        ("big", "file"): parts[0],
        ("llama3.2", "ollama"): latest,
        ("llama3.2:1b", "ollama"): small,
        ("other", "file"): cached,
        ("small-1b", "hub"): weights.parent,
        ("tiny-q4", "file"): here,
    }
    assert found["small-1b", "hub"].num_bytes == 5
    assert found["big", "file"].num_bytes == 8
    assert find_local("TINY-Q4").resolve() == here


def test_two_of_a_name_are_refused_with_their_paths(home):
    paths = [make(home / name / "same.gguf") for name in ("here", ".cache/llama.cpp")]
    with pytest.raises(ConfigError, match="may be any of") as refused:
        find_local("same")
    assert str(paths[1]) in str(refused.value)


def test_a_store_that_may_not_be_read_is_passed_over(home, monkeypatch):
    monkeypatch.setenv("OLLAMA_MODELS", str(home / "none"))
    make(home / "here" / "a.gguf")
    assert [one.name for one in local_models()] == ["a"]


def test_requests_may_give_the_short_name_or_the_path(home):
    file = make(home / "here" / "Tiny-Q4.gguf")
    assert names_of("tiny-q4", file) == ("tiny-q4", str(file))
    assert names_of("Tiny-Q4.gguf", file) == ("tiny-q4", "Tiny-Q4.gguf")
    assert names_of(str(file), file) == ("tiny-q4", str(file))
    for name in ("owner/name", "embedded", "shape:0.1b"):
        assert names_of(name, home) == (name,)
    assert names_of(str(home), home) == (str(home),)
    assert names_of("Tiny-Q4:latest", file) == ("Tiny-Q4:latest", str(file))


def test_names_may_end_in_latest_as_ollama_lists_them(home):
    store = home / ".ollama" / "models"
    ollama(store, "llama3.2", "latest", "sha256:aa")
    file = make(store / "blobs" / "sha256-aa")
    assert find_local("llama3.2:latest") == find_local("Llama3.2") == file


@pytest.mark.parametrize(
    "manifest",
    [
        "[" * 100_000,
        json.dumps({"layers": [{"mediaType": local.MODEL_LAYER, "digest": "a" * 5000}]}),
    ],
    ids=["deep", "long"],
)
def test_odd_manifests_hide_no_other_model(home, manifest):
    store = home / ".ollama" / "models"
    make(store / "manifests" / "registry.ollama.ai" / "library" / "a" / "odd", manifest)
    ollama(store, "good", "latest", "sha256:aa")
    make(store / "blobs" / "sha256-aa")
    assert [one.name for one in local_models()] == ["good"]


def test_odd_links_hide_no_other_model(home):
    cache = home / ".cache" / "llama.cpp"
    make(cache / "z[1]-00001-of-00002.gguf", "1234")
    (cache / "z[1]-00002-of-00002.gguf").symlink_to(cache / "gone")
    (cache / "a.gguf").symlink_to("x" * 300)
    (cache / "b.gguf").symlink_to("b.gguf")
    assert [(one.name, one.num_bytes) for one in local_models()] == [("z[1]", 4)]


def test_odd_names_are_listed_on_one_line(home):
    make(home / "here" / "a\n\udcff.gguf")
    done = CliRunner().invoke(app, ["models"])
    assert done.exit_code == 0
    (line,) = [line for line in done.stdout.splitlines() if "a\\n" in line]
    assert line.startswith("  a\\n\\udcff ")


def hub_model(home, files=("config.json", "model-1.safetensors", "model-2.safetensors")):
    """A repository as the hub's client caches it: links to blobs."""
    repository = home / "hub" / "models--Owner--Small-1B"
    make(repository / "refs" / "main", "abc")
    (repository / "snapshots" / "abc").mkdir(parents=True)
    for name in files:
        blob = make(repository / "blobs" / name, "12345")
        (repository / "snapshots" / "abc" / name).symlink_to(blob)
    return repository


@pytest.mark.parametrize("gone", ["model-2.safetensors", "config.json"])
def test_a_repository_with_a_broken_link_is_listed_with_it(home, gone):
    repository = hub_model(home)
    assert [one.lacks for one in local_models()] == [()]
    (repository / "blobs" / gone).unlink()
    (one,) = local_models()
    assert (one.name, one.kept_by, one.lacks) == ("small-1b", "hub", (gone,))
    assert one.num_bytes == (10 if gone == "config.json" else 5)
    line = CliRunner().invoke(app, ["models"]).stdout.splitlines()[-1]
    assert line.endswith(f"{repository / 'snapshots' / 'abc'}; lacks {gone}")


def test_the_main_revision_is_taken_or_the_newest(home):
    repository = hub_model(home)
    for age, name in enumerate(("newer", "older")):
        folder = make(repository / "snapshots" / name / "config.json", "{}").parent
        make(folder / "model.safetensors")
        os.utime(folder, (2_000_000_000 - age,) * 2)
    assert [one.path.name for one in local_models()] == ["abc"]
    (repository / "refs" / "main").unlink()
    assert [one.path.name for one in local_models()] == ["newer"]


def test_a_split_file_says_which_parts_it_lacks(home):
    for part in (1, 3):
        make(home / "here" / f"big-0000{part}-of-00004.gguf", "1234")
    (one,) = local_models()
    assert (one.name, one.num_bytes) == ("big", 8)
    assert one.lacks == ("big-00002-of-00004.gguf", "big-00004-of-00004.gguf")


def test_names_that_ollama_took_from_the_hub(home):
    store = home / ".ollama" / "models"
    paths = {}
    for owner, digest in (("Bartowski", "aa"), ("unsloth", "bb")):
        for tag in ("latest", "Q4_K_M"):
            layers = [{"mediaType": local.MODEL_LAYER, "digest": f"sha256:{digest}{tag}"}]
            manifest = store / "manifests" / "hf.co" / owner / "Small-GGUF" / tag
            make(manifest, json.dumps({"layers": layers}))
            paths[owner, tag] = make(store / "blobs" / f"sha256-{digest}{tag}")
    assert find_local("hf.co/bartowski/Small-GGUF") == paths["Bartowski", "latest"]
    assert find_model("hf.co/unsloth/small-gguf:latest") == paths["unsloth", "latest"]
    assert find_model("hf.co/unsloth/Small-GGUF:Q4_K_M") == paths["unsloth", "Q4_K_M"]
    with pytest.raises(ConfigError, match="may be any of"):
        find_local("small-gguf")
