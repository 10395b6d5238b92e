"""Stored chunks in fewer bytes: keys in 8 bits, values in 8 (`int8`) or 4 (`k8v4`).

             what is quantized          codes   scale for             besides
    keys     before rotation, less      int8    a channel over 64     the mean of each channel over the chunk
             the channel's mean                 tokens
    values   less the channel's mean    uint8   up to 64 channels     the same, and the group's least value
                                                of one token

A rotation mixes two channels by an angle that grows with the position. A key with a large constant part, such as the
biases of Qwen2, then swings over the whole range, and so does the error of its code. Before rotation the constant part
is a number per channel, which costs nothing to remove. Rows are rotated once, from position 0 to where they are wanted,
while they are unpacked; see KIVI (Liu et al. 2024) and KVQuant (Hooper et al. 2024) for quantizing keys by channel.

The first positions of a sequence and the layers that a probe names stay as they were computed, in the same `PackedKV`.
A layer whose *values* slot is rotated (multi-head latent attention) keeps in the other slot what serves as key and as
value at once: there both slots are treated as keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from kvboost.rotary import RotarySpec, Rotation, Slot, make_rotation
from kvboost.types import ChunkKV, LayerKV, Lineage, PackedKV, Span

Codec = Literal["int8", "k8v4"]

SINK_ROWS = 4  # positions that stay as computed: attention rests on them, so an error there is in every row
GROUP_ROWS = 128  # tokens that share a channel's scale, at most; fewer gain 1 dB in the keys, nothing in the answers
GROUP_DIMS = 64  # channels that share a token's scale, at most
MIN_ROWS = 8  # fewer rows stay plain: their scales and means would take what the codes save
BLOCK_ELEMENTS = 1 << 18  # unpacked at a time on a CPU: one float32 block stays in the second-level cache
SLOTS: tuple[Slot, Slot] = ("keys", "values")


@dataclass(frozen=True, slots=True, eq=False)
class Packer:
    """How records of one model are packed: per layer group its rotation and the layers that stay plain."""

    codec: Codec
    specs: Sequence[RotarySpec]
    plain: Sequence[Sequence[int]]  # indices into the group's layers

    def encode(self, record: ChunkKV) -> ChunkKV:
        """The record with its payload packed, and its lineage at most LOSSY.

        What cannot be packed is returned as it is: links, packed records, very short chunks, rows that are not finite.
        """
        if record.header.source is not None or record.header.codec != "none":
            return record
        payload = [self.pack(i, rows, record.header.position) for i, rows in enumerate(record.payload)]
        if any(group is None for group in payload) or not any(isinstance(group, PackedKV) for group in payload):
            return record
        lineage = min(record.header.lineage, Lineage.LOSSY)
        header = replace(record.header, codec=self.codec, lineage=lineage)
        return ChunkKV(header, tuple(group for group in payload if group is not None))

    def pack(self, index: int, rows: LayerKV | PackedKV, first_position: int) -> LayerKV | PackedKV | None:
        """One layer group packed, as given if all its layers stay plain, or None if it cannot be packed."""
        if isinstance(rows, PackedKV):
            return None
        if len(self.plain[index]) == len(rows.keys):
            return rows
        return pack(rows, self.specs[index], first_position, self.codec, self.plain[index])

    def round_trip(self, index: int, rows: LayerKV, first_position: int) -> LayerKV:
        """Rows of one layer group where they stood, with what packing loses."""
        packed = self.pack(index, rows, first_position)
        if packed is None:
            return rows
        out = LayerKV(torch.empty_like(rows.keys), torch.empty_like(rows.values))
        num_rows, spec = rows.keys.shape[2], self.specs[index]
        turns = Turns(spec)
        if spec.style != "none":
            new = torch.arange(first_position, first_position + num_rows, device=rows.keys.device)
            turns = Turns(spec, placed=make_rotation(spec, torch.zeros_like(new), new))
        for slot in SLOTS:
            read_rows(packed, slot, 0, out.named()[slot], turns, Span(0, num_rows))
        return out


def pack(
    group: LayerKV, spec: RotarySpec, first_position: int, codec: Codec, plain: Sequence[int] = ()
) -> PackedKV | None:
    """Packs rows that were computed at `first_position` and after; layers in `plain` (not all) and sinks stay as given.

    None if there are too few rows, or if a row is not finite or out of float16's range.
    """
    num_layers, num_rows = group.keys.shape[0], group.keys.shape[2]
    head = min(num_rows, max(0, SINK_ROWS - first_position))
    if num_rows - head < MIN_ROWS:
        return None
    packed_layers = [i for i in range(num_layers) if i not in plain]
    bits = 4 if codec == "k8v4" else 8
    tensors: dict[str, torch.Tensor] = {}
    for slot, rows in group.named().items():
        chosen = rows[packed_layers] if plain else rows
        body = _unrotated(chosen[:, :, head:], spec, packed_layers, first_position + head, slot)
        by_channel = slot == "keys" or spec.slot == "values"
        parts = _quantize_channels(body) if by_channel else _quantize_tokens(body, bits)
        if not all(bool(t.isfinite().all()) for t in parts.values() if t.is_floating_point()):
            return None
        tensors.update({f"{slot}.{name}": t for name, t in parts.items()})
        if head:
            tensors[f"{slot}.head"] = chosen[:, :, :head].clone()
        if plain:
            tensors[f"{slot}.plain"] = rows[sorted(plain)]
    if plain:
        tensors["plain"] = torch.zeros(num_layers, dtype=torch.uint8).index_fill_(0, torch.tensor(sorted(plain)), 1)
    return PackedKV(tensors)


def _unrotated(
    rows: torch.Tensor, spec: RotarySpec, layers: Sequence[int], first_position: int, slot: str
) -> torch.Tensor:
    """Rows [L, H, n, D] as they were before rotation, a float32 tensor of the caller's own."""
    rows = rows.float().clone() if rows.dtype is torch.float32 else rows.float()
    if spec.style == "none" or spec.slot != slot:
        return rows
    own = replace(spec, inv_freq=spec.inv_freq[list(layers)]) if spec.inv_freq.dim() == 2 else spec
    old = torch.arange(first_position, first_position + rows.shape[2], device=rows.device)
    out = torch.empty_like(rows)
    make_rotation(own, old, torch.zeros_like(old)).apply(rows, slice(None), out)
    return out


