"""Cheap forwards over an assembled cache that tell which of its rows matter, and which are wrong.

Each returns what it measured and what it cost, in rows through all layers, so that no probe is ever free.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kvboost.hf.assembly import Assembly
from kvboost.hf.attention import Enough, Look
from kvboost.hf.splice import SpliceLayer

PROJECTION_SHARE = 0.3
"""Cost of a layer's norm and K/V/Q projections alone, in layers."""

ATTENTION_SHARE = 0.6
"""As before, with two distributions of attention weights computed from the projections."""


@dataclass(frozen=True, slots=True, eq=False)
class Glance:
    """What the question attends to in a cache that is not yet repaired."""

    mass: torch.Tensor  # float32 [T]: attention per position, summed over the question's rows, mean over heads, layers
    charged_rows: float


def glance(assembly: Assembly, rows: torch.Tensor) -> Glance:
    """Runs only `rows`, the question at the end of the prompt, over the assembled cache, and sums their attention."""
    mass = torch.zeros(assembly.plan.num_tokens, device=rows.device)

    def observe(look: Look) -> None:
        mass[look.block.keys] += look.log_weights().exp_().mean(0).sum(0)

    hidden = assembly.fresh_positions()
    hidden[rows] = False
    assembly.forward(rows, assembly.splice_layers(rows), observe=observe, hidden=hidden)
    return Glance(mass / assembly.num_layers, float(len(rows)))


def through_end(assembly: Assembly, rows: torch.Tensor) -> torch.Tensor:
    """`rows` and the last position: longrope chooses its frequencies by the last position that a forward sees."""
    last = assembly.plan.num_tokens - 1
    return rows if len(rows) and int(rows[-1]) == last else torch.cat([rows, rows.new_tensor([last])])


class _CheckLayer(SpliceLayer):
    """Writes its rows and remembers what they replaced."""

    replaced_keys: torch.Tensor | None = None  # of all positions, if wanted
    value_change: torch.Tensor | None = None  # [m]
    keep_keys = False

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        change = value_states.float() - self.values[:, :, self.rows].float()
        self.value_change = change.pow(2).sum((0, 1, 3))
        if not self.keep_keys:
            raise Enough
        self.replaced_keys = self.keys.clone()
        return super().update(key_states, value_states)


def _with_check(assembly: Assembly, rows: torch.Tensor, layer: int) -> tuple[list[SpliceLayer], _CheckLayer]:
    """Splice layers of which the one at `layer` remembers what was replaced."""
    layers = assembly.splice_layers(rows)
    check = _CheckLayer(layers[layer].keys, layers[layer].values, rows)
    layers[layer] = check
    return layers, check


def value_change(assembly: Assembly, rows: torch.Tensor, layer: int) -> tuple[torch.Tensor, float]:
    """Squared L2 distance of the stored values from fresh ones at `layer`, float32 [m], and its cost.

    `rows` are computed in full below `layer` and written there; at `layer` they are only projected. Layer-0 keys and
    values do not depend on context, so at layer 1 the result is exact for any choice of rows.
    """
    wanted, rows = len(rows), through_end(assembly, rows)
    layers, check = _with_check(assembly, rows, layer)
    assembly.forward(rows, layers)
    if check.value_change is None:
        raise RuntimeError(f"layer {layer} was never reached")
    return check.value_change[:wanted], len(rows) * (layer + PROJECTION_SHARE) / assembly.num_layers


def attention_change(assembly: Assembly, rows: torch.Tensor, layer: int) -> tuple[torch.Tensor, float]:
    """KL(fresh keys || stored keys) of each row's attention at `layer`, mean over heads, nat [m], and its cost."""
    wanted, rows = len(rows), through_end(assembly, rows)
    layers, check = _with_check(assembly, rows, layer)
    check.keep_keys = True
    kl = torch.zeros(len(rows), device=rows.device)

    def observe(look: Look) -> None:
        if look.layer != layer or check.replaced_keys is None:
            return
        fresh, stored = look.log_weights(), look.log_weights(check.replaced_keys[0])
        difference = (fresh - stored).masked_fill_(look.block.mask < 0, 0.0)
        kl[look.block.queries] = (fresh.exp() * difference).sum(-1).mean(0)
        if look.block.queries.stop == len(rows):
            raise Enough

    assembly.forward(rows, layers, observe=observe)
    return kl[:wanted], len(rows) * (layer + ATTENTION_SHARE) / assembly.num_layers


def attention_entropy(assembly: Assembly, rows: torch.Tensor, layer: int) -> tuple[torch.Tensor, float]:
    """Entropy of each row's attention at `layer`, mean over heads, as a share of log n, float32 [m], and its cost."""
    wanted, rows = len(rows), through_end(assembly, rows)
    share = torch.zeros(len(rows), device=rows.device)
    hidden = assembly.fresh_positions()
    hidden[rows] = False

    def observe(look: Look) -> None:
        if look.layer != layer:
            return
        log_weights = look.log_weights().masked_fill_(look.block.mask < 0, 0.0)
        weights = log_weights.exp().masked_fill_(look.block.mask < 0, 0.0)
        visible = (look.block.mask == 0).sum(-1).clamp_min(2)
        share[look.block.queries] = -(weights * log_weights).sum(-1).mean(0) / visible.log()
        if look.block.queries.stop == len(rows):
            raise Enough

    assembly.forward(rows, assembly.splice_layers(rows), observe=observe, hidden=hidden)
    return share[:wanted], len(rows) * (layer + ATTENTION_SHARE) / assembly.num_layers
