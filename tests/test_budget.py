"""How much the cache may take, and what happens when the device has no memory left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from families import build
from kvboost.config import Settings
from kvboost.errors import OutOfMemory, SettingsError
from kvboost.hf.budget import DeviceMemory, cache_budget, host_bytes
from scenario import engine, greedy, logits, plain_logits, prompt, relative_error

pytestmark = pytest.mark.smoke
GIB = 2**30


def test_bytes_that_are_set_count_and_the_share_does_not() -> None:
    memory = DeviceMemory(total_bytes=GIB, weights_bytes=GIB, available_bytes=GIB)
    assert cache_budget(Settings(cache_bytes=7, kv_cache_size_ratio=1.0), memory) == 7


def test_a_share_is_taken_of_what_is_available() -> None:
    memory = DeviceMemory(total_bytes=100 * GIB, weights_bytes=20 * GIB, available_bytes=80 * GIB)
    assert cache_budget(Settings(kv_cache_size_ratio=0.5), memory) == 40 * GIB


@pytest.mark.parametrize(("weights_gib", "ratio"), [(51, 0.35), (10, 0.76), (86, 0.01)])
def test_weights_cache_and_reserve_must_fit_the_device(weights_gib: int, ratio: float) -> None:
    memory = DeviceMemory(total_bytes=100 * GIB, weights_bytes=weights_gib * GIB, available_bytes=100 * GIB)
    with pytest.raises(SettingsError, match=r"kv_cache_size_ratio=.* does not fit.*The largest that fits is"):
        cache_budget(Settings(kv_cache_size_ratio=ratio), memory)


def test_the_largest_ratio_that_a_refusal_names_is_accepted() -> None:
    memory = DeviceMemory(total_bytes=100 * GIB, weights_bytes=40 * GIB, available_bytes=100 * GIB)
    with pytest.raises(SettingsError) as refused:
        cache_budget(Settings(kv_cache_size_ratio=0.9), memory)
    named = float(str(refused.value).split("largest that fits is ")[1].split(";")[0])
    assert cache_budget(Settings(kv_cache_size_ratio=named), memory) == pytest.approx(45 * GIB, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "text", "limited"),
    [
        ("memory.max", "1048576\n", True),
        ("memory.max", "max\n", False),
        ("memory/memory.limit_in_bytes", "1048576\n", True),
        ("memory/memory.limit_in_bytes", "9223372036854771712\n", False),
    ],
)
def test_a_control_group_limits_what_the_machine_has(tmp_path: Path, name: str, text: str, limited: bool) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(text)
    physical = host_bytes(tmp_path / "nothing")
    assert physical > 1 << 28
    assert host_bytes(tmp_path) == (1048576 if limited else physical)


def test_an_engine_takes_its_share_of_what_the_weights_leave() -> None:
    model = build("llama")
    memory = DeviceMemory.of(model)
    assert memory.weights_bytes == sum(p.numel() * p.element_size() for p in (*model.parameters(), *model.buffers()))
    limit = engine(model, kv_cache_size_ratio=0.25).store.stats().bytes_limit
    assert 0.24 * memory.available_bytes < limit <= 0.25 * memory.available_bytes, "a part is kept for the write queue"


@contextmanager
def exhausted(model: Any, times: int) -> Iterator[None]:
    """Within the context, the first `times` forwards of the model's decoder find no memory."""
    left = iter(range(times))

    def fail(module: Any, args: Any) -> None:
        if next(left, None) is not None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    handle = model.base_model.register_forward_pre_hook(fail)
    try:
        yield
    finally:
        handle.remove()


def warmed() -> Any:
    kv = engine(build("llama"), cache_bytes=1 << 20)
    greedy(kv.generate, prompt("0123"), 1)
    return kv


def test_out_of_memory_shrinks_the_cache_and_tries_once_more() -> None:
    kv = warmed()
    before = kv.store.stats().bytes_used
    with exhausted(kv.model, 1):
        out = greedy(kv.generate, prompt("3120"))
    assert out.report.fallback is None
    assert kv.store.stats().bytes_limit <= before / 2
    assert kv.store.stats().bytes_used <= before / 2
    assert kv.store.stats().evictions["oom"] > 0
    assert relative_error(logits(out.output)[:1], plain_logits(kv.model, prompt("3120"), 1)) < 0.2


def test_out_of_memory_twice_goes_to_transformers_alone() -> None:
    kv = warmed()
    with exhausted(kv.model, 2):
        out = greedy(kv.generate, prompt("3120"))
    assert out.report.fallback == "out of memory"
    assert relative_error(logits(out.output), plain_logits(kv.model, prompt("3120"))) <= 1e-5
    assert greedy(kv.generate, prompt("0123"), 1).report.fallback is None, "the engine goes on"


def test_a_prompt_that_fits_nowhere_is_a_clear_error_and_the_engine_survives() -> None:
    kv = warmed()
    with (
        exhausted(kv.model, 3),
        pytest.raises(OutOfMemory, match=r"a prompt of \d+ tokens does not fit the memory of cpu"),
    ):
        greedy(kv.generate, prompt("3120"))
    out = greedy(kv.generate, prompt("3120"))
    assert out.report.fallback is None
    assert kv.store.stats().pinned_entries == 0


def test_out_of_memory_after_a_prefix_hit_is_answered_in_full() -> None:
    kv = warmed()
    with exhausted(kv.model, 1):  # an exact hit computes nothing before `generate`
        out = greedy(kv.generate, prompt("0123"))
    assert out.report.fallback == "out of memory"
    assert relative_error(logits(out.output), plain_logits(kv.model, prompt("0123"))) <= 1e-5


def test_an_empty_cache_that_is_no_reason_for_the_lack_of_memory_goes_on() -> None:
    kv = engine(build("llama"), cache_bytes=1 << 26)
    for _ in range(6):
        with exhausted(kv.model, 3), pytest.raises(OutOfMemory):
            greedy(kv.generate, prompt("3120"))
    assert kv.store.stats().bytes_limit > 1 << 20, "one prompt that is too long must not end caching for good"
    greedy(kv.generate, prompt("3120"))
    assert greedy(kv.generate, prompt("3120")).report.exact_tokens > 0
