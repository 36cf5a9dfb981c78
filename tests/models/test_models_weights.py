"""Reading directories: whole, sharded, random; and every way in which one can be wrong."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from onestem.errors import UnsupportedError, WeightsError
from onestem.models import checkpoint
from onestem.models.config import ModelConfig
from onestem.models.formats.products import Target
from onestem.models.sizes import weight_bytes
from onestem.models.weights import load_decoder
from tests.models.dense import log_probabilities, oracle, prompt
from tests.models.quantised import mxfp4
from tests.models.tiny import make_tiny

IDS = prompt(12, 288)


def test_staging_copies_every_byte() -> None:
    """Pieces that end inside of a tensor, and tensors that are cut or transposed."""
    copy = checkpoint.Staging(torch.device("cpu"), 100)
    whole = torch.randn(37, 11)
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn):
        tensor = whole.to(dtype)
        for one in (tensor, tensor[3:30], tensor.t(), tensor[:0], tensor[2, 2]):
            found = copy(one)
            assert found.shape == one.shape
            assert found.is_contiguous()
            assert torch.equal(found.float(), one.float())


def _answers(path: Path, *, random_weights: bool = False, seed: int = 0) -> Tensor:
    decoder = load_decoder(
        path, dtype=torch.float32, device="cpu", random_weights=random_weights, seed=seed
    )
    return log_probabilities(decoder, IDS)


def _edited(source: Path, target: Path, **tensors: Tensor | None) -> Path:
    """A copy of a model directory with tensors replaced, added or (None) removed."""
    shutil.copytree(source, target)
    held = load_file(source / "model.safetensors")
    for name, tensor in tensors.items():
        held.pop(name, None)
        if tensor is not None:
            held[name] = tensor
    save_file(held, target / "model.safetensors")
    return target


def test_sharded_equals_whole(llama: Path, tmp_path: Path) -> None:
    sharded = make_tiny("llama", tmp_path, max_shard_size="60KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    assert torch.equal(_answers(sharded), _answers(llama))


def test_missing_tensors_are_named(llama: Path, tmp_path: Path) -> None:
    name = "model.layers.1.self_attn.k_proj.weight"
    with pytest.raises(WeightsError, match=f"lacks .*LlamaForCausalLM.*{name}$"):
        _answers(_edited(llama, tmp_path / "one", **{name: None}))
    names = {
        f"model.layers.{i}.mlp.{n}_proj.weight": None
        for i in (0, 1)
        for n in ("up", "down", "gate")
    }
    with pytest.raises(WeightsError, match=r"layers\.0\.mlp\.down_proj.*\.\.\. \(6 in all\)"):
        _answers(_edited(llama, tmp_path / "six", **names))


def test_unknown_tensors_are_named(llama: Path, tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.bias"
    with pytest.raises(WeightsError, match=f"no place for: {name}"):
        _answers(_edited(llama, tmp_path / "x", **{name: torch.zeros(64)}))


def test_misshapen_tensors_are_named(llama: Path, tmp_path: Path) -> None:
    wrong = {"model.norm.weight": torch.zeros(63)}
    with pytest.raises(WeightsError, match=r"model.norm.weight is \[63\], expected \[64\]"):
        _answers(_edited(llama, tmp_path / "x", **wrong))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn])
def test_quantized_weights_without_a_word_of_it_are_refused(
    llama: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    name = "model.layers.1.self_attn.k_proj.weight"
    weight = load_file(llama / "model.safetensors")[name].to(dtype)
    with pytest.raises(WeightsError, match=f"{name} is .*expected BF16, F16.*says nothing of"):
        _answers(_edited(llama, tmp_path / "one", **{name: weight}))


def test_old_rotary_buffers_are_ignored(llama: Path, tmp_path: Path) -> None:
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}
    assert torch.equal(_answers(_edited(llama, tmp_path / "x", **buffer)), _answers(llama))


def test_a_tied_model_may_carry_a_head_of_the_right_shape(tmp_path: Path) -> None:
    tied = make_tiny("llama_mha_tied", tmp_path / "tied")
    embedding = load_file(tied / "model.safetensors")["model.embed_tokens.weight"]
    with_head = _edited(tied, tmp_path / "head", **{"lm_head.weight": embedding})
    assert torch.equal(_answers(with_head), _answers(tied))
    # One of its own counts, whatever config.json says.
    own = _edited(tied, tmp_path / "own", **{"lm_head.weight": embedding.flip(0).contiguous()})
    torch.testing.assert_close(_answers(own)[0], oracle(own, IDS), atol=1e-4, rtol=0)
    assert (_answers(own) - _answers(tied)).abs().max() > 1
    other = _edited(tied, tmp_path / "other", **{"lm_head.weight": torch.zeros(288, 32)})
    with pytest.raises(WeightsError, match=r"lm_head\.weight is"):
        _answers(other)
    codes = embedding.to(torch.float8_e4m3fn)
    rounded = _edited(tied, tmp_path / "rounded", **{"lm_head.weight": codes})
    with pytest.raises(WeightsError, match=r"lm_head\.weight is F8_E4M3, expected BF16"):
        _answers(rounded)


@pytest.mark.parametrize(("row", "blocks"), [(0, 1), (287, 3), (None, 3)])
def test_a_head_is_compared_with_the_embedding_in_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: int | None, blocks: int
) -> None:
    """Up to the first that differs: neither is read whole."""
    tied = make_tiny("llama_mha_tied", tmp_path / "tied")
    head = load_file(tied / "model.safetensors")["model.embed_tokens.weight"].clone()
    if row is not None:
        head[row, 0] += 1
    path = _edited(tied, tmp_path / "head", **{"lm_head.weight": head})
    sizes: list[int] = []
    monkeypatch.setattr(checkpoint, "COMPARED_ROWS", 100)
    monkeypatch.setattr(
        checkpoint.torch, "equal", lambda x, y: sizes.append(len(x)) or bool((x == y).all())
    )
    own = checkpoint.has_own_head(path, ModelConfig.from_directory(path))
    assert own is (row is not None)
    assert sizes == [100, 100, 88][:blocks]


def test_other_families_name_what_is_wrong(tmp_path: Path) -> None:
    gpt2 = make_tiny("gpt2", tmp_path / "gpt2")
    name = "transformer.h.1.attn.c_attn.weight"
    with pytest.raises(WeightsError, match=f"lacks .*GPT2LMHeadModel.*{name}$"):
        _answers(_edited(gpt2, tmp_path / "lacking", **{name: None}))
    with pytest.raises(WeightsError, match=rf"{name} is \[192, 64\], expected \[64, 192\]"):
        _answers(_edited(gpt2, tmp_path / "turned", **{name: torch.zeros(192, 64)}))
    mpt = make_tiny("mpt", tmp_path / "mpt")
    bias = "transformer.blocks.0.norm_1.bias"
    with pytest.raises(WeightsError, match=f"MptForCausalLM has no place for: {bias}"):
        _answers(_edited(mpt, tmp_path / "bias", **{bias: torch.zeros(64)}))
    phi = make_tiny("phi", tmp_path / "phi")
    with pytest.raises(WeightsError, match=r"lacks .*PhiForCausalLM.*lm_head\.bias$"):
        _answers(_edited(phi, tmp_path / "head", **{"lm_head.bias": None}))


def test_a_checkpoint_without_its_head_has_no_prefix(tmp_path: Path) -> None:
    """As GPT-2 was published: no `transformer.` before names, and masks among the tensors."""
    gpt2 = make_tiny("gpt2", tmp_path / "gpt2")
    held = load_file(gpt2 / "model.safetensors")
    renamed: dict[str, Tensor | None] = dict.fromkeys(held)
    for name, tensor in held.items():
        renamed[name.removeprefix("transformer.")] = tensor
    renamed["h.0.attn.bias"] = torch.ones(1, 1, 128, 128)
    base = _edited(gpt2, tmp_path / "base", **renamed)
    assert torch.equal(_answers(base), _answers(gpt2))
    with pytest.raises(WeightsError, match=r"lacks .*transformer\.wpe\.weight$"):
        _answers(_edited(base, tmp_path / "lacking", **{"wpe.weight": None}))


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe", "glm4_moe"])
def test_experts_in_one_tensor_are_those_in_many(family: str, tmp_path: Path) -> None:
    """As they are published, and as transformers holds them."""
    each = make_tiny(family, tmp_path / "each")
    model = transformers.AutoModelForCausalLM.from_pretrained(each)
    model.save_pretrained(tmp_path / "fused", save_original_format=False)
    held = load_file(tmp_path / "fused" / "model.safetensors")
    assert "model.layers.1.mlp.experts.down_proj" in held or family == "qwen3_moe"
    assert torch.equal(_answers(tmp_path / "fused"), _answers(each))


def test_experts_are_checked_one_by_one(tmp_path: Path) -> None:
    mixtral = make_tiny("mixtral", tmp_path / "mixtral")
    name = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    ours = name.replace("block_sparse_moe", "mlp")
    with pytest.raises(WeightsError, match=f"lacks .*MixtralForCausalLM.*{ours}$"):
        _answers(_edited(mixtral, tmp_path / "lacking", **{name: None}))
    with pytest.raises(WeightsError, match=rf"{ours} is \[96, 63\], expected \[96, 64\]"):
        _answers(_edited(mixtral, tmp_path / "wrong", **{name: torch.zeros(96, 63)}))
    more = {name.replace("experts.2", "experts.4"): torch.zeros(96, 64)}
    with pytest.raises(WeightsError, match=r"no place for: .*experts\.4\.w3"):
        _answers(_edited(mixtral, tmp_path / "more", **more))


def test_layers_that_predict_further_tokens_are_ignored(tmp_path: Path) -> None:
    """GLM-4.5 is published with one behind the last layer."""
    glm = make_tiny("glm4_moe", tmp_path / "glm")
    more = {"model.layers.2.eh_proj.weight": torch.zeros(64, 128)}
    assert torch.equal(_answers(_edited(glm, tmp_path / "more", **more)), _answers(glm))


def test_a_correction_stays_float32(tmp_path: Path) -> None:
    glm = make_tiny("glm4_moe", tmp_path / "glm")
    decoder = load_decoder(glm, dtype=torch.bfloat16, device="cpu")
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert torch.equal(decoder.layers[1].mlp.correction, load_file(glm / "model.safetensors")[name])


@pytest.mark.parametrize("kernels", [False, True])
def test_mxfp4_is_read_as_transformers_converts_it(
    tmp_path: Path, kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU it stays in four bits."""
    monkeypatch.setattr(Target, "has_kernels", kernels)
    path = mxfp4(make_tiny("gpt_oss", tmp_path / "plain"), tmp_path / "mxfp4")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path,
        dtype=torch.float32,
        attn_implementation="eager",
        quantization_config=transformers.Mxfp4Config(dequantize=True),
    )
    with torch.inference_mode():
        expected = model(IDS[None]).logits.log_softmax(-1)
    torch.testing.assert_close(_answers(path), expected, atol=1e-4, rtol=0)
    decoder = load_decoder(path, dtype=torch.float32, device="cpu")
    plain = load_decoder(tmp_path / "plain", dtype=torch.float32, device="cpu")
    assert decoder.num_parameters == plain.num_parameters
    assert decoder.weight_bytes == weight_bytes(decoder.config, torch.float32, decoder.device)
    # Tiles of 64 rows by 128 columns are half empty at this size.
    assert (decoder.weight_bytes < 0.6 * plain.weight_bytes) == kernels


