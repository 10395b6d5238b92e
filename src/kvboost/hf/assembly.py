"""A prompt's cache before anything is computed: preloaded rows, and the forwards that run over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvboost.hf import attention, compat
from kvboost.hf.layout import KVLayout
from kvboost.hf.splice import SpliceLayer, make_splice_layers
from kvboost.hf.support import ModelSupport
from kvboost.types import Int32Array, Kind, LayerKV, ReusePlan


@dataclass(frozen=True, slots=True, eq=False)
class Assembly:
    """All T rows of a prompt per layer group in `payload`; those of FRESH spans are zero until they are computed.

    Forwards over it write into `payload`. The caller holds the model's lock.
    """

    model: PreTrainedModel
    support: ModelSupport
    input_ids: torch.Tensor  # [1, T]
    plan: ReusePlan
    payload: Sequence[LayerKV]
    query_block_tokens: int = 128
    filled: bool = False  # True once a forward has computed the FRESH rows

    @property
    def layout(self) -> KVLayout:
        """The layout of the model."""
        return self.support.require_layout()

    @property
    def num_layers(self) -> int:
        """Cache layers of the model."""
        return len(self.layout.layers)

    def splice_layers(self, rows: torch.Tensor) -> list[SpliceLayer]:
        """One cache layer per model layer over `payload`, for a forward that computes `rows`."""
        return make_splice_layers(*self.layout.per_layer(self.payload), rows)

    def fresh_positions(self) -> torch.Tensor:
        """Bool [T]: positions that hold no row."""
        fresh = torch.zeros(self.plan.num_tokens, dtype=torch.bool, device=self.input_ids.device)
        for span in [] if self.filled else self.plan.spans(Kind.FRESH):
            fresh[span.start : span.stop] = True
        return fresh

    def forward(
        self,
        rows: torch.Tensor,
        layers: Sequence[SpliceLayer],
        *,
        observe: attention.Observer | None = None,
        hidden: torch.Tensor | None = None,
        logits: bool = False,
    ) -> torch.Tensor | None:
        """Computes `rows` (int64 [m], sorted positions) in one forward through `layers`, which are written.

        Every row attends with an exact causal (or sliding) mask by true position. Returns the logits of the last row,
        float32 [V], if asked for. An observer's `Enough` ends the forward early.
        """
        job = attention.Job(
            rows=rows,
            windows=self.layout.windows,
            block=self.query_block_tokens,
            honour_softcap=self.support.honour_softcap,
            observe=observe,
            hidden=hidden,
        )
        model = self.model if logits else compat.decoder(self.model)
        inputs: dict[str, Any] = {"input_ids": self.input_ids[:, rows], "position_ids": rows[None]}
        if logits:
            inputs["logits_to_keep"] = 1
        try:
            with torch.no_grad(), attention.attend_as(job, self.support.configs):
                output = compat.forward(model, Cache(layers=list(layers)), **inputs)
        except attention.Enough:
            return None
        return output.logits[0, -1].float() if logits else None

    def logits(self, rows: torch.Tensor, layers: Sequence[SpliceLayer]) -> torch.Tensor:
        """As `forward`, with the logits of the last row, float32 [V]."""
        logits = self.forward(rows, layers, logits=True)
        if logits is None:
            raise RuntimeError("a forward without an observer ended early")
        return logits

    def positions(self, rows: Int32Array) -> torch.Tensor:
        """int64 tensor of positions on the model's device."""
        return torch.from_numpy(rows).long().to(self.input_ids.device)
