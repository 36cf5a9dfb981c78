"""Llama in plain torch, for research: some tokens of a prompt are computed, and keys and values of
the others are taken from copies."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import embedding, linear, scaled_dot_product_attention, silu

KV = list[tuple[Tensor, Tensor]]  # of each layer: keys before rotation, values; [tokens, heads, d]


def cut(kv: KV, first: int, stop: int | None = None) -> KV:
    """Views of some places."""
    return [(k[first:stop], v[first:stop]) for k, v in kv]


def join(parts: Sequence[KV]) -> KV:
    """A copy of `parts`, one after another."""
    return [
        (torch.cat([k for k, _ in layer]), torch.cat([v for _, v in layer]))
        for layer in zip(*parts, strict=True)
    ]


class Llama:
    """A Llama of a folder with `config.json` and one `model.safetensors`."""

    def __init__(self, folder: Path, device: str, dtype: torch.dtype):
        config = json.loads((folder / "config.json").read_text())
        self.layers = config["num_hidden_layers"]
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.dim = config["hidden_size"] // self.heads
        self.eps = config["rms_norm_eps"]
        base = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
        self.steps = base ** -(torch.arange(0, self.dim, 2, device=device).float() / self.dim)
        self.device, self.dtype = device, dtype
        self.w = {
            name.removeprefix("model."): w.to(device, dtype if w.ndim == 2 else torch.float32)
            for name, w in load_file(folder / "model.safetensors").items()
        }

    def rotate(self, x: Tensor, places: Tensor) -> Tensor:
        angles = places[:, None].float() * self.steps
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        a, b = x.float().chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)

    def norm(self, x: Tensor, name: str) -> Tensor:
        return (x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * self.w[name]).to(
            self.dtype
        )

    @torch.inference_mode()
    def run(
        self,
        ids: Tensor,
        rows: Tensor,
        kv: KV,
        logits: int,
        look: Callable[[int, Tensor, Tensor], None] | None = None,
        layers: int | None = None,
    ) -> Tensor:
        """Logits of the last `logits` rows. Computes `rows` (ascending places of `ids`); their keys
        and values replace those in `kv`, which holds all places. A row sees all places up to its
        own. `look(layer, queries, keys)` gets rotated queries and keys."""
        x = embedding(ids[rows], self.w["embed_tokens.weight"]).float()
        places = torch.arange(len(ids), device=ids.device)
        causal = len(rows) == len(ids)
        unseen = None if causal else places[None, :] <= rows[:, None]
        for layer in range(layers or self.layers):
            at = f"layers.{layer}."
            h = self.norm(x, at + "input_layernorm.weight")
            q, k, v = (
                linear(h, self.w[f"{at}self_attn.{n}_proj.weight"]).unflatten(-1, (-1, self.dim))
                for n in "qkv"
            )
            keys, values = kv[layer]
            keys[rows], values[rows] = k, v
            q, k = self.rotate(q, rows), self.rotate(keys, places)
            if look is not None:
                look(layer, q, k)
            group = self.heads // self.kv_heads
            out = scaled_dot_product_attention(
                q.transpose(0, 1)[None],
                k.repeat_interleave(group, 1).transpose(0, 1)[None],
                values.repeat_interleave(group, 1).transpose(0, 1)[None],
                attn_mask=unseen,
                is_causal=causal,
            )[0].transpose(0, 1)
            x = x + linear(out.flatten(1), self.w[at + "self_attn.o_proj.weight"])
            h = self.norm(x, at + "post_attention_layernorm.weight")
            gate, up = (linear(h, self.w[f"{at}mlp.{n}_proj.weight"]) for n in ("gate", "up"))
            x = x + linear(silu(gate) * up, self.w[at + "mlp.down_proj.weight"])
        x = self.norm(x[-logits:], "norm.weight")
        return linear(x, self.w["embed_tokens.weight"]).float()

    def empty(self, tokens: int) -> KV:
        shape = (tokens, self.kv_heads, self.dim)

        def zeros() -> Tensor:
            return torch.zeros(shape, dtype=self.dtype, device=self.device)

        return [(zeros(), zeros()) for _ in range(self.layers)]