def test_random_weights_of_mxfp4(tmp_path: Path) -> None:
    """As large as those of other formats."""
    path = mxfp4(make_tiny("gpt_oss", tmp_path / "plain"), tmp_path / "mxfp4")
    options = {"dtype": torch.float32, "device": "cpu", "random_weights": True}
    experts = [load_decoder(path, **options).layers[1].mlp.products.experts for _ in range(2)]
    first, again = (one[2].down.weight for one in experts)
    assert torch.equal(first, again)
    assert not torch.equal(first, experts[0][1].down.weight)
    assert 0.7 < first.std().item() / 0.02 < 1.5


def test_mxfp4_of_another_kind_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = mxfp4(make_tiny("gpt_oss", tmp_path / "plain"), tmp_path / "mxfp4")
    name = "model.layers.1.mlp.experts.down_proj_scales"
    scales = load_file(path / "model.safetensors")[name]
    with pytest.raises(WeightsError, match=f"{name} is I8"):
        _answers(_edited(path, tmp_path / "signed", **{name: scales.to(torch.int8)}))
    with pytest.raises(WeightsError, match=f"lacks .*{name}"):
        _answers(_edited(path, tmp_path / "lacking", **{name: None}))
    holes = scales.clone()
    holes[0, 0, 0] = 255
    with pytest.raises(WeightsError, match=rf"model\.safetensors: {name} has NaN: the file"):
        _answers(_edited(path, tmp_path / "holes", **{name: holes}))
    large = _edited(path, tmp_path / "large", **{name: torch.full_like(scales, 129)})
    assert bool(_answers(large).isfinite().all())
    with monkeypatch.context() as patched:
        patched.setattr(Target, "has_kernels", True)
        with pytest.raises(WeightsError, match=f"{name} has 129, limit on a GPU is 128"):
            _answers(large)
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"]["quant_method"] = "gptq"
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedError, match="quant_method is 'gptq', supported: mxfp4"):
        _answers(path)


