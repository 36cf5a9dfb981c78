"""`onestem bench attention`: synthetic steps, against their floors and against other kernels."""

from __future__ import annotations

import json
import re
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onestem.errors import ConfigError
from onestem_lab.cli.given import refuse_given

if TYPE_CHECKING:
    from onestem_lab.attention.cases import Case, Heads

__all__ = ["attention", "check_heads", "dtype_of", "head_counts"]

SIZES = ("groups", "degree", "prefix", "suffix")


def attention(
    context: typer.Context,
    case: Annotated[
        str | None,
        typer.Option(
            help="A named case, several between ';'; all; pat or fasttree: the trees that these "
            "kernels were measured on. Default: the sizes below."
        ),
    ] = None,
    groups: Annotated[int, typer.Option(help="Prefixes.")] = 1,
    degree: Annotated[
        str, typer.Option(help="Decodes per prefix; '8,32': 8 sub-prefixes of 32 each.")
    ] = "32",
    prefix: Annotated[
        str, typer.Option(help="Tokens of the prefix; '2048,512' makes two levels.")
    ] = "2048",
    suffix: Annotated[int, typer.Option(help="Tokens of each decode's own part.")] = 128,
    heads: Annotated[
        str, typer.Option(help="Query heads/KV heads, several with commas: 32/8,16/1.")
    ] = "32/8",
    head_dim: Annotated[int, typer.Option(help="Size of a head.")] = 128,
    page_size: Annotated[int, typer.Option(help="Tokens in a page.")] = 16,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "bfloat16",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    against: Annotated[
        str,
        typer.Option(
            help="Others, with commas: sdpa, cudnn, flashinfer, flash_attn, flash_attn3 (vLLM's), "
            "vllm (its kernel for CPUs); one that is not installed is named and left out."
        ),
    ] = "",
    impl: Annotated[
        str, typer.Option("--attention", help="Attention implementation: auto, or its name.")
    ] = "auto",
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object instead of a table.")
    ] = False,
) -> None:
    """Time the attention of one step, with sharing and without. Exit code 1: its error is more than
    twice that of plain attention in the same dtype."""
    import torch

    from onestem_lab.attention.cases import Heads
    from onestem_lab.attention.measure import bench_attention

    shapes = tuple(
        Heads(*pair, head_dim, dtype_of(dtype), page_size) for pair in head_counts(heads)
    )
    if case is not None:
        refuse_given(context, SIZES, "has no effect with --case")
    for shape in shapes:
        check_heads(shape, device)
    cases = _cases(case, groups, degree, prefix, suffix)
    peers = tuple(name.strip() for name in against.split(",") if name.strip())
    found = bench_attention(cases, shapes, torch.device(device), peers, impl, _progress)
    facts = {"command": "onestem " + " ".join(sys.argv[1:]), **found}
    typer.echo(json.dumps(facts) if as_json else _table(facts))
    if not all(entry["right"] for entry in facts["cases"]):
        raise typer.Exit(1)


def head_counts(text: str) -> list[tuple[int, int]]:
    """Query heads and KV heads of each `32/8` between commas."""
    found = [re.fullmatch(r"(\d+)/(\d+)", part.strip()) for part in text.split(",")]
    if not all(found):
        raise ConfigError(f"heads are {text!r}, expected query heads/KV heads, as 32/8,16/1")
    return [(int(pair[1]), int(pair[2])) for pair in found if pair]


def dtype_of(name: str) -> Any:
    """The torch dtype of a name."""
    import torch

    if name not in ("float32", "bfloat16", "float16"):
        raise ConfigError(f"dtype is {name!r}, expected float32, bfloat16 or float16")
    return getattr(torch, name)


