"""Train the embedded model: `python training/train.py --minutes 25 --out OUT`.

Time sets the schedule: learning rate and document length follow the share of the minutes that has
passed. Data is made on the fly by worker processes. A run may be cut in parts: `--until 0.4` ends
at that share of the schedule, `--resume` goes on from the state the part before wrote.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import documents
import packing
import torch
import torch.nn.functional as F
from model import Attend, Llama, Shape, export
from packing import Rows
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.data import DataLoader

HERE = Path(__file__).resolve().parent
TOKENIZER = HERE.parent / "onestem" / "embedded" / "model"
SPECIAL = (documents.BOS, documents.END, documents.PAD)  # as config.json names them
FIRST_FACTS, LAST_FACTS = 8, 300


# --- optimiser --------------------------------------------------------------------------------


def orthogonalised(update: Tensor, steps: int = 5) -> Tensor:
    """Nearest semi-orthogonal matrices of `[n, rows, cols]`: Newton-Schulz (Muon, Jordan 2024)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = update.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised, for matrices; those of one shape go through together."""

    def __init__(self, params: list, lr: float, momentum: float = 0.95, decay: float = 0.05):
        super().__init__(params, {"lr": lr, "momentum": momentum, "decay": decay})
        self.direction = orthogonalised
        by_shape: dict[tuple, list] = {}
        for parameter in self.param_groups[0]["params"]:
            by_shape.setdefault(tuple(parameter.shape), []).append(parameter)
        self.by_shape = list(by_shape.values())

    @torch.no_grad()
    def step(self) -> None:
        """One update from the gradients."""
        group = self.param_groups[0]
        for parameters in self.by_shape:
            gradient = torch.stack([p.grad for p in parameters]).float()
            state = self.state[parameters[0]]
            if "momentum" not in state:
                state["momentum"] = torch.zeros_like(gradient)
            buffer = state["momentum"]
            buffer.lerp_(gradient, 1 - group["momentum"])
            update = self.direction(gradient.lerp(buffer, group["momentum"])).float()
            size = 0.2 * max(gradient.shape[-2:]) ** 0.5
            torch._foreach_mul_(parameters, 1 - group["lr"] * group["decay"])
            torch._foreach_add_(parameters, list(update.unbind()), alpha=-group["lr"] * size)


def optimisers(model: Llama, args: argparse.Namespace) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for embedding and norms."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    ids = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in ids]
    adam = torch.optim.AdamW(others, lr=args.adam_lr, betas=(0.9, 0.95), weight_decay=0.0)
    optims = [Muon(matrices, lr=args.lr), adam]
    for optim in optims:
        for group in optim.param_groups:
            group["peak"] = group["lr"]
    return optims


def rate(share: float) -> float:
    """Learning rate over its peak: warm-up, plateau, linear to nothing."""
    return min(1.0, share / 0.01 + 0.02, max(0.0, (1 - share) / 0.6))


def facts_at(share: float) -> int:
    """Facts of the longest prompts: from short to long in the first part of training."""
    return round(FIRST_FACTS + (LAST_FACTS - FIRST_FACTS) * min(1.0, share / 0.4))


# --- forward ----------------------------------------------------------------------------------


class Attending:
    """Makes the attention of a batch: flex attention on a GPU, dense masks elsewhere."""

    def __init__(self, device: str) -> None:
        self.flex = device == "cuda"
        self.make_mask = torch.compile(create_block_mask) if self.flex else None

    def __call__(self, code: Tensor) -> Attend:
        """code `[rows, length]` -> a function of q, k, v `[rows, heads, length, head_dim]`."""
        if not self.flex:
            mask = packing.dense_mask(code)
            return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)

        def sees(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return packing.visible(code[row, query], code[row, key]) & (key <= query)

        rows, length = code.shape
        block_mask = self.make_mask(sees, rows, None, length, length, device=code.device)
        return lambda q, k, v: flex_attention(q, k, v, block_mask=block_mask, enable_gqa=True)


def losses(model: Llama, x: Tensor, rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
    """Mean loss of answers, of other text; whether each token is right `[rows, length]`."""
    logits = model.logits(x).float()
    each = F.cross_entropy(
        logits.flatten(0, 1),
        rows.label.flatten().long(),
        ignore_index=packing.IGNORE,
        reduction="none",
    ).view(rows.label.shape)
    text = (rows.label != packing.IGNORE) & (rows.question < 0)
    answers = (each * rows.weight).sum() / rows.weight.sum().clamp(min=1)
    texts = (each * text).sum() / text.sum().clamp(min=1)
    return answers, texts, logits.argmax(-1) == rows.label


class Trainer:
    """Model, optimisers, data and clock of one run."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.started = time.time()
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
        torch.manual_seed(args.seed)
        torch.set_float32_matmul_precision("high")
        self.tokenizer = Tokenizer.from_file(str(args.tokenizer / "tokenizer.json"))
        self.model = Llama(Shape(vocab_size=self.tokenizer.get_vocab_size())).to(self.device)
        self.optims = optimisers(self.model, args)
        self.attending = Attending(self.device)
        self.losses = losses
        self.first_share = 0.0
        self.steps = 0
        if args.resume:
            self._resume(args.resume)
        self.share = self.first_share
        self.max_facts = multiprocessing.Value("i", facts_at(self.share))
        if self.device == "cuda":
            for layer in self.model.model.layers:
                layer.compile()
            self.losses = torch.compile(losses)
            self.optims[0].direction = torch.compile(orthogonalised)

    def _resume(self, path: Path) -> None:
        state = torch.load(path, map_location=self.device)
        self.model.load_state_dict(state["model"])
        for optim, saved in zip(self.optims, state["optims"], strict=True):
            optim.load_state_dict(saved)
        self.first_share, self.steps = state["share"], state["steps"]

    def batches(self) -> Iterator[Rows]:
        """Training batches on the device."""
        args = self.args
        data = packing.TrainingRows(
            args.tokenizer / "tokenizer.json",
            args.seed + self.steps,
            args.rows,
            args.length,
            self.max_facts,
        )
        loader = DataLoader(
            data,
            batch_size=None,
            num_workers=args.workers,
            pin_memory=self.device == "cuda",
            prefetch_factor=4 if args.workers else None,
        )
        for rows in loader:
            yield rows.to(self.device)

    def forward(self, rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
        """Losses of a batch, see `losses`."""
        enabled = self.device == "cuda"
        with torch.autocast(self.device, dtype=self.dtype, enabled=enabled):
            attend = self.attending(rows.code)
            x = self.model.hidden(rows.ids, rows.position, attend, self.dtype)
            return self.losses(self.model, x, rows)

    def step(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """One update; answer and text loss."""
        answers, texts, _ = self.forward(rows)
        (answers + self.args.text_weight * texts).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optim in self.optims:
            for group in optim.param_groups:
                group["lr"] = group["peak"] * rate(self.share)
            optim.step()
            optim.zero_grad(set_to_none=True)
        self.steps += 1
        return answers.detach(), texts.detach()

    @torch.no_grad()
    def exam(self, name: str, batch: Rows) -> str:
        """Share of the questions of one category whose every answer token is right."""
        _, _, right = self.forward(batch)
        total, good = 0, 0
        for row_right, numbers in zip(right.cpu(), batch.question.cpu(), strict=True):
            asked = numbers >= 0
            wrong = set(numbers[asked & ~row_right].tolist())
            count = int(numbers.max()) + 1
            total, good = total + count, good + count - len(wrong)
        return f"{name} {100 * good / total:.1f}"

    def save(self, name: str) -> None:
        """Export the model to OUT/name, and the state for `--resume` beside it."""
        special = [self.tokenizer.token_to_id(t) for t in SPECIAL]
        export(self.model, self.args.out / name, *special)
        if self.args.state:
            state = {
                "model": self.model.state_dict(),
                "optims": [optim.state_dict() for optim in self.optims],
                "share": self.share,
                "steps": self.steps,
            }
            fresh = self.args.state.with_suffix(".new")
            torch.save(state, fresh)
            os.replace(fresh, self.args.state)

    def report(self, exams: dict[str, Rows], line: str) -> None:
        """Print the state of training and the accuracy by category."""
        accuracies = " | ".join(self.exam(name, batch) for name, batch in exams.items())
        print(f"{line} || {accuracies}", flush=True)

    def run(self) -> None:
        """Train until the minutes are over."""
        args = self.args
        exams = {
            name: packing.exam_rows(self.tokenizer, name, args.rows, args.length).to(self.device)
            for name in packing.EXAMS
        }
        clock = first = None
        reported = 0.0
        for rows in self.batches():
            answers, texts = self.step(rows)
            if clock is None:
                float(answers)
                clock = reported = time.time()
                first = self.steps
                left = args.minutes * 60 - (clock - self.started)
                print(f"first step after {clock - self.started:.0f} s", flush=True)
            now = time.time()
            done = (now - clock) / left
            self.share = self.first_share + (args.until - self.first_share) * min(1.0, done)
            self.max_facts.value = facts_at(self.share)
            if now - reported >= args.report or done >= 1:
                speed = (self.steps - first) * rows.ids.numel() / (now - clock)
                self.report(
                    exams,
                    f"{now - self.started:5.0f} s, share {self.share:.3f}, step {self.steps}, "
                    f"{speed / 1e3:.0f}k tokens/s, loss {answers:.4f}, text {texts:.3f}",
                )
                self.save("model")
                reported = time.time()
            if done >= 1:
                break
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(args.tokenizer / name, args.out / "model" / name)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for model/")
    parser.add_argument("--tokenizer", type=Path, default=TOKENIZER, help="its folder")
    parser.add_argument("--minutes", type=float, default=25, help="wall time, start included")
    parser.add_argument("--until", type=float, default=1.0, help="share of the schedule to end at")
    parser.add_argument("--state", type=Path, help="file to keep the state for --resume in")
    parser.add_argument("--resume", type=Path, help="state to go on from")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=8192, help="tokens of a row")
    parser.add_argument("--workers", type=int, default=14, help="processes that make data")
    parser.add_argument("--lr", type=float, default=3e-3, help="of the matrices")
    parser.add_argument("--adam-lr", type=float, default=2e-3, help="of embedding and norms")
    parser.add_argument("--text-weight", type=float, default=0.2, help="of the documents' loss")
    parser.add_argument("--report", type=float, default=60, help="seconds between reports")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    Trainer(args).run()


if __name__ == "__main__":
    main()
