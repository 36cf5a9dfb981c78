"""Prompts of modules on tiny models, and the full pass with a mask that they must equal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from onestem.engine.engine import Engine
from onestem.models.config import ModelConfig
from onestem.models.decoder import Decoder
from onestem.models.weights import load_decoder
from onestem.ops.layers import rotated
from onestem.pml import (
    CompiledPrompt,
    Encoding,
    Import,
    Isolation,
    Layout,
    Module,
    Parameter,
    Prompt,
    Schema,
    Union,
    compile_prompt,
    lay_out,
)
from onestem.request import Request, SamplingParams
from tests.engine.harness import TOLERANCE, answer, make_engine, oracle_model, watch_logits
from tests.pml.characters import Characters
from tests.pml.mask import shown_to_all, visible

Seen = dict[tuple[str, int, int], Tensor]

# Nested modules, a union in a module, parameters in the middle and at the end, text between, one
# module that is not cached, members of different lengths.
SCHEMA = Schema(
    "tiny",
    [
        "Own text. ",
        Module("a", ["Alpha ", Parameter("x", 6, ""), " and beta", Module("inner", ["deep"])]),
        " between ",
        Union(
            [
                Module("b", ["short one"]),
                Module("b2", ["other one"]),
                Module("c", [Parameter("y", 4), "a longer member ", Parameter("z", 3, "zz")]),
            ]
        ),
        Module("d", ["not cached"], cache=False),
        Module("e", ["the last of the modules"]),
    ],
)
# The last module ends the schema, so a prompt of imports alone ends in a cached token.
PROMPTS = [
    Prompt("tiny", [Import("a", {"x": "12"}), Import("b"), Import("e"), "Ask. "]),
    Prompt("tiny", [Import("a", {"x": "123456"}, [Import("inner")]), Import("e"), "Ask."]),
    Prompt("tiny", [Import("a"), "mid", Import("c", {"y": "no"}), Import("d"), "More?"]),
    Prompt("tiny", [Import("b2"), Import("e")]),
    Prompt("tiny", [Import("e")]),
    Prompt("tiny", [Import("a"), Import("c", {"y": "same", "z": ""}), "And so on"]),
    Prompt("tiny", ["Only text"]),
    Prompt("tiny", [Import("a", {"x": "12"}), Import("b"), Import("e"), "Ask me"]),
]


def laid_out(schema: Schema = SCHEMA) -> Layout:
    return lay_out(schema, Characters())


def compiled_prompts(
    isolation: Isolation, prompts: Sequence[Prompt] = PROMPTS, schema: Schema = SCHEMA
) -> list[CompiledPrompt]:
    layout = laid_out(schema)
    encoding = Encoding(layout, isolation)
    return [compile_prompt(layout, prompt, isolation, encoding=encoding) for prompt in prompts]


def pml_request(name: object, compiled: CompiledPrompt, **fields) -> Request:
    salt = fields.pop("cache_salt", "")
    fields.setdefault("temperature", 0)
    fields.setdefault("ignore_eos", True)
    fields.setdefault("max_tokens", 5)
    return Request(
        request_id=str(name),
        prompt_token_ids=compiled.ordered_token_ids.tolist(),
        params=SamplingParams(**fields),
        pml=compiled,
        cache_salt=salt,
    )


def record(engine: Engine) -> Seen:
    """Watch an engine: (request, sequence, position of the last token seen) -> log-probabilities
    over the whole vocabulary."""
    seen: Seen = {}

    def note(sequence, index, values):
        name = sequence.state.request.request_id
        seen[name, sequence.index, int(sequence.positions(index, index + 1)[0])] = values

    watch_logits(engine, note)
    return seen


# --- the full pass ------------------------------------------------------------------------------


def whole(compiled: CompiledPrompt, new: Sequence[int]) -> tuple[Tensor, Tensor, np.ndarray]:
    """Token ids and positions `[n]` of a prompt and its answer, and who sees whom, `[n, n]`."""
    ids = np.concatenate([compiled.token_ids, np.array(new, np.int32)])
    after = compiled.next_position + np.arange(len(new))
    mask = np.zeros((len(ids), len(ids)), bool)
    count = compiled.num_tokens
    mask[:count, :count] = visible(compiled)
    mask[count:, :count] = shown_to_all(compiled)
    mask[count:, count:] = np.tril(np.ones((len(new), len(new)), bool))
    positions = np.concatenate([compiled.positions, after])
    return torch.from_numpy(ids).long(), torch.from_numpy(positions).long(), mask


@torch.inference_mode()
def dense_logprobs(decoder: Decoder, compiled: CompiledPrompt, new: Sequence[int]) -> Tensor:
    """float32 `[n, vocab]`: what the whole prompt and its answer give in one pass."""
    ids, positions, mask = whole(compiled, new)
    attend = _masked(decoder.config, torch.from_numpy(mask), positions)
    return decoder.logits(decoder.forward(ids, positions, attend)).log_softmax(-1)


@torch.inference_mode()
def dense_weights(decoder: Decoder, compiled: CompiledPrompt) -> dict[int, Tensor]:
    """By layer, float64 `[n, n]`: the weights that a prompt's tokens give to each other, summed
    over heads."""
    ids, positions, mask = whole(compiled, [])
    kept: dict[int, Tensor] = {}
    decoder.forward(
        ids, positions, _masked(decoder.config, torch.from_numpy(mask), positions, kept)
    )
    return kept


@torch.inference_mode()
def transformers_logprobs(path: Path, compiled: CompiledPrompt, new: Sequence[int]) -> Tensor:
    """The same by transformers' own model, where it takes a mask and positions."""
    ids, positions, mask = whole(compiled, new)
    additive = torch.where(torch.from_numpy(mask), 0.0, torch.finfo(torch.float32).min)
    logits = oracle_model(path)(
        ids[None], position_ids=positions[None], attention_mask=additive[None, None]
    ).logits[0]
    return logits.float().log_softmax(-1)


