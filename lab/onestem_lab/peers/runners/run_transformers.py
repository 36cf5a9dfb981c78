"""transformers: batched `generate` with PyTorch's scaled_dot_product_attention.

What a careful user does: each prefix is computed once, its keys and values, and states of linear
attention, are copied to the prompts that begin with it, and their own tokens are padded on the
left. Prompts whose prefixes are equally long share a batch. Settings: batch_size, cache (dynamic or
static).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

import torch
from job import Group, Job, main
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache
from transformers.cache_utils import Cache, LinearAttentionLayer

# Of each layer keys and values, [batch, num_kv_heads, tokens, head_dim], or the inputs of its
# convolution and recurrent states, [batch, ..].
LayerKv = list[tuple[Tensor, Tensor]]


class Transformers:
    def __init__(self, job: Job, *, batch_size: int = 64, cache: str = "dynamic") -> None:
        if cache not in ("dynamic", "static"):
            raise ValueError(f"cache is {cache!r}, expected dynamic or static")
        torch.set_num_threads(job.threads)
        self.batch_size, self.cache = batch_size, cache
        self.model = AutoModelForCausalLM.from_pretrained(
            job.model, dtype=getattr(torch, job.dtype), attn_implementation="sdpa"
        ).eval()
        self.model.generation_config.eos_token_id = None
        self.model.generation_config.pad_token_id = 0
        self.kinds = getattr(self.model.config, "layer_types", None) or ()
        self.held: dict[Group, LayerKv] = {}

    @torch.inference_mode()
    def answer(self, job: Job) -> list[list[int]]:
        answers: list[list[int]] = [[] for _ in job.prompts]
        for batch in self._batches(job):
            members = [member for _, chosen in batch for member in chosen]
            for member, ids in zip(members, self._generate(job, batch), strict=True):
                answers[member] = ids
        return answers

    def forget(self) -> None:
        self.held.clear()

    def facts(self) -> dict[str, Any]:
        return {}

    def _batches(self, job: Job) -> Iterator[list[tuple[Group, list[int]]]]:
        """Groups with some of their members, of one prefix length, that fit together in memory."""
        for prefix_tokens, groups in groupby(job.groups, key=lambda g: g.prefix_tokens):
            # One prefix is held beside the copies.
            room = max((job.kv_tokens - prefix_tokens) // job.longest, 1)
            most = min(self.batch_size, room)
            pairs = [(group, member) for group in groups for member in group.members]
            for start in range(0, len(pairs), most):
                chunk = pairs[start : start + most]
                yield [
                    (group, [member for _, member in of_group])
                    for group, of_group in groupby(chunk, key=lambda pair: pair[0])
                ]

    def _generate(self, job: Job, batch: list[tuple[Group, list[int]]]) -> list[list[int]]:
        prefix_tokens = batch[0][0].prefix_tokens
        rows = [job.prompts[member] for _, members in batch for member in members]
        width = max(map(len, rows))
        if min(map(len, rows)) < width and "linear_attention" in self.kinds:
            raise ValueError("padding would enter recurrent states: expected prompts of one length")
        ids = torch.zeros(len(rows), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(rows):
            own = prompt[prefix_tokens:]
            ids[row, :prefix_tokens] = torch.tensor(prompt[:prefix_tokens])
            ids[row, width - len(own) :] = torch.tensor(own)
            mask[row, :prefix_tokens] = mask[row, width - len(own) :] = 1
        output = self.model.generate(
            input_ids=ids,
            attention_mask=mask,
            past_key_values=self._cache(job, batch, width + job.output_tokens),
            max_new_tokens=job.output_tokens,
            do_sample=False,
            disable_compile=True,
        )
        return output[:, width:].tolist()

    def _cache(self, job: Job, batch: list[tuple[Group, list[int]]], length: int) -> Cache:
        """A cache with each row's prefix in it."""
        config = self.model.config
        cache = (
            DynamicCache(config=config)
            if self.cache == "dynamic"
            else StaticCache(config=config, max_cache_len=length)
        )
        if batch[0][0].prefix_tokens == 0:
            return cache
        prefixes = [self._prefix(job, group) for group, _ in batch]
        for index, layer in enumerate(cache.layers):
            one, other = (
                torch.cat(
                    [
                        prefix[index][side].expand(len(members), *prefix[index][side].shape[1:])
                        for prefix, (_, members) in zip(prefixes, batch, strict=True)
                    ]
                )
                for side in (0, 1)
            )
            if isinstance(layer, LinearAttentionLayer):
                layer.update_conv_state(one)
                layer.update_recurrent_state(other)
            else:
                layer.update(one, other)
        # Only the last group can go on in the next batch.
        self.held = {batch[-1][0]: prefixes[-1]}
        return cache

    def _prefix(self, job: Job, group: Group) -> LayerKv:
        if group in self.held:
            return self.held[group]
        ids = torch.tensor([job.prompts[group.members[0]][: group.prefix_tokens]])
        cache = DynamicCache(config=self.model.config)
        self.model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return [_tensors(layer) for layer in cache.layers]


def _tensors(layer: Any) -> tuple[Tensor, Tensor]:
    if isinstance(layer, LinearAttentionLayer):
        return layer.conv_states[0], layer.recurrent_states[0]
    return layer.keys, layer.values


def load(job: Job) -> Transformers:
    return Transformers(job, **job.settings)


if __name__ == "__main__":
    main("transformers", load, ("transformers", "torch"))
