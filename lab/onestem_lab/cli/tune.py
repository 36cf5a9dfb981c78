"""`onestem bench tune`: find the fastest configuration of the attention kernels on this GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["tune"]


def tune(
    q_heads: Annotated[int, typer.Option(help="Query heads.")] = 32,
    kv_heads: Annotated[int, typer.Option(help="KV heads.")] = 8,
    head_dim: Annotated[int, typer.Option(help="Size of a head.")] = 128,
    page_size: Annotated[int, typer.Option(help="Tokens in a page.")] = 16,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "bfloat16",
    out: Annotated[
        Path | None, typer.Option(help="File to write; default: the installed package's own.")
    ] = None,
) -> None:
    """Time candidate configurations of the attention kernels on this GPU (a minute or two) and
    write the fastest to its file, which later starts read. No start tunes anything."""
    import torch

    from onestem_lab.attention.cases import Heads
    from onestem_lab.attention.tune import check_file, store
    from onestem_lab.attention.tune import tune as found
    from onestem_lab.cli.attention import check_heads, dtype_of

    heads = Heads(q_heads, kv_heads, head_dim, dtype_of(dtype), page_size)
    check_heads(heads, "cuda")
    check_file(torch.cuda.get_device_name(), out)
    entry = found(heads, torch.device("cuda"))
    typer.echo(entry)
    typer.echo(f"written: {store(entry, torch.cuda.get_device_name(), out)}")
