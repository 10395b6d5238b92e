"""One forward that decodes a token for each of several sequences, each over a cache of its own.

    input_ids [B, 1]            position_ids [B, 1]: every sequence at its own position
    slot 0   k0 k1 k2 k3 k4 +   row b of a forward is appended to slot b, and query b sees slot b only:
    slot 1   k0 k1 +            no padding, nothing is copied between slots, and a sequence attends
    slot 2   k0 k1 k2 +         the same alone and in a crowd

The model's own code runs; only its cache layers and its attention are ours (`kvboost.hf.attention`). Whether that gives
what the model gives is measured when a `Crowd` is made. A model that fails is decoded one sequence after another by the
stock forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from kvboost.errors import UnsupportedModel
from kvboost.hf import attention, compat, probe
from kvboost.hf.prefill import last_logits, model_lock
from kvboost.hf.support import ModelSupport

CHECK_LENGTHS = (5, 40, 11)  # tokens of the sequences of the self-check
CHECK_STEPS = 3
RESERVED_TOKENS = 256  # rows that a slot has room for besides its prompt, before it grows


class SlotLayer(DynamicLayer):
    """Rows of one sequence in one layer: `keys` and `values` are views of the used part of a buffer that doubles."""

    def __init__(self, reserve_tokens: int = 0) -> None:
        super().__init__()
        self._reserve_tokens = reserve_tokens
        self._buffers: tuple[torch.Tensor, torch.Tensor] | None = None
        self._used = 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends rows [1, H, m, D]; returns all rows."""
        stop = self._used + key_states.shape[2]
        keys, values = self._room_for(stop, key_states, value_states)
        keys[:, :, self._used : stop] = key_states
        values[:, :, self._used : stop] = value_states
        self._show(stop)
        return self.keys, self.values

    def truncate(self, num_rows: int) -> None:
        """Forgets all rows but the first `num_rows`."""
        if num_rows < self._used:
            self._show(num_rows)

    def _show(self, num_rows: int) -> None:
        keys, values = self._buffers or (torch.empty(0), torch.empty(0))
        self._used = num_rows
        self.keys, self.values = keys[:, :, :num_rows], values[:, :, :num_rows]

    def _room_for(
        self, num_rows: int, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._buffers is None:
            self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True
            capacity = max(num_rows, self._reserve_tokens)
        elif num_rows > self._buffers[0].shape[2]:
            capacity = max(num_rows, 2 * self._buffers[0].shape[2])
        else:
            return self._buffers
        keys, values = (t.new_empty(*t.shape[:2], capacity, t.shape[3]) for t in (key_states, value_states))
        if self._buffers is not None:
            keys[:, :, : self._used], values[:, :, : self._used] = self.keys, self.values
        self._buffers = keys, values
        return keys, values


def truncate(cache: Cache, num_rows: int) -> None:
    """Takes back what a failed forward appended to a slot's cache, layer by layer."""
    for layer in cache.layers:
        layer.truncate(num_rows)


@dataclass(slots=True, eq=False)
class Slot:
    """One sequence: its token ids, and a cache that holds the rows of all of them but the last."""

    ids: list[int]
    cache: Cache


def make_slot(num_layers: int, ids: Sequence[int], rows: Cache | None = None, new_tokens: int = 0) -> Slot:
    """A slot of the sequence `ids` with a copy of `rows`, with room for all rows and for the first of `new_tokens`."""
    reserve = len(ids) + min(new_tokens, RESERVED_TOKENS)
    cache = Cache(layers=[SlotLayer(reserve) for _ in range(num_layers)])
    for ours, given in zip(cache.layers, [] if rows is None else rows.layers, strict=False):
        ours.update(given.keys, given.values)
    return Slot(list(ids), cache)


class _JointLayer(DynamicLayer):
    """Stands for the layers of all slots in a forward over [B, 1]."""

    def __init__(self, layers: Sequence[SlotLayer]) -> None:
        super().__init__()
        self.layers = layers
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends row b to slot b; returns its arguments, since the attention reads the slots."""
        for b, layer in enumerate(self.layers):
            layer.update(key_states[b : b + 1], value_states[b : b + 1])
        return key_states, value_states

    def get_seq_length(self, *args: Any, **kwargs: Any) -> int:
        """Zero: positions are given explicitly, nothing may be derived from a length."""
        return 0

    def get_mask_sizes(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """One row, from the first: nobody reads the mask."""
        return 1, 0


@dataclass(frozen=True, slots=True, eq=False)
class _JointAttention:
    """Query b over the rows of slot b; in sliding layers over the last `window` of them."""

    caches: Sequence[Cache]
    windows: Sequence[int | None]
    honour_softcap: bool

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        softcap: float | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """`query` [B, Hq, 1, D] -> [B, 1, Hq, D']."""
        layer = attention.layer_index(module, kwargs)
        window = self.windows[layer]
        capped = softcap if self.honour_softcap else None
        parts = []
        for b, cache in enumerate(self.caches):
            keys, values = cache.layers[layer].keys, cache.layers[layer].values
            if window is not None:
                keys, values = keys[:, :, -window:], values[:, :, -window:]
            parts.append(_attend_one(query[b], keys, values, scaling, capped))
        return torch.stack(parts).unsqueeze(1), None

    def mask(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """A stand-in that nobody reads."""
        return torch.zeros((1, 1, 1, 1), device=self.caches[0].layers[0].keys.device)


def _attend_one(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float | None, softcap: float | None
) -> torch.Tensor:
    """`query` [Hq, 1, D] over `keys` [1, H, n, D] -> [Hq, D']. Heads that share a key head are rows of one query."""
    heads, key_heads = query.shape[0], keys.shape[1]
    grouped = query.view(1, key_heads, heads // key_heads, query.shape[-1])
    if softcap is not None:
        out = attention.soft_capped(grouped, keys, values, None, scaling, softcap)
    else:
        out = F.scaled_dot_product_attention(grouped, keys, values, scale=scaling)
    return out.reshape(heads, values.shape[-1])


class Crowd:
    """Decodes for several sequences of one model at a time. `refused` says why it does so one by one, or is None."""

    def __init__(self, model: PreTrainedModel, support: ModelSupport) -> None:
        """Measures whether a joint step gives what the model gives. Raises `UnsupportedModel` for a model without
        plain cache rows.
        """
        self.model = model
        self.support = support
        self.num_layers = len(support.require_layout().layers)
        self._windows: list[int | None] = [None] * self.num_layers
        self.refused: str | None = None
        with model_lock(model):
            self.refused = self._why_not()

    def step(self, slots: Sequence[Slot]) -> torch.Tensor:
        """Logits after the last id of each slot, float32 [B, V]; each cache grows by that id's row.

        A slot that leaves the short regime of longrope is computed anew in a cache of its own, as `generate` does; the
        old cache keeps its rows. If a forward fails, no slot has changed.
        """
        rows = [slot.cache.get_seq_length() for slot in slots]
        caches = [slot.cache for slot in slots]
        try:
            with model_lock(self.model), torch.no_grad():
                return self._step(slots)
        except BaseException:
            for slot, cache, held in zip(slots, caches, rows, strict=True):
                slot.cache = cache
                truncate(cache, held)
            raise

    def _step(self, slots: Sequence[Slot]) -> torch.Tensor:
        logits: dict[int, torch.Tensor] = {}
        regimes: dict[int, list[int]] = {}
        for i, slot in enumerate(slots):
            regime = self.support.regime(len(slot.ids))
            if regime != self.support.regime(len(slot.ids) - 1):
                logits[i] = self._compute_anew(slot)
            elif self.refused is not None:
                logits[i] = last_logits(self.model, self._tensor([slot.ids[-1:]]), slot.cache)
            else:
                regimes.setdefault(regime, []).append(i)
        for members in regimes.values():  # one forward has one set of rotary frequencies
            logits.update(zip(members, self._joint([slots[i] for i in members]), strict=True))
        return torch.stack([logits[i] for i in range(len(slots))])

    def _joint(self, slots: Sequence[Slot]) -> torch.Tensor:
        caches = [slot.cache for slot in slots]
        joint = Cache(layers=[_JointLayer(layers) for layers in zip(*(c.layers for c in caches), strict=True)])
        inputs = {
            "input_ids": self._tensor([slot.ids[-1:] for slot in slots]),
            "position_ids": self._tensor([[len(slot.ids) - 1] for slot in slots]),
        }
        attending = _JointAttention(caches, self._windows, self.support.honour_softcap)
        with attention.attend_as(attending, self.support.configs):
            logits: torch.Tensor = compat.forward(self.model, joint, **inputs).logits[:, -1]
        return logits.float()

    def _compute_anew(self, slot: Slot) -> torch.Tensor:
        cache = make_slot(self.num_layers, slot.ids, new_tokens=RESERVED_TOKENS).cache
        logits = last_logits(self.model, self._tensor([slot.ids]), cache)
        slot.cache = cache
        return logits

    def _tensor(self, ids: list[list[int]]) -> torch.Tensor:
        return torch.tensor(ids, device=self.model.device)

    # --- self-check -------------------------------------------------------------------------------------------------

    def _why_not(self) -> str | None:
        if self.support.exact_limit_tokens is not None:
            return "its rotary frequencies depend on the longest sequence of a forward"
        if self.support.attention not in ("sdpa", "eager"):
            return f"attention implementation {self.support.attention!r} cannot be told apart by sequence"
        try:
            self._windows = probe.probe_windows(self.model, self.num_layers)
            error = self._check_error()
        except UnsupportedModel as refusal:
            return str(refusal)
        except Exception as failure:
            return f"a joint step fails ({type(failure).__name__}: {failure})"
        tolerance = self.support.tolerance(self.model.dtype)
        return (
            None if error <= tolerance else f"a joint step is off by {error:.1e} (at most {tolerance:.0e} is allowed)"
        )

    def _check_error(self) -> float:
        """Relative error of the logits of a joint step against the stock forward, over some steps."""
        rows = self.model.get_input_embeddings().weight.shape[0]
        generator = torch.Generator().manual_seed(0)
        texts = [torch.randint(0, rows, (n + CHECK_STEPS,), generator=generator).tolist() for n in CHECK_LENGTHS]
        ours, stock = [], []
        with torch.no_grad():
            slots, twins = ([self._filled(text[:n]) for text, n in self._lengths(texts)] for _ in range(2))
            for step in range(CHECK_STEPS):
                for slot, twin, (text, n) in zip(slots, twins, self._lengths(texts), strict=True):
                    slot.ids.append(text[n + step])
                    twin.ids.append(text[n + step])
                ours.append(self._joint(slots))
                stock.append(torch.stack([last_logits(self.model, self._tensor([t.ids[-1:]]), t.cache) for t in twins]))
        errors = (torch.cat(ours) - torch.cat(stock)).abs().amax(-1) / torch.cat(stock).abs().max().clamp_min(1e-20)
        exact = self.model.dtype in (torch.float32, torch.float64)
        return (errors.max() if exact else errors.median()).item()  # in 16 bit a mixture's router may break ties

    def _filled(self, ids: list[int]) -> Slot:
        slot = make_slot(self.num_layers, ids)
        last_logits(self.model, self._tensor([ids]), slot.cache)
        return slot

    @staticmethod
    def _lengths(texts: list[list[int]]) -> list[tuple[list[int], int]]:
        return list(zip(texts, CHECK_LENGTHS, strict=True))
