"""From options to an engine: its device, memory, model and processes."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import re
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import torch

from onestem import __version__
from onestem.batch import model_files, model_identity
from onestem.cache.host import HostStore
from onestem.cache.pieces import PIECE_TOKENS
from onestem.cache.storage import DiskStore
from onestem.engine.engine import Engine
from onestem.engine.text.tokenizer import Tokenizer
from onestem.engine.trace import StepTrace
from onestem.engine.warm_up import SHARES, warm_up
from onestem.errors import ConfigError, UnsupportedError
from onestem.models.config import GenerationDefaults, ModelConfig
from onestem.models.decoder import Decoder
from onestem.models.find import find_model
from onestem.models.part import part_of
from onestem.models.ranks import Ranks
from onestem.models.sizes import quantised_as
from onestem.models.weights import load_decoder
from onestem.ops.cpu import chosen_isa, is_built
from onestem.options import EngineOptions, parse_memory
from onestem.parallel import Team
from onestem.planner import default_order
from onestem.threads import ram_bytes, usable_cores

GIB = 2**30
GPU_SHARE = 0.9  # of a GPU's free memory, for KV
READ_MEMORY = 2 * GIB  # of the host, at most, for what is read from a disk, where none is asked for

# For a sequence of 1,024 sampled tokens (`onestem.ops.triton.penalties`).
PENALTY_LIST_BYTES = 32 * 1024


def build_engine(options: EngineOptions, path: Path | None = None) -> Engine:
    """Load a model, and make the engine that runs it. `Engine.options` has no `auto` left.

    Where several devices hold the model, `Engine.team` is the processes of the others. Close it
    after the engine, when nothing holds the model any more.

    Args:
        path: of the model's directory, where it was found already: a hub is asked each time.

    Raises:
        OnestemError: with one line that says what is wrong and the way out.
    """
    size = options.tensor_parallel_size
    set_threads(options.threads, size)
    with ExitStack() as opened:
        trace = None
        if options.trace is not None:
            trace = opened.enter_context(closing(StepTrace(options.trace)))
        path = path or find_model(str(options.model))
        config = ModelConfig.from_directory(path)
        device = pick_device(options.device)
        dtype = pick_dtype(options.dtype, config, device)
        check_ranks(options, config)
        check_deterministic(options, config)
        # Before the weights: it may be refused.
        tokenizer = Tokenizer.from_directory(path, options.template_text)
        team = opened.enter_context(closing(Team(size, device))) if size > 1 else None
        decoder = (load_decoder if team is None else team.load_decoder)(
            path,
            dtype=dtype,
            device=device,
            random_weights=options.makes_weights_up,
            quantization=options.quantization,
            deterministic=options.deterministic,
        )
        num_pages, num_states = _kv_sizes(options, config, decoder, device, team)
        kv_bytes = num_pages * options.page_size * decoder.kv_bytes_per_token
        settled = options.replace(
            device=str(device),
            dtype=str(dtype).removeprefix("torch."),
            kv_memory=kv_bytes + num_states * decoder.state_bytes,
            order=options.order or default_order(options.levels),
            random_weights=options.makes_weights_up,
            threads=torch.get_num_threads(),
        )
        engine = Engine(
            decoder,
            tokenizer,
            _defaults(options, path),
            settled.replace(bits=bits_identity(settled) if options.deterministic else None),
            num_pages=num_pages,
            num_states=num_states,
            team=team,
        )
        if device.type == "cuda":
            warm_up(engine)
        _keep_below(engine, path)
        if trace is not None:
            engine.trace = trace
            trace.restart()
        opened.pop_all()
    return engine


def _defaults(options: EngineOptions, path: Path) -> GenerationDefaults:
    """Sampling defaults: those of the options, else the model's."""
    own = GenerationDefaults.from_directory(path)
    heat, top_p = options.default_temperature, options.default_top_p
    return replace(
        own,
        temperature=own.temperature if heat is None else heat,
        top_p=own.top_p if top_p is None else top_p,
    )


def _kv_sizes(
    options: EngineOptions,
    config: ModelConfig,
    decoder: Decoder,
    device: torch.device,
    team: Team | None,
) -> tuple[int, int]:
    """Pages of KV memory, and slots of states, that there is room for beside the model and a
    step."""
    rows = options.max_step_tokens or decoder.step_rows
    memory = kv_memory_bytes(
        options.kv_memory,
        device,
        activation_bytes(config, decoder.dtype, rows, device) + decoder.scratch_bytes,
        ranks=options.tensor_parallel_size,
        most=None if team is None else team.free_bytes,
    )
    token = decoder.kv_bytes_per_token
    return kv_sizes(memory, options, token, decoder.state_bytes)