def _quantize_channels(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Symmetric int8 of float32 `x` [L, H, n, D], which is changed: `codes`, `scale` [L, H, groups, D], `mean`."""
    mean = _remove_mean(x)
    size = _row_group(x.shape[2], -(-x.shape[2] // GROUP_ROWS))
    groups = [x[:, :, i : i + size] for i in range(0, x.shape[2], size)]
    scale = _rounded_up(torch.cat([g.abs().amax(2, keepdim=True) for g in groups], 2) / 127)
    codes = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    for i, g in enumerate(groups):
        g.div_(_divisor(scale[:, :, i : i + 1])).round_().clamp_(-127, 127)
        codes[:, :, i * size : (i + 1) * size] = g
    return {"codes": codes, "scale": scale, "mean": mean}


def _quantize_tokens(x: torch.Tensor, bits: int) -> dict[str, torch.Tensor]:
    """Unsigned codes of float32 `x` [L, H, n, D], which is changed: per token and group `scale` and least value `low`.

    Channels are filled up to whole groups. Codes of 4 bits lie two in a byte: the first half of the channels low.
    """
    mean = _remove_mean(x)
    count = -(-x.shape[-1] // GROUP_DIMS)
    size = _dim_group(x.shape[-1], count)
    if count * size > x.shape[-1]:
        x = torch.cat([x, x[..., -1:].expand(*x.shape[:-1], count * size - x.shape[-1])], -1)
    grouped = x.view(*x.shape[:-1], count, size)
    low = grouped.amin(-1).half()
    largest = 2**bits - 1
    scale = _rounded_up((grouped.amax(-1) - low.float()) / largest)
    grouped.sub_(low.float()[..., None]).div_(_divisor(scale)[..., None]).round_().clamp_(0, largest)
    codes = x.to(torch.uint8)
    if bits == 4:
        half = x.shape[-1] // 2
        codes = codes[..., :half] | (codes[..., half:] << 4)
    return {"codes": codes, "scale": scale, "low": low, "mean": mean}


def _row_group(num_rows: int, count: int) -> int:
    """Rows in each of so many groups; the last one may have fewer. Readers count the scales, so `count` may change."""
    return -(-num_rows // count)


def _dim_group(dim: int, count: int) -> int:
    """Channels in each of so many groups, an even number."""
    return 2 * -(-dim // (2 * count))


def _remove_mean(x: torch.Tensor) -> torch.Tensor:
    """Subtracts each channel's mean, as rounded to the float16 that is returned, [L, H, 1, D]."""
    mean = x.mean(2, keepdim=True).half()
    x.sub_(mean.float())
    return mean


def _rounded_up(scale: torch.Tensor) -> torch.Tensor:
    """bfloat16 that is no smaller, so that no code is clipped; its range is float32's, so that none vanishes."""
    return (scale * (1 + 2**-7)).bfloat16()


def _divisor(scale: torch.Tensor) -> torch.Tensor:
    """Float32 of a scale, where a group of equal values, with scale 0, divides to 0."""
    return scale.float().clamp_min(torch.finfo(torch.float32).tiny)


# --- unpacking ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Turns:
    """Rotations of one layer group for all rows of a prompt; None where nothing is rotated.

    `moved` takes plain rows from where they were computed to where they are wanted, `placed` unpacked ones, which are
    not rotated yet.
    """

    spec: RotarySpec
    moved: Rotation | None = None
    placed: Rotation | None = None


def has_plain_rows(group: LayerKV | PackedKV) -> bool:
    """Whether some of the rows are kept as they were computed, rotated."""
    return isinstance(group, LayerKV) or any(name.endswith((".head", ".plain")) for name in group.tensors)


def read_rows(group: LayerKV | PackedKV, slot: Slot, first: int, out: torch.Tensor, turns: Turns, at: Span) -> None:
    """Writes rows `first ...` of a chunk to `out` [L, H, m, D], rotated as rows `at` of the prompt.

    Packed rows are dequantized and rotated in one pass, block by block.
    """
    moved, placed = (t if turns.spec.slot == slot else None for t in (turns.moved, turns.placed))
    if isinstance(group, LayerKV):
        _copy(group.named()[slot][:, :, first : first + len(at)], out, moved, at)
        return
    tensors = {n.removeprefix(f"{slot}."): t for n, t in group.tensors.items() if n.startswith(f"{slot}.")}
    for is_plain, layers, own in _layer_runs(group.tensors.get("plain"), len(out)):
        moved_here, placed_here = _of_layers(moved, layers), _of_layers(placed, layers)
        if is_plain:
            _copy(tensors["plain"][own, :, first : first + len(at)], out[layers], moved_here, at)
            continue
        part = {n: t[own] for n, t in tensors.items() if n != "plain"}
        head = part.pop("head", part["codes"][:, :, :0])
        taken = head[:, :, first : first + len(at)]
        split = taken.shape[2]
        if split:
            _copy(taken, out[layers, :, :split], moved_here, Span(at.start, at.start + split))
        rest = Span(at.start + split, at.stop)
        _unpack(part, first + split - head.shape[2], out[layers, :, split:], placed_here, rest)


def _copy(rows: torch.Tensor, out: torch.Tensor, rotation: Rotation | None, at: Span) -> None:
    """Writes rows to `out`, rotated as rows `at` of the prompt if there is a rotation."""
    if rotation is None:
        out.copy_(rows)
    else:
        rotation.apply(rows.to(out.device), slice(at.start, at.stop), out)


def _layer_runs(plain: torch.Tensor | None, num_layers: int) -> Iterator[tuple[bool, slice, slice]]:
    """Neighbouring layers of one kind: whether they are plain, where in the group, and where among their own kind."""
    flags = [0] * num_layers if plain is None else plain.tolist()
    counts = [0, 0]
    start = 0
    for stop in range(1, num_layers + 1):
        if stop == num_layers or flags[stop] != flags[start]:
            kind, size = flags[start], stop - start
            yield bool(kind), slice(start, stop), slice(counts[kind], counts[kind] + size)
            counts[kind] += size
            start = stop


def _of_layers(rotation: Rotation | None, layers: slice) -> Rotation | None:
    if rotation is None or rotation.cos.dim() == 2:
        return rotation
    return Rotation(rotation.spec, rotation.cos[layers], rotation.sin[layers])


def _unpack(part: Mapping[str, torch.Tensor], first: int, out: torch.Tensor, placed: Rotation | None, at: Span) -> None:
    """Packed rows `first ...` of some layers into `out`, in blocks of rows with one scale, and of few layers."""
    num_layers, num_heads, num_rows, dim = out.shape
    device = out.device
    size = _row_group(part["codes"].shape[2], 1 if "low" in part else part["scale"].shape[2])
    codes = part["codes"][:, :, first : first + num_rows].to(device)
    rest = {name: t.to(device) for name, t in part.items() if name != "codes"}
    step = max(1, BLOCK_ELEMENTS // (num_heads * size * dim)) if device.type == "cpu" else num_layers
    for a in range(0, num_layers, step):
        layers = slice(a, min(num_layers, a + step))
        scales = {name: t[layers].float() for name, t in rest.items()}
        turn = _of_layers(placed, layers)
        for rows, group in _row_groups(first, num_rows, size):
            block = codes[layers, :, rows]
            if "low" in scales:
                x = _from_tokens(block, scales, slice(first + rows.start, first + rows.stop), dim)
            else:
                x = block.float().mul_(scales["scale"][:, :, group : group + 1]).add_(scales["mean"])
            _copy(x, out[layers, :, rows], turn, Span(at.start + rows.start, at.start + rows.stop))


def _row_groups(first: int, num_rows: int, size: int) -> Iterator[tuple[slice, int]]:
    """The wanted rows, cut where the scale changes: rows counted from the first wanted one, number of the group."""
    start = 0
    while start < num_rows:
        group = (first + start) // size
        stop = min(num_rows, (group + 1) * size - first)
        yield slice(start, stop), group
        start = stop


def _from_tokens(codes: torch.Tensor, scales: Mapping[str, torch.Tensor], rows: slice, dim: int) -> torch.Tensor:
    """Float32 values [L, H, m, D] of unsigned codes."""
    count = scales["scale"].shape[3]
    size = _dim_group(dim, count)
    if codes.shape[-1] == count * size:
        x = codes.float()
    else:
        x = torch.empty(*codes.shape[:-1], count * size, device=codes.device)
        x[..., : codes.shape[-1]] = codes & 15
        x[..., codes.shape[-1] :] = codes >> 4
    grouped = x.view(*x.shape[:-1], count, size)
    grouped.mul_(scales["scale"][:, :, rows, :, None]).add_(scales["low"][:, :, rows, :, None])
    return x[..., :dim].add_(scales["mean"])


# --- is it what `pack` makes ----------------------------------------------------------------------------------------


def is_of_shape(group: PackedKV, shapes: Mapping[Slot, tuple[int, ...]], dtype: torch.dtype, codec: str) -> bool:
    """Whether `read_rows` can unpack a group into rows of these shapes [L, H, n, D] and this dtype.

    Names, types and shapes must be what `pack` writes with `codec`. How many rows stay plain, and how many groups there
    are, is read off the tensors, as `read_rows` does: another release may choose other sizes.
    """
    bits = {"int8": 8, "k8v4": 4}.get(codec)
    flags = group.tensors.get("plain")
    num_plain = 0 if flags is None else _count_plain(flags, shapes["keys"][0])
    if bits is None or num_plain is None:
        return False
    expected = {} if flags is None else {"plain": (torch.uint8, tuple(flags.shape))}
    for slot in SLOTS:
        parts = {n.removeprefix(f"{slot}."): t for n, t in group.tensors.items() if n.startswith(f"{slot}.")}
        expected |= {f"{slot}.{n}": part for n, part in _expected(parts, shapes[slot], num_plain, dtype, bits).items()}
    return {name: (t.dtype, tuple(t.shape)) for name, t in group.tensors.items()} == expected


def _count_plain(flags: torch.Tensor, num_layers: int) -> int | None:
    """How many layers are plain: some and not all, else None; also if the flags are none."""
    if flags.dtype is not torch.uint8 or flags.shape != (num_layers,):
        return None
    values = flags.tolist()
    return sum(values) if set(values) == {0, 1} else None


def _expected(
    parts: Mapping[str, torch.Tensor], shape: tuple[int, ...], num_plain: int, dtype: torch.dtype, bits: int
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Type and shape by name of one slot's tensors, of which `parts` tells the free sizes."""
    layers, heads, rows, dim = shape
    layers -= num_plain
    num_head = _size(parts, "head", 2)
    body = max(1, rows - num_head)
    expected: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {"mean": (torch.float16, (layers, heads, 1, dim))}
    if "low" in parts:
        count = max(1, _size(parts, "scale", 3))
        scales = (layers, heads, body, count)
        width = count * _dim_group(dim, count) * bits // 8
        expected |= {"codes": (torch.uint8, (layers, heads, body, width)), "low": (torch.float16, scales)}
    else:
        scales = (layers, heads, max(1, _size(parts, "scale", 2)), dim)
        expected |= {"codes": (torch.int8, (layers, heads, body, dim))}
    expected |= {"scale": (torch.bfloat16, scales)}
    if "head" in parts:
        expected |= {"head": (dtype, (layers, heads, num_head, dim))}
    if num_plain:
        expected |= {"plain": (dtype, (num_plain, heads, rows, dim))}
    return expected


def _size(parts: Mapping[str, torch.Tensor], name: str, axis: int) -> int:
    """A tensor's size, 0 if it is absent or has other axes."""
    return parts[name].shape[axis] if name in parts and parts[name].dim() == 4 else 0


# --- how far off ----------------------------------------------------------------------------------------------------


def psnr_db(group: LayerKV, packed: PackedKV, spec: RotarySpec, first_position: int) -> dict[Slot, torch.Tensor]:
    """Per slot, layer and head the peak signal to noise ratio in dB, float32 [L, H]; infinite where nothing is lost.

    The signal is what varies: its peak is the largest distance of a row, before rotation, from its channel's mean.
    """
    found: dict[Slot, torch.Tensor] = {}
    num_layers, _, num_rows, _ = group.keys.shape
    for slot in SLOTS:
        rows = group.named()[slot]
        truth = _unrotated(rows, spec, range(num_layers), first_position, slot)
        ours = torch.empty_like(truth)
        positions = torch.arange(first_position, first_position + num_rows, device=rows.device)
        back = None
        if spec.style != "none" and has_plain_rows(packed):
            back = make_rotation(spec, positions, torch.zeros_like(positions))
        read_rows(packed, slot, 0, ours, Turns(spec, moved=back), Span(0, num_rows))
        noise = (truth - ours).square().mean((2, 3))
        peak = (truth - truth.mean(2, keepdim=True)).abs().amax((2, 3))
        found[slot] = 20 * peak.log10() - 10 * noise.log10()
    return found