def check_heads(heads: Heads, device: str) -> None:
    """Raise for impossible heads or an unavailable device."""
    import torch

    if device not in ("cpu", "cuda"):
        raise ConfigError(f"device is {device!r}, expected cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device cuda: PyTorch sees no GPU here, choose --device cpu")
    if min(heads.num_kv_heads, heads.head_dim, heads.page_size) < 1:
        raise ConfigError("KV heads, --head-dim and --page-size must be at least 1")
    if heads.num_q_heads < 1 or heads.num_q_heads % heads.num_kv_heads:
        raise ConfigError(
            f"{heads.num_q_heads} query heads are no multiple of {heads.num_kv_heads} KV heads"
        )


def _cases(
    named: str | None, groups: int, degree: str, prefix: str, suffix: int
) -> dict[str, Case]:
    from onestem_lab.attention.cases import CASES, TREES, decodes

    if named is None:
        degrees, prefixes = _numbers("degree", degree), _numbers("prefix", prefix)
        _check_least(1, groups=(groups,), degree=degrees, suffix=(suffix,))
        _check_least(0, prefix=prefixes)
        made = decodes(groups, degrees, prefixes, suffix)
        return {f"{groups}x{degree.replace(',', 'x')} {prefix.replace(',', '+')}/{suffix}": made}
    sets = {"all": CASES, **TREES}
    each = {name: {name: case} for cases in sets.values() for name, case in cases.items()}
    found: dict[str, Case] = {}
    for name in named.split(";"):
        if name.strip() not in sets | each:
            raise ConfigError(
                f"case is {name.strip()!r}, expected {', '.join(sets)} or one of theirs: "
                f"{'; '.join(CASES)}"
            )
        found |= (sets | each)[name.strip()]
    return found


def _numbers(name: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"{name} is {text!r}, expected numbers between commas") from None


def _check_least(least: int, **options: tuple[int, ...]) -> None:
    for name, values in options.items():
        if min(values) < least:
            told = ",".join(map(str, values))
            raise ConfigError(f"{name} is {told}, expected at least {least}")


def _progress(found: dict[str, Any]) -> None:
    print(_who(found["cases"][-1]), file=sys.stderr, flush=True)


def _who(entry: dict[str, Any], width: int = 26) -> str:
    warm = f" ({entry['warm_ms']:.3f} warm)" if "warm_ms" in entry else ""
    return f"{entry['case']:{width}} {entry['heads']:5} {entry['ms']:8.4f} ms{warm}"


def _table(facts: dict[str, Any]) -> str:
    means = map(_mean, facts["summary"]) if len(facts["cases"]) > 1 else ()
    width = max(len(entry["case"]) for entry in facts["cases"])
    lines = [_line(entry, width) for entry in facts["cases"]]
    return "\n".join([*lines, *means, _device(facts)])


def _line(entry: dict[str, Any], width: int) -> str:
    parts = [
        _who(entry, width),
        f"floors {entry['flop_floor_ms']:.3f} FLOP {entry['byte_floor_ms']:.3f} bytes",
        f"{entry['matrix_share']:.0%} of the matrix rate",
        f"{entry['memory_share']:.0%} of memory's",
        f"error {entry['error']:.1e} (plain {entry['plain_error']:.1e})",
        f"unshared {entry['unshared_ms']:.4f}",
        *(f"{name} {ms:.4f}" for name, ms in entry["others_ms"].items()),
        *(f"{name} refused: {why}" for name, why in entry["refused"].items()),
    ]
    if "speedup" in entry:
        parts.append(f"{entry['speedup']:.2f}x the fastest other")
    return " | ".join(parts)


def _mean(line: dict[str, Any]) -> str:
    return (
        f"{line['heads']}: {line['mean']:.2f}x {line['over']}, geometric mean of {line['cases']}; "
        f"least {line['least']:.2f}x ({line['least_in']})"
    )


def _device(facts: dict[str, Any]) -> str:
    return (
        f"{facts['device']}: {facts['matrix_flops_per_s'] / 1e12:.3g} TFLOP/s, "
        f"{facts['bytes_per_s'] / 1e9:.4g} GB/s measured"
    )