def test_directories_without_readable_weights(llama: Path, tmp_path: Path) -> None:
    shutil.copy(llama / "config.json", tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(WeightsError, match=r"but pytorch_model\.bin.*convert.*random weights"):
        _answers(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not one")
    with pytest.raises(WeightsError, match="cannot be read as safetensors"):
        _answers(tmp_path)


def test_indexes_that_do_not_hold(tmp_path: Path) -> None:
    path = make_tiny("llama", tmp_path, max_shard_size="60KB")
    index = path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    files = Counter(content["weight_map"].values())
    (first, count), (second, _) = files.most_common(2)
    assert count > 1
    name = next(n for n, file in content["weight_map"].items() if file == first)
    index.write_text(json.dumps({"weight_map": {**content["weight_map"], name: second}}))
    with pytest.raises(WeightsError, match=f"do not hold: {name}"):
        _answers(path)
    index.write_text(json.dumps(content))
    # A tensor that is in a file alone counts as one that is in the index.
    whole = load_file(path / first)
    answers = _answers(path)
    del content["weight_map"][name]
    index.write_text(json.dumps(content))
    assert torch.equal(_answers(path), answers)
    save_file({**whole, "model.more": whole[name].clone()}, path / first, metadata={"format": "pt"})
    with pytest.raises(WeightsError, match=r"model\.more"):
        _answers(path)
    (path / first).unlink()
    with pytest.raises(WeightsError, match=f"lacks files .* {first}"):
        _answers(path)
    for text in ("{}", "[" * 10**5):
        index.write_text(text)
        with pytest.raises(WeightsError, match="no readable weight_map"):
            _answers(path)
    for file in ("../outside.safetensors", str(path / second), "", ".", "..", 5, [5]):
        index.write_text(json.dumps({"weight_map": {**content["weight_map"], name: file}}))
        with pytest.raises(WeightsError, match="names what is no file beside it"):
            _answers(path)
    index.write_text(json.dumps({"weight_map": {**content["weight_map"], name: "x" * 5000}}))
    with pytest.raises(WeightsError, match="lacks files that its index names"):
        _answers(path)
    index.unlink()
    index.mkdir()
    with pytest.raises(WeightsError, match="no readable weight_map"):
        _answers(path)


def test_one_tensor_by_two_names_is_refused(tmp_path: Path) -> None:
    path = make_tiny("gemma3_image", tmp_path / "gemma")
    tensors = load_file(path / "model.safetensors")
    old = next(name for name in tensors if name.endswith("layers.0.mlp.up_proj.weight"))
    new = "model.language_model." + old[old.index("layers.") :]
    new = new if new != old else "language_model.model." + old[old.index("layers.") :]
    with pytest.raises(WeightsError, match="are one tensor: leave one out"):
        _answers(_edited(path, tmp_path / "two", **{new: tensors[old]}))


def test_control_characters_in_names_are_escaped(llama: Path, tmp_path: Path) -> None:
    path = _edited(llama, tmp_path / "x", **{"ju\nnk\x1b[31m": torch.zeros(1)})
    with pytest.raises(WeightsError) as error:
        _answers(path)
    assert r"no place for: ju\nnk\x1b[31m" in str(error.value)


def test_random_weights_need_only_a_config(llama: Path, tmp_path: Path) -> None:
    shutil.copy(llama / "config.json", tmp_path)
    first = _answers(tmp_path, random_weights=True)
    assert first.isfinite().all()
    assert torch.equal(first, _answers(tmp_path, random_weights=True))
    assert not torch.equal(first, _answers(tmp_path, random_weights=True, seed=1))


def test_random_weights_have_the_config_s_spread(llama: Path) -> None:
    decoder = load_decoder(llama, dtype=torch.float32, device="cpu", random_weights=True)
    assert decoder.embedding.std().item() == pytest.approx(0.02, rel=0.05)
    assert decoder.embedding.mean().abs() < 1e-3
    assert torch.equal(decoder.norm.weight, torch.ones(64))


def test_gemma_4_leaves_keys_that_nobody_reads(tmp_path: Path) -> None:
    """Files hold keys and values of layers that read those of others, and encoders."""
    path = make_tiny("gemma4_image", tmp_path / "tiny")
    at = "model.language_model.layers.3.self_attn."
    unread = {f"{at}{part}_proj.weight": torch.ones(16, 64) for part in "kv"}
    unread |= {f"{at}k_norm.weight": torch.ones(16), "model.audio_tower.x.weight": torch.ones(2)}
    more = _edited(path, tmp_path / "more", **unread)
    assert torch.equal(_answers(more), _answers(path))
    others = {f"{at.replace('3', '2')}{part}_proj.weight": None for part in "kv"}
    with pytest.raises(WeightsError, match=r"lacks .*layers\.2\.self_attn\.k_proj"):
        _answers(_edited(path, tmp_path / "less", **others))


def test_gemma_4_of_single_experts(tmp_path: Path) -> None:
    path = make_tiny("gemma4_moe", tmp_path / "tiny")
    changes: dict[str, Tensor | None] = {}
    for name, tensor in load_file(path / "model.safetensors").items():
        if name.endswith("experts.gate_up_proj"):
            at = name.removesuffix("gate_up_proj")
            for i, both in enumerate(tensor):
                gate, up = (half.contiguous() for half in both.chunk(2))
                changes |= {f"{at}{i}.gate_proj.weight": gate, f"{at}{i}.up_proj.weight": up}
            changes[name] = None
        elif name.endswith("experts.down_proj"):
            changes |= {f"{name[:-9]}{i}.down_proj.weight": one for i, one in enumerate(tensor)}
            changes[name] = None
    single = _edited(path, tmp_path / "single", **changes)
    assert torch.equal(_answers(single), _answers(path))


def test_gemma_4_unified_equals_transformers(tmp_path: Path) -> None:
    """It reads images without an encoder; of its text part."""
    whole = make_tiny("gemma4", tmp_path / "tiny")
    text = json.loads((whole / "config.json").read_text())
    text = {key: value for key, value in text.items() if "per_layer_input" not in key}
    vision = {"mm_embed_dim": 8, "mm_posemb_size": 4, "patch_size": 4}
    config = transformers.Gemma4UnifiedConfig(
        text_config={**text, "model_type": "gemma4_unified_text"}, vision_config=vision
    )
    model = transformers.Gemma4UnifiedForConditionalGeneration(config)
    held = load_file(whole / "model.safetensors")
    model.model.language_model.load_state_dict(
        {name.removeprefix("model."): tensor for name, tensor in held.items()}
    )
    model.save_pretrained(tmp_path / "unified")
    found = _answers(tmp_path / "unified")[0]
    torch.testing.assert_close(found, oracle(tmp_path / "unified", IDS), atol=1e-4, rtol=0)
    assert torch.equal(found, _answers(whole)[0])
