"""Quantized chunks: what they lose is bounded, what must not be lost is kept, and every reader reads them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

import quant
from families import MOVABLE, SUPPORTED_HERE, Family, build, build_fresh, random_ids
from kvboost import KVBoost, codec
from kvboost.codec import SINK_ROWS, SLOTS, Codec, Packer, Turns, pack, psnr_db, read_rows
from kvboost.hf import probe, quant_probe
from kvboost.hf.quant_probe import probe_quantization
from kvboost.quantization import Quantization
from kvboost.rotary import NO_ROTATION, RotarySpec, make_rotation, shift
from kvboost.types import ChunkHeader, ChunkKey, ChunkKV, LayerKV, Lineage, Link, PackedKV, Span
from matrix import LONGER, REORDERED
from scenario import SMALL, engine, greedy, logits, plain_logits, prompt, relative_error

CODECS: tuple[Codec, ...] = ("int8", "k8v4")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def frequencies(rotated: int, base: float = 1e4) -> torch.Tensor:
    return (1.0 / base ** (torch.arange(0, rotated, 2).double() / rotated)).float()


def make_rows(layers: int, heads: int, rows: int, dims: tuple[int, int], dtype: Any = torch.float32) -> LayerKV:
    generator = torch.Generator().manual_seed(layers * 1000 + rows * 10 + dims[1])
    return LayerKV(*(torch.randn(layers, heads, rows, d, generator=generator).to(dtype) for d in dims))


def make_record(group: LayerKV, position: int = 100) -> ChunkKV:
    tokens = torch.arange(group.keys.shape[2]).int().numpy()
    header = ChunkHeader(ChunkKey(b"c" * 32, b"p" * 32), b"q" * 32, position, tokens, Lineage.BIT_EXACT)
    return ChunkKV(header, (group,))


def read(
    packed: PackedKV | LayerKV, like: LayerKV, spec: RotarySpec, old: int, new: int, rows: slice = slice(None)
) -> LayerKV:
    """Rows computed at `old ...`, read as they stand at `new ...`; float32."""
    first, stop, _ = rows.indices(like.keys.shape[2])
    moved, placed = None, None
    if spec.style != "none":
        at, was = torch.arange(new, new + stop), torch.arange(old, old + stop)
        moved, placed = make_rotation(spec, was, at), make_rotation(spec, torch.zeros_like(at), at)
    out = LayerKV(*(torch.empty_like(t[:, :, first:stop], dtype=torch.float32) for t in (like.keys, like.values)))
    for slot in SLOTS:
        read_rows(packed, slot, first, out.named()[slot], Turns(spec, moved, placed), Span(first, stop))
    return out


def shifted(group: LayerKV, spec: RotarySpec, old: int, new: int) -> LayerKV:
    """What reading rows that are not packed gives, by `rotary.shift` alone; float32."""
    steps = torch.arange(group.keys.shape[2])
    found = {slot: t.float().clone() for slot, t in group.named().items()}
    if spec.style != "none":
        shift(group.named()[spec.slot].float(), steps + old, steps + new, spec, found[spec.slot])
    return LayerKV(found["keys"], found["values"])


def computed_at(base: LayerKV, spec: RotarySpec, position: int) -> LayerKV:
    """Keys that are not rotated, rotated as a model does for positions `position ...`."""
    new = position + torch.arange(base.keys.shape[2])
    keys = torch.empty_like(base.keys)
    shift(base.keys, torch.zeros_like(new), new, spec, keys)
    return LayerKV(keys, base.values)


def largest_step(packed: PackedKV, slot: str) -> torch.Tensor:
    """The coarsest scale of each layer and head, [L, H, 1, 1]."""
    return packed.tensors[f"{slot}.scale"].float().amax((2, 3), keepdim=True)


@settings(max_examples=80, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(8, 200),
    st.sampled_from([(16, 16), (8, 7), (64, 64), (24, 80), (10, 1), (6, 129)]),
    st.sampled_from(DTYPES),
    st.sampled_from(CODECS),
    st.sampled_from(["half", "interleaved", "none"]),
    st.sampled_from([32, 1000, 30000]),
    st.integers(0, 4000),
    st.data(),
)
def test_rows_come_back_within_half_a_step_wherever_they_are_placed(
    layers: int, heads: int, rows: int, dims: Any, dtype: Any, name: Codec, style: Any, old: int, new: int, data: Any
) -> None:
    group = make_rows(layers, heads, rows, dims, dtype)
    spec = NO_ROTATION if style == "none" else RotarySpec(style, frequencies(min(6, dims[0])), start=dims[0] - 6)
    packed = pack(group, spec, old, name)
    assert packed is not None
    ours, truth = read(packed, group, spec, old, new), shifted(group, spec, old, new)
    turned = 1.0 if style == "none" else 2**0.5  # half a step in each of two channels that are mixed
    key_error = (ours.keys - truth.keys).abs()
    assert (key_error <= 0.5 * turned * largest_step(packed, "keys") + 2e-5).all()
    assert ((ours.values - truth.values).abs() <= 0.5 * largest_step(packed, "values") + 2e-3).all()
    start = data.draw(st.integers(0, rows - 1))
    stop = data.draw(st.integers(start + 1, rows))
    part = read(packed, group, spec, old, new, slice(start, stop))
    for slot in SLOTS:
        assert torch.equal(part.named()[slot], ours.named()[slot][:, :, start:stop]), "a part is a part of the whole"


def test_codes_do_not_depend_on_where_a_chunk_stood() -> None:
    spec = RotarySpec("half", frequencies(64))
    group = make_rows(2, 2, 100, (64, 64))
    near, far = (pack(computed_at(group, spec, at), spec, at, "int8") for at in (50, 20_000))
    assert near is not None
    assert far is not None
    difference = near.tensors["keys.codes"].int() - far.tensors["keys.codes"].int()
    assert difference.abs().max() <= 1, "a code at the edge of a step may fall to either side"
    assert (difference != 0).float().mean() < 1e-2


def test_layers_are_unrotated_each_with_its_own_frequencies() -> None:
    table = torch.stack([frequencies(16), frequencies(16, 1e6), torch.zeros(8)])
    spec = RotarySpec("half", table)
    group = make_rows(3, 2, 60, (16, 16))
    for plain in ((), (0,), (1,), (0, 2)):
        packed = pack(group, spec, 700, "int8", plain)
        assert packed is not None
        ours, truth = read(packed, group, spec, 700, 90), shifted(group, spec, 700, 90)
        assert relative_error(ours.keys, truth.keys) < 0.01


def test_the_constant_part_of_a_channel_costs_nothing() -> None:
    spec = RotarySpec("half", frequencies(64))
    group = make_rows(1, 2, 128, (64, 64))
    biased = LayerKV(group.keys + 300 * torch.randn(1, 2, 1, 64), group.values)
    errors = []
    for base in (group, biased):
        rows = computed_at(base, spec, 5000)
        packed = pack(rows, spec, 5000, "int8")
        assert packed is not None
        errors.append((read(packed, rows, spec, 5000, 5000).keys - rows.keys).square().mean().sqrt())
    assert errors[1] < 1.2 * errors[0]


@pytest.mark.parametrize("name", CODECS)
def test_zeros_and_constant_channels_come_back_as_they_were(name: Codec) -> None:
    group = LayerKV(torch.zeros(1, 1, 40, 16), torch.zeros(1, 1, 40, 16))
    packed = pack(group, NO_ROTATION, 50, name)
    assert packed is not None
    assert not read(packed, group, NO_ROTATION, 50, 50).keys.any()
    assert not read(packed, group, NO_ROTATION, 50, 50).values.any()
    constant = LayerKV(group.keys + torch.linspace(-300, 300, 16), group.values + 0.123)
    packed = pack(constant, NO_ROTATION, 50, name)
    assert packed is not None
    ours = read(packed, constant, NO_ROTATION, 50, 50)
    assert (ours.keys - constant.keys).abs().max() < 0.01
    assert (ours.values - constant.values).abs().max() < 1e-4


@pytest.mark.parametrize("scale", [1e-12, 1e-6, 1e4])
def test_tiny_and_large_rows_keep_their_relative_accuracy(scale: float) -> None:
    group = make_rows(1, 1, 64, (32, 32))
    group = LayerKV(group.keys * scale, group.values * min(scale, 1e3))
    packed = pack(group, NO_ROTATION, 50, "int8")
    assert packed is not None
    assert relative_error(read(packed, group, NO_ROTATION, 50, 50).keys, group.keys) < 0.01


def test_an_outlying_row_costs_its_own_channel_only() -> None:
    group = make_rows(1, 1, 100, (32, 32))
    keys = group.keys.clone()
    keys[0, 0, 40, 5] = 1000.0
    packed, usual = (pack(LayerKV(k, group.values), NO_ROTATION, 50, "int8") for k in (keys, group.keys))
    assert packed is not None
    assert usual is not None
    others = [d for d in range(32) if d != 5]
    ours, theirs = (read(p, group, NO_ROTATION, 50, 50).keys[..., others] for p in (packed, usual))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("slot", SLOTS)
def test_rows_that_cannot_be_told_in_16_bits_stay_plain(slot: str, value: float) -> None:
    group = make_rows(1, 2, 64, (16, 16))
    group.named()[slot][0, 1, 20, 3] = value
    record = make_record(group)
    assert Packer("k8v4", [NO_ROTATION], [[]]).encode(record) is record


def test_what_is_not_worth_packing_is_returned_as_it_is() -> None:
    packer = Packer("k8v4", [NO_ROTATION], [[]])
    for rows in (1, 7):
        record = make_record(make_rows(1, 1, rows, (16, 16)))
        assert packer.encode(record) is record
    record = make_record(make_rows(1, 1, 64, (16, 16)))
    link = ChunkKV(replace(record.header, source=Link(b"x" * 64, 0)), record.payload)
    assert packer.encode(link) is link
    once = packer.encode(record)
    assert once.header.codec == "k8v4"
    assert once.header.lineage is Lineage.LOSSY
    assert packer.encode(once) is once
    low = ChunkKV(replace(record.header, lineage=Lineage.APPROXIMATE), record.payload)
    assert packer.encode(low).header.lineage is Lineage.APPROXIMATE
    assert Packer("k8v4", [NO_ROTATION], [[0]]).encode(record) is record, "no layer is packed"


@pytest.mark.parametrize("dtype", DTYPES)
def test_sink_rows_and_plain_layers_keep_their_bits(dtype: Any) -> None:
    spec = RotarySpec("half", frequencies(16))
    group = make_rows(4, 2, 50, (16, 16), dtype)
    packed = pack(group, spec, 1, "k8v4", plain=(1, 2))
    assert packed is not None
    ours, turns = LayerKV(torch.empty_like(group.keys), torch.empty_like(group.values)), Turns(spec)
    for slot in SLOTS:
        read_rows(packed, slot, 0, ours.named()[slot], turns, Span(1, 51))
        mine, theirs = ours.named()[slot], group.named()[slot]
        assert torch.equal(mine[1:3], theirs[1:3])
        assert torch.equal(mine[:, :, : SINK_ROWS - 1], theirs[:, :, : SINK_ROWS - 1])
        assert not torch.equal(mine[0], theirs[0])


def test_the_bytes_are_what_the_names_promise() -> None:
    spec = RotarySpec("half", frequencies(64))
    group = make_rows(30, 3, 128, (64, 64), torch.bfloat16)
    record = make_record(group)
    for name, layers, whole in (("k8v4", 0.42, 0.42), ("int8", 0.54, 0.54)):
        packed = Packer(name, [spec], [[]]).encode(record)
        size = sum(t.nbytes for t in packed.payload[0].named().values())
        assert size <= layers * (group.keys.nbytes + group.values.nbytes)
        assert packed.num_bytes <= whole * record.num_bytes
    kept = Packer("k8v4", [spec], [[0, 29]]).encode(record)
    assert kept.num_bytes <= 0.47 * record.num_bytes, "with the first and the last layer plain"


def test_psnr_tells_a_bad_head_from_good_ones() -> None:
    group = make_rows(2, 3, 128, (64, 64))
    signs = torch.randint(0, 2, (128, 64)) * 2.0 - 1
    group.values[1, 2] = signs * torch.rand(128, 64).clamp_min(0.7)  # every group spans the whole range
    packed = pack(group, NO_ROTATION, 50, "k8v4")
    assert packed is not None
    found = psnr_db(group, packed, NO_ROTATION, 50)
    assert found["keys"].min() >= 50
    assert found["values"].argmin() == 5
    assert found["values"][1, 2] < 30 < found["values"][0].min()


# --- through an engine ----------------------------------------------------------------------------------------------


def packing_engine(model: PreTrainedModel, **flags: Any) -> tuple[KVBoost, quant.ListedTier]:
    store = quant.ListedTier()
    return engine(model, store=store, **flags), store


def packer_of(kv: KVBoost, name: Codec = "k8v4") -> Packer:
    found = probe_quantization(kv.model, kv.support, name)
    packer = found.packer(kv.support.require_layout(), 0)
    assert packer is not None, found.refused
    return packer


def pack_all(kv: KVBoost, store: quant.ListedTier, name: Codec = "k8v4") -> None:
    packer = packer_of(kv, name)
    store.replace_all([packer.encode(r) for r in store.held()])
    assert any(r.header.codec == name for r in store.held())


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("family", MOVABLE, ids=lambda f: f.name)
def test_every_family_answers_the_same_over_packed_chunks(family: Family, name: Codec) -> None:
    kv, store = packing_engine(build(family.name, family.attention[0]))
    greedy(kv.generate, prompt(), 1)
    plain = store.held()
    answer = random_ids(12, seed=4)
    truth = {}
    for what, ids in (("continued", LONGER), ("moved", REORDERED)):
        store.replace_all(plain)
        truth[what] = kv.score(ids, answer)
    for what, ids in (("continued", LONGER), ("moved", REORDERED)):
        store.replace_all(plain)
        pack_all(kv, store, name)
        ours, report = kv.score(ids, answer)
        theirs, plain_report = truth[what]
        assert report.fallback is None
        assert report.fresh_tokens == plain_report.fresh_tokens
        assert report.moved_tokens == plain_report.moved_tokens
        assert report.exact_tokens == 0
        assert report.continued_tokens + report.moved_tokens > 150
        assert 0 < relative_error(ours, theirs) <= (0.01 if name == "int8" else 0.1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_models_answer_the_same_over_packed_chunks(dtype: Any) -> None:
    kv, store = packing_engine(build("llama", "sdpa", dtype))
    greedy(kv.generate, prompt(), 1)
    answer = random_ids(12, seed=4)
    plain, _ = kv.score(LONGER, answer)
    pack_all(kv, store)
    ours, report = kv.score(LONGER, answer)
    assert report.continued_tokens == prompt().shape[1]
    assert 0 < relative_error(ours, plain) <= 0.1


@pytest.mark.parametrize("family", [f for f in SUPPORTED_HERE if f not in MOVABLE], ids=lambda f: f.name)
def test_a_model_whose_rotation_is_not_known_is_refused_with_the_reason(family: Family) -> None:
    kv = engine(build(family.name, family.attention[0]))
    found = probe_quantization(kv.model, kv.support, "k8v4")
    assert found.refused
    assert (kv.support.moved_refused or "") in found.refused


def test_the_rotated_slot_of_latent_attention_is_a_key_and_so_is_the_latent() -> None:
    kv, store = packing_engine(build("deepseek-v3"))
    assert kv.support.require_layout().groups[0].rotary[0].slot == "values"
    greedy(kv.generate, prompt(), 1)
    pack_all(kv, store)
    tensors = next(r for r in store.held() if r.header.codec == "k8v4").payload[0].named()
    assert tensors["keys.codes"].dtype is tensors["values.codes"].dtype is torch.int8


def test_exact_fidelity_never_serves_a_packed_record() -> None:
    model = build("llama")
    kv, store = packing_engine(model)
    greedy(kv.generate, prompt(), 1)
    pack_all(kv, store)
    out = greedy(kv.generate, LONGER, 4, fidelity="exact")
    assert out.report.fresh_tokens + out.report.exact_tokens == LONGER.shape[1]
    assert out.report.exact_tokens < codec.MIN_ROWS, "a chunk too short to be packed at the most"
    assert relative_error(logits(out.output), plain_logits(model, LONGER, 4)) <= 1e-5
    again = greedy(kv.generate, LONGER, 4)
    assert again.report.exact_tokens == LONGER.shape[1] - 1, "the store keeps the truer rows"


def test_what_is_computed_behind_packed_rows_is_lossy() -> None:
    kv, store = packing_engine(build("llama"))
    greedy(kv.generate, prompt(), 1)
    pack_all(kv, store)
    known = set(store.ids)
    greedy(kv.generate, LONGER, 4)
    new = [r.header for r in store.held() if r.header.record_id not in known]
    assert new
    assert {h.lineage for h in new} == {Lineage.LOSSY}


def test_repair_corrects_rows_of_packed_donors_and_its_links_are_continued() -> None:
    kv, store = packing_engine(build("llama"), recompute_strategy="guided", recompute_ratio=0.3, sample_step=5)
    greedy(kv.generate, prompt(), 1)
    pack_all(kv, store)
    first = greedy(kv.generate, REORDERED, 1)
    assert 0 < first.report.repaired_tokens < first.report.moved_tokens
    links = [r for r in store.held() if r.header.source is not None]
    assert links
    assert all(r.header.corrected and r.header.codec == "none" for r in links)
    again = greedy(kv.generate, REORDERED, 1)
    assert again.report.moved_tokens == 0
    assert again.report.fresh_tokens == 1
    assert relative_error(logits(again.output), logits(first.output)) < 1e-3, "links give back what was served"


def test_repairing_every_moved_row_of_packed_donors_is_off_by_the_packed_prefix_only() -> None:
    model = build("llama")
    kv, store = packing_engine(model, recompute_ratio=1.0)
    greedy(kv.generate, prompt(), 1)
    pack_all(kv, store, "int8")
    moved = prompt("3120", head=random_ids(47, seed=5))
    out = greedy(kv.generate, moved, 1)
    assert out.report.moved_tokens == out.report.repaired_tokens > 150
    assert out.report.continued_tokens == 0, "another head: nothing of the prefix is reused"
    assert relative_error(logits(out.output), plain_logits(model, moved, 1)) <= 1e-4


def test_layers_that_the_probe_names_stay_plain_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    kv, store = packing_engine(build("llama"))
    worst = [min(heads) for heads in probe_quantization(kv.model, kv.support, "k8v4").psnr_db["values"]]
    monkeypatch.setattr(quant_probe, "LEAST_DB", {"keys": 50.0, "values": sorted(worst)[1]})
    found = probe_quantization(kv.model, kv.support, "k8v4")
    assert found.plain_layers == {worst.index(min(worst))}
    greedy(kv.generate, prompt(), 1)
    before = {r.header.record_id: r for r in store.held()}
    pack_all(kv, store)
    for record in store.held():
        tensors = record.payload[0].named()
        if record.header.codec != "none":
            kept = before[record.header.record_id].payload[0].named()["keys"][sorted(found.plain_layers)]
            assert torch.equal(tensors["keys.plain"], kept)
            assert len(tensors["keys.codes"]) == len(worst) - 1


def test_a_layer_out_of_range_stays_plain_and_the_others_are_measured_as_before() -> None:
    before = probe_quantization((kv := engine(build_fresh("gemma3"))).model, kv.support, "k8v4")
    model = build_fresh("gemma3")
    model.model.layers[2].self_attn.v_proj.weight.data *= 1e6  # its channel means are beyond float16
    model.model.layers[2].self_attn.o_proj.weight.data /= 1e6
    kv = engine(model)
    found = probe_quantization(model, kv.support, "k8v4")
    assert found.plain_layers == {2}
    for slot in SLOTS:
        for ours, theirs in zip(found.psnr_db[slot][:2], before.psnr_db[slot][:2], strict=True):
            assert ours == pytest.approx(theirs, abs=0.01)
    assert packer_of(kv).plain == [[2]]


def test_a_model_whose_answers_change_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    kv = engine(build("llama"))
    assert 0 < probe_quantization(kv.model, kv.support, "int8").kl < probe_quantization(kv.model, kv.support, "k8v4").kl
    monkeypatch.setattr(quant_probe, "MOST_KL", 0.0)
    found = probe_quantization(kv.model, kv.support, "k8v4")
    assert "nat per token" in (found.refused or "")
    assert found.packer(kv.support.require_layout(), 0) is None


def test_learned_attention_sinks_are_refused() -> None:
    model = build_fresh("llama")
    model.model.layers[1].self_attn.register_parameter("sinks", torch.nn.Parameter(torch.zeros(4)))
    kv = engine(model)
    refused = probe_quantization(model, kv.support, "k8v4").refused or ""
    assert "learned attention sinks (model.layers.1.self_attn.sinks)" in refused


# --- large key biases, as Qwen2 has them ------------------------------------------------------------------------------


def biased(size: float, first: int) -> PreTrainedModel:
    """A Qwen2 with sharp attention whose keys have a constant part in the slower dimensions, from pair `first` on."""
    model = build_fresh("qwen2")
    generator = torch.Generator().manual_seed(3)
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.data *= 3
        layer.self_attn.k_proj.weight.data *= 3
        bias = torch.zeros(2, 2, 8)
        bias[..., first:] = size * torch.randn(2, 2, 8 - first, generator=generator)
        layer.self_attn.k_proj.bias.data = bias.flatten()
    return model


def agreement(kv: KVBoost, store: quant.ListedTier, encode: Any) -> float:
    """Share of next tokens that are those of a full prefill, over 60 tokens behind a prompt out of the store."""
    kv.invalidate()
    greedy(kv.generate, prompt(), 1)
    store.replace_all([encode(r) for r in store.held()])
    answer = random_ids(60, seed=8)
    truth, _ = kv.score(prompt(), answer, disable=True)
    ours, report = kv.score(prompt(), answer)
    assert report.exact_tokens + report.continued_tokens > 200
    return (ours.argmax(-1) == truth.argmax(-1)).float().mean().item()


def test_large_key_biases_break_plain_quantization_and_not_ours() -> None:
    kv, store = packing_engine(biased(0.0, 4))
    assert agreement(kv, store, quant.per_token(8)) >= 0.95, "without biases the plain way is good enough"
    kv, store = packing_engine(biased(600.0, 4))
    keys = probe.run(kv.model, prompt()).layers[1].keys
    assert keys.abs().max() > 500 * (keys - keys.mean(2, keepdim=True)).std(2).median()
    assert agreement(kv, store, packer_of(kv, "int8").encode) >= 0.95
    assert agreement(kv, store, packer_of(kv, "k8v4").encode) >= 0.9
    assert agreement(kv, store, quant.per_token(8)) <= 0.4
    assert agreement(kv, store, quant.per_token(4)) <= 0.2


def test_large_key_biases_in_faster_dimensions_break_quantization_after_rotation() -> None:
    kv, store = packing_engine(biased(300.0, 2))
    packer = packer_of(kv, "int8")
    after = replace(packer, specs=[NO_ROTATION])
    assert agreement(kv, store, packer.encode) >= 0.9
    assert agreement(kv, store, lambda record: quant.lossy(record, after)) <= 0.6


def test_small_chunks_of_every_size_go_through_an_engine() -> None:
    kv, store = packing_engine(build("llama"), **{**SMALL, "chunk_min_tokens": 1, "chunk_avg_tokens": 8})
    greedy(kv.generate, prompt(), 1)
    sizes = {r.num_rows for r in store.held()}
    assert min(sizes) < codec.MIN_ROWS < max(sizes)
    pack_all(kv, store)
    out = greedy(kv.generate, LONGER, 2)
    assert out.report.fallback is None
    assert out.report.exact_tokens + out.report.continued_tokens == prompt().shape[1]


def test_probes_of_weights_that_are_gone_are_forgotten() -> None:
    kv = engine(build("llama"))
    names = [b"%d" % i for i in range(20)]
    following = iter(names)
    quantization = Quantization(kv.model, kv.support, lambda: next(following))
    for _ in names:
        quantization.measure("int8")
    assert [of_weights for _, of_weights in quantization._probes] == names[-len(quantization._probes) :]
    assert 2 <= len(quantization._probes) < 10
