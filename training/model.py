"""The Llama architecture in plain torch, for training with packed rows and explicit masks.

Parameters carry the names of `transformers.LlamaForCausalLM`, so exporting is saving.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Shape:
    """The sizes of the model."""

    vocab_size: int = 2560
    hidden_size: int = 256
    intermediate_size: int = 640
    num_hidden_layers: int = 8
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int = 64
    max_position_embeddings: int = 8192
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on `[rows, heads, length, head_dim]` with tables `[rows, 1, length, head_dim]`."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + turned * sin


class Norm(nn.Module):
    """RMS norm in float32."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape.hidden_size))
        self.eps = shape.rms_norm_eps

    def forward(self, x: Tensor) -> Tensor:
        """`[..., hidden]` -> the same shape and dtype."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (self.weight * wide).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention without biases."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        inner = shape.num_attention_heads * shape.head_dim
        shared = shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, inner, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, shared, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, shared, bias=False)
        self.o_proj = nn.Linear(inner, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """`[rows, length, hidden]` -> the same."""
        rows, length, _ = x.shape

        def heads(projected: Tensor) -> Tensor:
            return projected.view(rows, length, -1, self.head_dim).transpose(1, 2)

        q = rotate(heads(self.q_proj(x)), cos, sin)
        k = rotate(heads(self.k_proj(x)), cos, sin)
        out = attend(q, k, heads(self.v_proj(x)))
        return self.o_proj(out.transpose(1, 2).reshape(rows, length, -1))


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., hidden]` -> the same."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = Mlp(shape)
        self.input_layernorm = Norm(shape)
        self.post_attention_layernorm = Norm(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """`[rows, length, hidden]` -> the same."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class Trunk(nn.Module):
    """Embedding, layers, last norm: `LlamaForCausalLM.model`."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = Norm(shape)


class Llama(nn.Module):
    """The whole model; the output projection is the embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Trunk(shape)
        steps = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
        self.register_buffer("frequency", shape.rope_theta**-steps, persistent=False)
        self.apply(self._start)
        for layer in self.model.layers:
            for last in (layer.self_attn.o_proj, layer.mlp.down_proj):
                nn.init.normal_(last.weight, std=0.02 / (2 * shape.num_hidden_layers) ** 0.5)

    @staticmethod
    def _start(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5 * 0.5)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.05)

    def hidden(self, ids: Tensor, position: Tensor, attend: Attend, dtype: torch.dtype) -> Tensor:
        """ids, position `[rows, length]` -> `[rows, length, hidden]` before the last norm."""
        x = self.model.embed_tokens(ids).to(dtype)
        angle = position[:, None, :, None].float() * self.frequency
        angle = torch.cat((angle, angle), dim=-1)
        cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
        for layer in self.model.layers:
            x = layer(x, cos, sin, attend)
        return x

    def logits(self, x: Tensor) -> Tensor:
        """`[..., hidden]` -> `[..., vocab]`."""
        return F.linear(self.model.norm(x), self.model.embed_tokens.weight)


def config(shape: Shape, bos: int, eos: int, pad: int) -> dict:
    """The model's config.json."""
    sizes = asdict(shape)
    theta = sizes.pop("rope_theta")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **sizes,
        "rope_theta": theta,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": bos,
        "eos_token_id": eos,
        "pad_token_id": pad,
    }


def export(model: Llama, folder: Path, bos: int, eos: int, pad: int) -> None:
    """Write model.safetensors (bfloat16), config.json and generation_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
    }
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    special = {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": pad}
    configs = {
        "config.json": config(model.shape, bos, eos, pad),
        "generation_config.json": {**special, "do_sample": False, "max_new_tokens": 48},
    }
    for name, values in configs.items():
        (folder / name).write_text(json.dumps(values, indent=2) + "\n")
