"""The joint decode step: a sequence's logits are the model's own, whoever else is in the crowd."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from families import BY_NAME, LONGROPE_BOUNDARY, MOVABLE, SUPPORTED_HERE, Family, build, build_fresh, random_ids
from kvboost.hf.crowd import Crowd, Slot, SlotLayer, make_slot
from kvboost.hf.prefill import last_logits
from kvboost.hf.support import inspect_model
from scenario import relative_error

LENGTHS = (3, 61, 17, 40)


def crowd_of(model: Any) -> Crowd:
    return Crowd(model, inspect_model(model))


def filled(crowd: Crowd, text: list[int], known: int) -> Slot:
    """A slot of `text[:known + 1]`, of which the last id has no row yet."""
    slot = make_slot(crowd.num_layers, text[: known + 1])
    last_logits(crowd.model, torch.tensor([text[:known]]), slot.cache)
    return slot


def truth(model: Any, text: list[int], length: int) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([text[:length]])).logits[0, -1].float()


def check_steps(crowd: Crowd, lengths: tuple[int, ...], steps: int, tolerance: float = 1e-4) -> None:
    texts = [random_ids(n + steps, seed=i)[0].tolist() for i, n in enumerate(lengths)]
    slots = [filled(crowd, text, n - 1) for text, n in zip(texts, lengths, strict=True)]
    for step in range(steps):
        logits = crowd.step(slots)
        for slot, row, text, n in zip(slots, logits, texts, lengths, strict=True):
            assert slot.cache.get_seq_length() == n + step
            assert relative_error(row, truth(crowd.model, text, n + step)) <= tolerance
            if step + 1 < steps:
                slot.ids.append(text[n + step])


@pytest.mark.smoke
@pytest.mark.parametrize("family", [f for f in SUPPORTED_HERE if f.reuse != "none"], ids=lambda f: f.name)
def test_a_joint_step_equals_the_forward_of_every_sequence_alone(family: Family) -> None:
    check_steps(crowd_of(build(family.name, family.attention[0])), LENGTHS, 4)


def test_nearly_every_model_whose_text_moves_is_decoded_jointly() -> None:
    one_by_one = {f.name for f in MOVABLE if crowd_of(build(f.name, f.attention[0])).refused is not None}
    assert one_by_one <= {"deepseek-v3"}, "since 5.x its keys are expanded from what the cache returns"


@pytest.mark.parametrize("name", ["bloom", "llama-dynamic"])
def test_a_model_that_is_decoded_one_by_one_says_why(name: str) -> None:
    assert crowd_of(build(name, BY_NAME[name].attention[0])).refused


def test_bfloat16_passes_its_own_check() -> None:
    crowd = crowd_of(build("gemma3", dtype=torch.bfloat16))
    assert crowd.refused is None
    check_steps(crowd, LENGTHS, 2, tolerance=5e-2)


@pytest.mark.parametrize("beyond", [-2, -1, 0, 1])
def test_both_regimes_of_longrope_decode_in_one_step_and_one_crosses(beyond: int) -> None:
    crowd = crowd_of(build("longrope-phi3"))
    check_steps(crowd, (20, LONGROPE_BOUNDARY + beyond, LONGROPE_BOUNDARY + 30), 4)


def test_a_sequence_that_crosses_leaves_its_short_rows_to_be_stored() -> None:
    crowd = crowd_of(build("longrope-phi3"))
    slot = filled(crowd, random_ids(LONGROPE_BOUNDARY + 1)[0].tolist(), LONGROPE_BOUNDARY)
    cache, before = slot.cache, slot.cache.layers[0].keys.clone()
    crowd.step([slot])
    assert slot.cache is not cache
    assert torch.equal(cache.layers[0].keys, before)


def test_a_step_that_fails_in_the_middle_leaves_every_slot_as_it_was() -> None:
    crowd = crowd_of(build_fresh("llama"))
    texts = [random_ids(n, seed=n)[0].tolist() for n in LENGTHS]
    slots = [filled(crowd, text, len(text) - 1) for text in texts]

    def fail(*args: Any) -> None:
        raise RuntimeError("the device is lost")

    hook = crowd.model.model.layers[2].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="lost"):
        crowd.step(slots)
    hook.remove()
    for slot in slots:
        assert {la.keys.shape[2] for la in slot.cache.layers} == {len(slot.ids) - 1}
    for row, text in zip(crowd.step(slots), texts, strict=True):
        assert relative_error(row, truth(crowd.model, text, len(text))) <= 1e-4


def test_a_slot_grows_and_shrinks_without_losing_rows() -> None:
    layer, parts = SlotLayer(4), [torch.randn(1, 2, n, 8) for n in (3, 1, 5, 20)]
    for part in parts:
        keys, values = layer.update(part, 2 * part)
    assert torch.equal(keys, torch.cat(parts, 2))
    assert torch.equal(values, 2 * keys)
    assert layer.get_seq_length() == 29
    layer.truncate(7)
    layer.update(parts[1], parts[1])
    assert torch.equal(layer.keys, torch.cat([torch.cat(parts, 2)[:, :, :7], parts[1]], 2))


def test_a_plain_forward_of_another_thread_is_not_touched() -> None:
    crowd = crowd_of(build("gemma3"))
    ids = random_ids(50)
    expected = truth(crowd.model, ids[0].tolist(), 50)
    wrong: list[float] = []
    stop = threading.Event()

    def forward() -> None:
        while not stop.is_set():
            wrong.extend(e for e in [(truth(crowd.model, ids[0].tolist(), 50) - expected).abs().max().item()] if e)

    thread = threading.Thread(target=forward)
    thread.start()
    check_steps(crowd, LENGTHS, 20)
    stop.set()
    thread.join()
    assert not wrong
    assert crowd.model.config._attn_implementation == "sdpa"
