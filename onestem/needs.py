"""What a model needs on a device, read off its files before anything is loaded. Where several
devices hold it together, the figures are the first one's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from onestem.build import kv_memory_bytes, kv_sizes, pick_device, pick_dtype, set_threads
from onestem.engine.schedule.admission import model_len
from onestem.engine.text.tokenizer import Tokenizer
from onestem.errors import ConfigError, WeightsError
from onestem.models.config import GenerationDefaults, ModelConfig
from onestem.models.families import FAMILIES
from onestem.models.find import find_model
from onestem.models.formats.products import Target
from onestem.models.gguf.file import PLAIN, open_gguf
from onestem.models.linear import Layout
from onestem.models.names import Role
from onestem.models.part import part_of
from onestem.models.quantization import Scheme
from onestem.models.ranks import Ranks
from onestem.models.shards import file_bytes
from onestem.models.sizes import formats_of, keeps, target_of, weight_bytes
from onestem.models.tensors import Tensors
from onestem.models.weights import checked_config, refuse_rounding_twice
from onestem.options import EngineOptions, Quantize


@dataclass(frozen=True)
class Needs:
    """What a model needs on a device.

    Attributes:
        models: the common name of models of this architecture.
        parameters: numbers in its weights.
        windows: how many layers have a sliding window, by the window's size.
        max_positions: tokens that a sequence of the model may have.
        quantization: how the weights are stored, and what becomes of blocks of a GGUF file, or how
            they are rounded when they are loaded; None: as numbers of 16 or 32 bits.
        dtype, device: the ones that would be chosen.
        file_bytes: what the weights' files take on the disk; None: there are none.
        weight_bytes: what the weights take in memory, with the copies that are made for a CPU.
        copies: what is held twice, for people.
        kv_bytes_per_token: keys and values of one token, over all layers.
        state_bytes: the recurrent state of one sequence, over all layers; 0: layers keep none.
        num_states: states that KV memory would hold here, of sequences that run and of prefixes.
        kv_tokens: tokens that KV memory would hold here; 0: the model does not fit.
        max_model_len: the longest sequence that would be answered here.
        ends: tokens that end an answer, by their ids.
        problem: why it would not run as it is; None: it would.
    """

    architecture: str
    models: str
    path: str
    parameters: int
    num_layers: int
    windows: dict[int, int]
    vocab_size: int
    max_positions: int
    quantization: str | None
    dtype: str
    device: str
    file_bytes: int | None
    weight_bytes: int
    copies: list[str]
    kv_bytes_per_token: int
    state_bytes: int
    num_states: int
    kv_tokens: int
    max_model_len: int
    ends: dict[int, str]
    problem: str | None


def needs_of(options: EngineOptions) -> Needs:
    """The needs of the engine that options describe.

    Raises:
        ConfigError: there is no such model, or its family is not supported.
    """
    ranks = options.tensor_parallel_size
    set_threads(options.threads, ranks)
    path, problem = find_model(options.model), None
    config = ModelConfig.from_directory(path)
    formats: dict[str, Scheme | Quantize] = {}
    size, ends = None, dict[int, str]()
    if not options.makes_weights_up:
        try:
            size = file_bytes(path)
            config, stored = checked_config(path)
            formats |= stored
            refuse_rounding_twice(path, config, options.quantization)
            ends = _ends(path, config.vocab_size)
        except (WeightsError, ConfigError) as error:
            problem = str(error)
    device = pick_device(options.device)
    dtype = pick_dtype(options.dtype, config, device)
    if options.quantization is not None:
        formats = formats_of(config, options.quantization, dtype, device)
    name = str(dtype).removeprefix("torch.")
    part = part_of(config, Ranks(0, ranks, None))
    weights = weight_bytes(part, dtype, device, formats)
    target = target_of(Tensors(part), dtype, device)
    token = part.kv_values_per_token * dtype.itemsize
    state = 0 if part.delta is None else part.delta.state_bytes(dtype.itemsize)
    kv_tokens = longest = num_states = 0
    try:
        memory = kv_memory_bytes(options.kv_memory, device, loading=weights, ranks=ranks)
        num_pages, num_states = kv_sizes(memory, options, token, state)
        kv_tokens = num_pages * options.page_size
        longest = model_len(config.max_position_embeddings, kv_tokens, options.max_model_len)
    except ConfigError as error:
        problem = problem or str(error)
    return Needs(
        architecture=config.architecture,
        models=FAMILIES[config.architecture].models,
        path=str(path),
        parameters=Tensors(config).num_parameters,
        num_layers=config.num_layers,
        windows=dict(Counter(size for size in config.sliding_windows if size is not None)),
        vocab_size=config.vocab_size,
        max_positions=config.max_position_embeddings,
        quantization=options.quantization or _stored(path, config, formats, target),
        dtype=name,
        device=str(device),
        file_bytes=size,
        weight_bytes=weights,
        copies=_copies(config, target, formats),
        kv_bytes_per_token=token,
        state_bytes=state,
        num_states=num_states,
        kv_tokens=kv_tokens,
        max_model_len=longest,
        ends=ends,
        problem=problem,
    )


def _ends(path: Path, vocab_size: int) -> dict[int, str]:
    tokenizer, defaults = Tokenizer.from_directory(path), GenerationDefaults.from_directory(path)
    if tokenizer is None:
        return dict.fromkeys(defaults.eos_token_ids, "")
    ids = defaults.ends(tokenizer.end_ids, vocab_size)
    return {token: tokenizer.token_bytes(token).decode("utf-8", "replace") for token in ids}


def _copies(config: ModelConfig, target: Target, formats: Mapping[str, object]) -> list[str]:
    layout, names = target.layout, config.tensor_names
    blocks = [form for form in formats.values() if isinstance(form, Scheme)]
    if any(one.storage == "blocks" and keeps(one, target) for one in blocks):
        return []
    copies = {
        Layout.PACKED_AND_PLAIN: ["matrices also plain, for many rows"],
        Layout.PACKED_FLOAT32: ["matrices also packed, in float32"],
    }.get(layout, [])
    rounded = names[Role.HEAD] in formats
    if config.tie_embeddings and (rounded or layout is not Layout.PLAIN):
        copies = [*copies, "the embedding also as the head"]
    return copies


def _stored(
    path: Path, config: ModelConfig, formats: Mapping[str, Scheme | Quantize], target: Target
) -> str | None:
    """How weights are stored, and what becomes of a GGUF file's blocks; None: as numbers."""
    if not path.is_file():
        method = None if config.quantization is None else config.quantization.method
        return method if formats else None
    stored = Counter(one.kind for one in open_gguf(path).tensors.values() if one.kind not in PLAIN)
    if not stored:
        return None
    kinds = [kind for kind, _ in stored.most_common()]
    schemes = {one.kind: one for one in formats.values() if isinstance(one, Scheme)}
    kept = [kind for kind in kinds if kind in schemes and keeps(schemes[kind], target)]
    name = str(target.dtype).removeprefix("torch.")
    if not kept:
        return f"{', '.join(kinds)}, de-quantised to {name} as they are read"
    return f"{', '.join(kinds)}, kept as they are stored"
