"""A layer's MLP, or its experts, of which each row takes a few."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from onestem.models.description import Experts
from onestem.models.linear import Activation, Head, Layout, Projection, padded_rows
from onestem.models.ranks import Ranks
from onestem.ops.experts import Beside
from onestem.ops.rounding import BothRows, Rows


@dataclass(frozen=True, eq=False)
class Mlp:
    """down(activation(up(x))).

    Attributes:
        up: hidden_size -> intermediate_size; in a gated MLP twice that, in the order gate, up.
    """

    up: Projection
    down: Projection

    @property
    def rounds(self) -> torch.dtype | None:
        """See `Projection`."""
        return self.up.rounds

    def __call__(self, x: Rows, activation: Activation) -> Tensor:
        if activation.rounded is not None and self.down.rounds is not None:
            return self.down(activation.rounded(self.up(x), self.down.rounds))
        pieces = self.up.pieces(x)
        if len(pieces) == 1:
            return self.down(self.up.activated(x, activation))
        rows = pieces[0].new_empty(sum(map(len, pieces)), self.down.in_features)
        for to, piece in zip(rows.split(len(pieces[0])), pieces, strict=True):
            to.copy_(self.up.activated(piece, activation))  # while it is in a cache
        return self.down(rows)

    @property
    def linears(self) -> tuple[Projection, ...]:
        """Both products, in the order of their use."""
        return self.up, self.down


# products(x, scores, chosen, beside): the sum of the experts' results times their scores, in the
# format of their weights, and of what is beside them: x [n, hidden_size], scores float32 and chosen
# [n, top_k] -> [n, hidden_size] in x's dtype.
ExpertProducts = Callable[[Tensor, Tensor, Tensor, Beside | None], Tensor]


@dataclass(frozen=True, eq=False)
class ExpertLayer:
    """Experts, their router, and the MLP that every row takes beside them.

    Attributes:
        router: its logits `[n, num]` are float32.
        correction: float32 `[num]`.
        shared_gate: gives one logit.
        route: returns scores and indices of each row's experts.
        expert_scales: float32 `[num]`, factors of the scores.
    """

    experts: Experts
    router: Head
    correction: Tensor | None
    products: ExpertProducts
    shared: Mlp | None
    shared_gate: Head | None
    route: Callable[[Tensor, Experts, Tensor | None], tuple[Tensor, Tensor]]
    expert_scales: Tensor | None = None

    @property
    def rounds(self) -> torch.dtype | None:
        """See `Projection`, of the shared MLP. All else takes rows as they are."""
        return None if self.shared is None else self.shared.rounds

    def __call__(
        self,
        x: Tensor | BothRows,
        activation: Activation,
        routed_by: Tensor | None = None,
    ) -> Tensor:
        """`activation`: of the shared MLP. `routed_by`: the router's input; None: x."""
        x, shared = x if isinstance(x, BothRows) else (x, x)
        logits = self.router(x if routed_by is None else routed_by)
        scores, chosen = self.route(logits, self.experts, self.correction)
        if self.expert_scales is not None:
            scores = scores * self.expert_scales[chosen]
        beside = None
        if self.shared is not None:
            gate = None if self.shared_gate is None else self.shared_gate(x)
            beside = Beside(self.shared(shared, activation), gate)
        return self.products(x, scores, chosen, beside)

    @property
    def linears(self) -> tuple[Projection, ...]:
        """The products beside the experts'."""
        return () if self.shared is None else self.shared.linears


@dataclass(frozen=True, eq=False)
class ExpertsBeside:
    """Experts beside a layer's MLP, which read the residual (see `Experts.beside_mlp`).

    Attributes:
        router_norm: weight of the norm before the router, with the vector and the factor that its
            result is multiplied by; float32.
        input_norm, output_norm: of what experts read and return.
        mlp_norm: of what the MLP returns.
    """

    experts: ExpertLayer
    router_norm: Tensor
    input_norm: Tensor
    output_norm: Tensor
    mlp_norm: Tensor

    def added(
        self,
        out: Tensor,
        hidden: Tensor,
        norm: Callable[[Tensor, Tensor], Tensor],
        up: Activation,
        ranks: Ranks,
    ) -> Tensor:
        """The sum of the MLP's result `out` and the experts' of the residual `hidden`, both normed.

        Args:
            norm: rows and weights -> RMSNorm.
            up: the activation.
            ranks: hold the experts together.
        """
        x, routed_by = norm(hidden, self.input_norm), norm(hidden, self.router_norm)
        routed = ranks.sum(self.experts(x, up, routed_by=routed_by))
        routed = norm(routed, self.output_norm)
        return routed.add_(norm(out, self.mlp_norm))


