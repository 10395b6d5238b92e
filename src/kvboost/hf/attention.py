"""Attention of scattered query rows over all keys of a prompt, in blocks.

The query rows are sorted by position and walked in blocks of a bounded size. A block sees the keys up to its last
position only, so about half of the work of a dense mask is never done, and memory stays bounded by the block:

    keys      0 . . . . . . . . . . . . T          rows: sorted positions
    block 1   #######|                             keys cut at the block's last position,
    block 2   ############|                        a mask inside the block by true position;
    block 3      ###############|                  sliding layers are cut at the window on the left too

It is reached through transformers' own registry: an attention function and a mask function under names of ours, that a
model's config names while our forward runs. Both act only for the thread and forward that set `_running`; any other
forward that meets them is delegated to what the model had. What they do is up to an `Attending`: `Job` here, and the
joint decode step in `kvboost.hf.crowd`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvboost.errors import UnsupportedModel
from kvboost.hf import compat

PREFIX = "kvboost_"
FAR = 1 << 24  # a position beyond every window, exact in float32

MASK_CACHE_BYTES = 64 << 20  # masks of all blocks are kept for the next layer if they are no larger together


class Attending(Protocol):
    """What one forward of ours does instead of the model's attention."""

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
        """`query` [B, Hq, m, D] and what the cache layer's `update` returned -> [B, m, Hq, D']."""
        ...

    def mask(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Stands for the model's mask, which nobody reads."""
        ...


@dataclass(slots=True)
class Job:
    """What one selective forward needs: sorted positions of the query rows [m], and each layer's window."""

    rows: torch.Tensor
    windows: Sequence[int | None] | None  # None: being probed, nothing is masked by window
    block: int = 128
    honour_softcap: bool = False
    hidden: torch.Tensor | None = None  # bool [T]: positions that hold no row yet
    observe: Observer | None = None
    seen: list[tuple[int, int]] = field(default_factory=list)  # probing: (layer, index into `rules`)
    rules: list[Callable[..., Any]] = field(default_factory=list)  # probing: the model's own mask functions
    _blocks: dict[int | None, list[Block]] = field(default_factory=dict)

    def blocks(self, window: int | None, dtype: torch.dtype) -> Iterator[Block]:
        """The query blocks of a layer with this window; layers of one kind share them, masks too if they are small."""
        if window in self._blocks:
            return iter(self._blocks[window])
        blocks = self._make_blocks(window, dtype)
        if len(self.rows) * (int(self.rows[-1]) + 1) * dtype.itemsize > MASK_CACHE_BYTES:
            return blocks
        self._blocks[window] = list(blocks)
        return iter(self._blocks[window])

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
        """`query` [1, Hq, m, D], `key` [1, H, T, D], `value` [1, H, T, D'] -> [1, m, Hq, D']."""
        layer = layer_index(module, kwargs)
        if self.windows is None:
            self.seen.append((layer, int(attention_mask.max().item()) if attention_mask is not None else -1))
        window = self.windows[layer] if self.windows is not None else None
        parts = []
        for block in self.blocks(window, query.dtype):
            q, k, v = query[:, :, block.queries], key[:, :, block.keys], value[:, :, block.keys]
            if self.observe is not None:
                scale = query.shape[-1] ** -0.5 if scaling is None else scaling
                capped = softcap if self.honour_softcap else None
                self.observe(Look(layer, block, q[0], key[0], value[0], scale, capped))
            if softcap is not None and self.honour_softcap:
                parts.append(soft_capped(q, k, v, block.mask, scaling, softcap))
            else:
                grouped = q.shape[1] != k.shape[1]
                parts.append(
                    F.scaled_dot_product_attention(q, k, v, attn_mask=block.mask, scale=scaling, enable_gqa=grouped)
                )
        return torch.cat(parts, 2).transpose(1, 2).contiguous(), None

    def mask(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Its only value tells a probe which mask function the layer was given."""
        function = kwargs.get("mask_function")
        if self.windows is None and function is not None:
            self.rules.append(function)
        return torch.full((1, 1, 1, 1), float(len(self.rules) - 1), device=self.rows.device)

    def _make_blocks(self, window: int | None, dtype: torch.dtype) -> Iterator[Block]:
        positions = torch.arange(int(self.rows[-1]) + 1, device=self.rows.device)
        for first in range(0, len(self.rows), self.block):
            rows = self.rows[first : first + self.block]
            stop = int(rows[-1]) + 1
            start = 0 if window is None else max(0, int(rows[0]) - window + 1)
            keys = positions[start:stop]
            hidden = keys[None] > rows[:, None]
            if window is not None:
                hidden |= keys[None] <= rows[:, None] - window
            if self.hidden is not None:
                hidden |= self.hidden[None, start:stop]
            mask = torch.zeros(hidden.shape, dtype=dtype, device=rows.device).masked_fill_(hidden, -torch.inf)
            yield Block(slice(first, first + len(rows)), slice(start, stop), mask)


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Query rows `queries` see the keys at `keys` through an additive `mask` [m, n]; -inf hides."""

    queries: slice
    keys: slice
    mask: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Look:
    """What an observer is shown of one block in one layer: `query` [Hq, m, D], `key`, `value` [H, T, D] of all rows."""

    layer: int
    block: Block
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scaling: float
    softcap: float | None

    def log_weights(self, key: torch.Tensor | None = None) -> torch.Tensor:
        """Log of the attention weights, float32 [Hq, m, n] over the block's keys; with other keys if given."""
        keys = (self.key if key is None else key)[:, self.block.keys]
        keys = keys.repeat_interleave(self.query.shape[0] // keys.shape[0], 0)
        logits = (self.query @ keys.transpose(1, 2)).float() * self.scaling
        if self.softcap is not None:
            logits = _capped(logits, self.softcap)
        return (logits + self.block.mask.float()).log_softmax(-1)


Observer = Callable[[Look], None]
"""Sees every block of a selective forward before it attends; it may stop the forward by raising `Enough`."""


class Enough(Exception):
    """Raised inside a forward that has shown what it was run for; caught by whoever started it."""


_running: ContextVar[Attending | None] = ContextVar("kvboost_attention", default=None)


@contextlib.contextmanager
def attend_as(attending: Attending, configs: Sequence[Any]) -> Iterator[None]:
    """Within the context, a forward of this thread over `configs` attends as `attending` does."""
    names = [_register(original_name(config._attn_implementation)) for config in configs]
    token = _running.set(attending)
    former = compat.set_attention(configs, names)
    try:
        yield
    finally:
        compat.set_attention(configs, former)
        _running.reset(token)


def original_name(implementation: str | None) -> str:
    """The attention implementation that a config names when none of our forwards runs."""
    return (implementation or "eager").removeprefix(PREFIX)


def _register(original: str) -> str:
    """Adds our functions for one original implementation to the registries, once; returns their name."""
    name = PREFIX + original
    if name not in ALL_ATTENTION_FUNCTIONS.valid_keys():

        def attention(module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
            running = _running.get()
            if running is None:
                return _delegate(module, original)(module, *args, **kwargs)
            return running.attend(module, *args, **kwargs)

        def mask(*args: Any, **kwargs: Any) -> Any:
            running = _running.get()
            if running is None:
                return ALL_MASK_ATTENTION_FUNCTIONS[original](*args, **kwargs)
            return running.mask(*args, **kwargs)

        AttentionInterface.register(name, attention)
        AttentionMaskInterface.register(name, mask)
    return name


def _delegate(module: torch.nn.Module, original: str) -> Callable[..., tuple[torch.Tensor, Any]]:
    registered: Callable[..., tuple[torch.Tensor, Any]]
    if original == "eager":  # not in the registry: every modelling file has its own
        registered = sys.modules[type(module).__module__].eager_attention_forward
    else:
        registered = ALL_ATTENTION_FUNCTIONS[original]
    return registered


def layer_index(module: torch.nn.Module, kwargs: Mapping[str, Any]) -> int:
    """The layer of an attention module; raises `UnsupportedModel` for attention that takes more than we serve."""
    for unknown in ("s_aux", "position_bias", "head_mask"):
        if kwargs.get(unknown) is not None:
            raise UnsupportedModel(f"its attention takes `{unknown}`, which the selective forward does not")
    layer: int | None = getattr(module, "layer_idx", None)
    if layer is None:
        raise UnsupportedModel("its attention modules do not tell their layer index")
    return layer


def soft_capped(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    softcap: float,
) -> torch.Tensor:
    """Attention with capped logits (Gemma 2), which no fused kernel offers."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    logits = _capped(query @ key.transpose(2, 3) * scale, softcap)
    if mask is not None:
        logits = logits + mask
    return torch.softmax(logits, -1, dtype=torch.float32).to(query.dtype) @ value


def _capped(logits: torch.Tensor, softcap: float) -> torch.Tensor:
    return torch.tanh(logits / softcap) * softcap


def window_of(mask_function: Callable[..., Any]) -> int | None:
    """The sliding window of a mask function, None for a full causal mask.

    Raises `UnsupportedModel` for any other pattern (chunked, bidirectional, ...).
    """

    def visible(distance: int) -> bool:
        q, k = torch.tensor(FAR), torch.tensor(FAR - distance)
        return bool(mask_function(0, 0, q, k))

    if visible(-1) or not visible(0):
        raise UnsupportedModel("its attention mask is not causal")
    if visible(FAR):
        return None
    low, high = 0, FAR
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if visible(middle) else (low, middle)
    shifted = torch.tensor(FAR + 1)
    if not bool(mask_function(0, 0, shifted, shifted - low)) or bool(mask_function(0, 0, shifted, shifted - high)):
        raise UnsupportedModel("its attention mask is neither causal nor a sliding window")
    return low + 1