def _keep_below(engine: Engine, path: Path) -> None:
    """Give the engine the tiers below KV memory that its options name; `path`: of its model."""
    options, disk, identity = engine.options, None, ""  # of one process, unless there are files
    size = options.tensor_parallel_size
    host = parse_memory(options.host_kv) // size
    decoder = engine.weights.decoder
    piece = PIECE_TOKENS * decoder.kv_bytes_per_token + decoder.state_bytes
    if parse_memory(options.host_kv) > ram_bytes():
        have = f"this machine has {ram_bytes() / GIB:.1f} GiB"
        raise ConfigError(f"host_kv is {options.host_kv}, {have}: lower it")
    sizes = {"disk_kv_size": options.disk_kv_size}
    if options.disk_kv is None:  # reading files takes more host memory anyway
        sizes = {"host_kv": options.host_kv}
    state = " and a recurrent state" * (decoder.state_bytes > 0)
    for name, given in sizes.items():
        if 0 < parse_memory(given) < size * piece:
            raise ConfigError(
                f"{name} is {given}, and {PIECE_TOKENS} tokens{state}, which are kept together, "
                f"take {size * piece} bytes: give at least these, or 0"
            )
    row_seconds = None
    if options.disk_kv is not None:
        identity = kv_identity(options, path)
        most = parse_memory(options.disk_kv_size)
        disk = DiskStore(Path(options.disk_kv), most, identity, size=size)
        # What is read for a request must stay until it is admitted.
        request = engine.max_model_len * decoder.kv_bytes_per_token + decoder.state_bytes
        host = max(host, min(READ_MEMORY // size, 4 * request))
        if options.device.startswith("cuda"):  # where reading has to beat computing
            row_seconds = warm_up(engine, SHARES[:1])
    engine.keep_below(identity, host=HostStore(host) if host > 0 else None, disk=disk)
    if engine.tiers is not None:
        engine.tiers.stores.rates.row_seconds = row_seconds


def kv_identity(options: EngineOptions, path: Path) -> str:
    """What keys and values depend on besides tokens and labels; `options` are an engine's, `path`
    is its model's directory."""
    identity = model_identity(path)  # first: it refuses what is no file
    # Each of them: large files are sampled, and one may be older than what it takes the place of.
    times = str([file.stat().st_mtime_ns for file in model_files(path)])
    changed = hashlib.blake2b(times.encode(), digest_size=8).hexdigest()
    made_up = " random" if options.random_weights else ""
    rounded = f" {options.quantization}" if options.quantization else ""
    kind = f"{options.device.partition(':')[0]} {__version__}"
    bits = f" {options.bits}" if options.bits is not None else ""
    size = options.tensor_parallel_size
    ranks = f" on {size} ranks" if size > 1 else ""
    return f"{identity} {changed} {kind} {options.dtype}{made_up}{rounded}{bits}{ranks}"


def bits_identity(options: EngineOptions) -> str:
    """What bits depend on besides model, tokens and other options, all settled, where an engine is
    `deterministic`."""
    if options.device.startswith("cuda"):
        kind = torch.cuda.get_device_name(options.device)
        kind += f", Triton {importlib.metadata.version('triton')}"
    else:
        kind = f"{options.threads} threads, {chosen_isa()}"
    return f"{kind}, torch {torch.__version__}"


def pick_device(name: str) -> torch.device:
    """The device of a name; `auto` is a GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu(:0)?|cuda(:(0|[1-9]\d?))?", name):
        raise ConfigError(f"device is {name!r}, expected auto, cpu, cuda or cuda:N")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device is {name!r}, and torch {torch.__version__} sees no GPU: use cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device is {name!r}, there are {torch.cuda.device_count()} GPUs")
    return torch.device("cpu") if device.type == "cpu" else device  # cpu:0 is the CPU


def pick_dtype(name: str, config: ModelConfig, device: torch.device) -> torch.dtype:
    """The dtype of a name; `auto` is the model's, but float32 on a CPU without bf16 products.
    Blocks of a GGUF file have products of their own there."""
    if name == "auto":
        has_blocks = config.quantization is not None and config.quantization.converts
        bf16 = (has_blocks and is_built()) or torch.ops.mkldnn._is_mkldnn_bf16_supported()
        slow = device.type == "cpu" and not bf16
        name = "float32" if slow else config.torch_dtype
    if name not in ("float32", "bfloat16", "float16"):
        raise ConfigError(f"dtype is {name!r}, expected auto, float32, bfloat16 or float16")
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def activation_bytes(
    config: ModelConfig, dtype: torch.dtype, rows: int, device: torch.device
) -> int:
    """About the bytes of a step of `rows` rows besides weights and KV: a layer's intermediates, and
    for the maximum of decoding rows twice the logits, and penalties (a bit for each token of the
    vocabulary, and a list)."""
    heads = max((config.num_q_heads + one.num_kv_heads) * one.head_dim for one in config.heads)
    inner = max(config.mlp_size(layer) for layer in range(config.num_layers))
    wide = 3 * inner + 4 * config.hidden_size + 4 * heads
    wide += 3 * config.num_layers * config.token_vectors
    if config.experts is not None:
        size, top_k = config.experts.intermediate_size, config.experts.top_k
        wide += top_k * (3 * size + 2 * config.hidden_size) + 3 * config.experts.shared_size
    row = 2 * config.vocab_size * 4 + config.vocab_size // 8 + PENALTY_LIST_BYTES
    logit_rows = 0
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
        logit_rows = largest_decode(config.vocab_size, memory)
    return rows * wide * dtype.itemsize + logit_rows * row


def largest_decode(vocab_size: int, device_memory: int) -> int:
    """Maximum rows of a step with logits, which memory is left for: 4,096 where twice their logits
    (float32) take at most a sixteenth of the device's memory (bytes), else 2,048."""
    return 4096 if 16 * 2 * 4096 * 4 * vocab_size <= device_memory else 2048


def set_threads(threads: int | None, ranks: int = 1) -> None:
    """Set how many threads compute on a CPU (see `EngineOptions`), in each of `ranks` processes."""
    share = max(1, usable_cores() // ranks)
    if threads is not None:
        torch.set_num_threads(threads)
    elif "OMP_NUM_THREADS" not in os.environ and torch.get_num_threads() > share:
        torch.set_num_threads(share)


def check_ranks(options: EngineOptions, config: ModelConfig) -> None:
    """Raise `ConfigError` for a model that does not divide over its devices."""
    if options.tensor_parallel_size > 1:
        part_of(config, Ranks(0, options.tensor_parallel_size, None))


def check_deterministic(options: EngineOptions, config: ModelConfig) -> None:
    """Raise `UnsupportedError` where `deterministic` is asked for, and bits would depend on more
    than a position's tokens."""
    if not options.deterministic:
        return
    ranks, stored = options.tensor_parallel_size, quantised_as(config, options.quantization)
    refused = [
        (ranks > 1, f"tensor_parallel_size is {ranks}", "leave it out"),
        (stored is not None, f"weights are quantised ({stored})", "take 16-bit or float32 weights"),
        (config.experts is not None, "the model has experts", "take a dense model"),
        (options.share == "no-attention", "share is no-attention", "use full"),
    ]
    for is_so, what, way_out in refused:
        if is_so:
            raise UnsupportedError(
                f"{what}, which cannot be deterministic yet: {way_out}, or leave deterministic out"
            )


def kv_sizes(
    memory: int, options: EngineOptions, token_bytes: int, state_bytes: int
) -> tuple[int, int]:
    """Pages that fit in KV memory, one at least, and slots of recurrent states, two at least where
    layers keep some. `token_bytes`, `state_bytes`: of one token, and of one state."""
    if not token_bytes:
        raise ConfigError("no layer of the model has attention, expected at least one")
    share = options.state_share
    states = 0 if not state_bytes else int(share * memory) // state_bytes
    if state_bytes and states < 2:
        raise ConfigError(
            f"kv_memory is {memory} bytes, of which state_share, {share}, is for recurrent states; "
            f"one takes {state_bytes} bytes, expected room for 2: raise one of them"
        )
    memory, page_bytes = memory - states * state_bytes, options.page_size * token_bytes
    if memory < page_bytes:
        raise ConfigError(
            f"kv_memory is {memory} bytes, a page of {options.page_size} tokens takes "
            f"{page_bytes}: raise kv_memory"
        )
    return memory // page_bytes, states


def kv_memory_bytes(
    size: str | int,
    device: torch.device,
    beside: int = 0,
    *,
    loading: int = 0,
    ranks: int = 1,
    most: int | None = None,
) -> int:
    """Bytes of KV memory to take on a device.

    Args:
        beside: bytes that must stay free at least. loading: bytes of weights not loaded yet.
        ranks: processes that share the memory of a CPU.
        most: bytes free on another GPU that is to have as much.

    Raises:
        ConfigError: there is less than `size` asks for.
    """
    ram = ram_bytes()
    there = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else ram // ranks
    there = there if most is None else min(there, most)
    if loading > there:
        have = f"{device} has {there / GIB:.1f} GiB"
        raise ConfigError(f"the weights take {loading / GIB:.1f} GiB, {have}: take a smaller model")
    there -= loading if device.type == "cuda" else 0
    if size != "auto":
        wanted = parse_memory(size)
        if wanted > there:
            raise ConfigError(f"kv_memory is {size}, {device} has {there / GIB:.1f} GiB: lower it")
        return wanted
    if device.type == "cuda":
        return max(0, min(int(GPU_SHARE * there), there - int(1.25 * beside)))
    return min(4 * GIB // ranks, there // 4)