def route(logits: Tensor, experts: Experts, correction: Tensor | None) -> tuple[Tensor, Tensor]:
    """logits float32 `[n, num]` -> scores (float32) and indices (int64) of each row's experts, both
    `[n, top_k]`. It does not wait for a GPU."""
    scores = logits.softmax(-1) if experts.scores == "softmax" else logits.sigmoid()
    ranks = scores if correction is None else scores + correction
    if experts.num_groups > 1:
        ranks = ranks.masked_fill(~_in_top_groups(ranks, experts), float("-inf"))
    chosen = ranks.topk(experts.top_k, dim=-1).indices
    taken = scores.gather(1, chosen)
    if experts.normalized:
        taken = taken / taken.sum(-1, keepdim=True)
    return taken * experts.scale, chosen


def route_on_gpu(
    logits: Tensor, experts: Experts, correction: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`route` in one kernel, where there are no groups."""
    from onestem.ops.triton.experts import route as kernel

    if experts.num_groups > 1:
        return route(logits, experts, correction)
    return kernel(
        logits,
        correction,
        top_k=experts.top_k,
        sigmoid=experts.scores == "sigmoid",
        normalized=experts.normalized,
        scale=experts.scale,
    )


def _in_top_groups(ranks: Tensor, experts: Experts) -> Tensor:
    """[n, num] bool: the expert's group is among the row's best (DeepSeek-V3, section 2.1.2)."""
    groups = ranks.unflatten(1, (experts.num_groups, -1))
    best = groups.topk(2, dim=-1).values.sum(-1).topk(experts.top_groups, dim=-1).indices
    kept = torch.zeros(groups.shape[:2], dtype=torch.bool, device=ranks.device)
    return kept.scatter_(1, best, True).repeat_interleave(groups.shape[2], dim=1)


def clamped_swiglu(gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    """See `ClampedSwiglu`: `[n, 2 * size]`, gate first -> `[n, size]`."""
    gate, up = gate_up.chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (gate * alpha).sigmoid_().mul_(gate).mul_(up.add_(1))


@dataclass(frozen=True, eq=False)
class SortedBlocks:
    """Experts one after the other, each over the rows that take it. `layout`: of their weights."""

    experts: Sequence[Mlp]
    activation: Activation
    layout: Layout

    def __call__(
        self, x: Tensor, scores: Tensor, chosen: Tensor, beside: Beside | None = None
    ) -> Tensor:
        """See `ExpertProducts`. A row's results are added in float32, by rising expert index."""
        order = chosen.flatten().argsort(stable=True)
        rows, scores = order // chosen.shape[1], scores.flatten()[order]
        counts = chosen.flatten().bincount(minlength=len(self.experts)).tolist()
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        begin = 0
        for expert, count in zip(self.experts, counts, strict=True):
            if count:
                at = slice(begin, begin + count)
                result = self._block(expert, x[rows[at]])
                out.index_add_(0, rows[at], result * scores[at, None])
                begin += count
        routed = out.to(x.dtype)
        return routed if beside is None else beside.added(routed)

    def _block(self, expert: Mlp, x: Tensor) -> Tensor:
        """An expert's result for `[count, hidden_size]`. Rows are padded, so that oneDNN need not
        make a product for every count."""
        rows = padded_rows(len(x), self.layout, x.dtype)
        if rows > len(x):
            return expert(F.pad(x, (0, 0, 0, rows - len(x))), self.activation)[: len(x)]
        return expert(x, self.activation)