def _masked(
    config: ModelConfig, mask: Tensor, positions: Tensor, kept: dict[int, Tensor] | None = None
):
    """Attention over a dense mask, in float64; its weights, summed over heads, are `kept` by
    layer."""
    held: dict[int, tuple[Tensor, Tensor]] = {}  # keys and values by layer
    distance = positions[:, None] - positions[None, :]
    slopes = getattr(config.positions, "slopes", None) if hasattr(config, "positions") else None
    bias = torch.zeros(config.num_q_heads, 1, 1, dtype=torch.float64)
    if slopes is not None:
        bias = -torch.tensor(slopes, dtype=torch.float64)[:, None, None] * distance

    def attend(layer, qkv, heads, angles):
        q, k, v = (x.double() for x in rotated(qkv, heads, angles))
        read = config.kv_layers[layer]
        if read == layer:
            held[layer] = k, v
        group = config.num_q_heads // config.heads[layer].num_kv_heads
        k, v = (x.repeat_interleave(group, dim=1) for x in held[read])
        scores = torch.einsum("rhd,khd->hrk", q, k) * (config.score_scale or config.head_dim**-0.5)
        if config.score_softcap is not None:
            scores = config.score_softcap * torch.tanh(scores / config.score_softcap)
        scores = scores + bias
        window = config.sliding_windows[layer]
        shown = mask if window is None else mask & (distance < window)
        scores = scores.masked_fill(~shown, float("-inf"))
        if heads.sinks is not None:
            sinks = heads.sinks.double()[:, None, None].expand(-1, len(mask), 1)
            scores = torch.cat((scores, sinks), dim=-1)
        weights = scores.softmax(-1)[..., : len(mask)]
        if kept is not None:
            kept[layer] = weights.sum(0)
        return torch.einsum("hrk,khd->rhd", weights, v).to(qkv.dtype)

    return attend


# --- the check ----------------------------------------------------------------------------------


def check_pml(
    path: Path,
    isolation: Isolation,
    *,
    prompts: Sequence[Prompt] = PROMPTS,
    engine: Engine | None = None,
    alone: bool = False,
    max_tokens: int = 5,
    **options,
) -> Engine:
    """Answers of prompts on the tiny model of `path` against a full pass for each."""
    engine = engine or make_engine(path, **options)
    compiled = compiled_prompts(isolation, prompts)
    requests = [pml_request(i, one, max_tokens=max_tokens) for i, one in enumerate(compiled)]
    seen = record(engine)
    outputs = {}
    for part in [[request] for request in requests] if alone else [requests]:
        outputs |= answer(engine, part)
    decoder = load_decoder(path, dtype=torch.float32, device="cpu")
    for number, one in enumerate(compiled):
        new = outputs[str(number)].outputs[0].token_ids
        assert len(new) == max_tokens
        want = dense_logprobs(decoder, one, new)
        assert_seen(seen, str(number), one, want, new)
    return engine


def assert_seen(
    seen: Seen,
    name: str,
    compiled: CompiledPrompt,
    want: Tensor,
    new: Sequence[int],
    index: int = 0,
) -> None:
    """The engine's log-probabilities at each step are those of the full pass."""
    rows = range(compiled.num_tokens - 1, compiled.num_tokens - 1 + len(new))
    last = int(compiled.positions.max())
    positions = [last, *(compiled.next_position + i for i in range(len(new) - 1))]
    for row, position, token in zip(rows, positions, new, strict=True):
        # The n sequences of a request share the row that begins their answers.
        got = seen[name, index if (name, index, position) in seen else 0, position]
        assert (got - want[row]).abs().max() < TOLERANCE
        if index == 0:
            assert int(got.argmax()) == token
