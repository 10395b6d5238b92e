"""Rotations: found from measured keys, and undone and redone without loss."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost.rotary import RotarySpec, Style, fit_rotation, shift

POSITIONS = (0, 1, 7, 50, 350, 2400)


def frequencies(rotated: int, base: float) -> torch.Tensor:
    return (1.0 / base ** (torch.arange(0, rotated, 2).double() / rotated)).float()


def keys_at(base: torch.Tensor, positions: torch.Tensor, spec: RotarySpec) -> torch.Tensor:
    """`base` [H, n, D] holds unrotated keys; rotates row i to `positions[i]`."""
    out = torch.empty_like(base)
    shift(base, torch.zeros_like(positions), positions, spec, out)
    return out


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["half", "interleaved"]),
    st.sampled_from([(16, 0, 16), (16, 0, 8), (24, 8, 16), (64, 0, 64)]),
    st.sampled_from([1e3, 1e4, 1e6]),
    st.integers(0, 4000),
    st.integers(0, 4000),
)
def test_a_shift_equals_computing_at_the_new_position(
    style: Style, shape: tuple[int, int, int], base: float, old: int, new: int
) -> None:
    dim, start, rotated = shape
    spec = RotarySpec(style, frequencies(rotated, base), start)
    x = torch.randn(2, 5, dim, generator=torch.Generator().manual_seed(old * 7 + new))
    steps = torch.arange(5)
    before, after = (keys_at(x, steps + p, spec) for p in (old, new))
    moved = torch.empty_like(before)
    shift(before, steps + old, steps + new, spec, moved)
    assert (moved - after).abs().max() <= 3e-6 * x.abs().max()
    untouched = [d for d in range(dim) if not start <= d < start + rotated]
    assert torch.equal(moved[..., untouched], x[..., untouched])


def test_zero_shift_means_no_arithmetic() -> None:
    x = torch.randn(2, 9, 16).to(torch.bfloat16)
    out = torch.empty_like(x)
    shift(x, torch.arange(9), torch.arange(9), RotarySpec("half", frequencies(16, 1e4)), out)
    assert torch.equal(out, x)


def test_layers_with_their_own_frequencies_are_shifted_each_with_its_own() -> None:
    table = torch.stack([frequencies(16, 1e4), frequencies(16, 1e6), torch.zeros(8)])
    x = torch.randn(3, 2, 5, 16)
    old, new = torch.arange(5) + 3, torch.arange(5) + 1000
    out = torch.empty_like(x)
    shift(x, old, new, RotarySpec("half", table), out)
    for i in range(3):
        alone = torch.empty_like(x[i])
        shift(x[i], old, new, RotarySpec("half", table[i]), alone)
        assert torch.equal(out[i], alone)
    assert torch.equal(out[2], x[2])


@pytest.mark.parametrize("style", ["half", "interleaved"])
@pytest.mark.parametrize("shape", [(64, 0, 64), (64, 0, 16), (48, 32, 16)])
@pytest.mark.parametrize("known", [True, False], ids=["known frequencies", "unknown frequencies"])
def test_a_rotation_is_found_from_measured_keys(style: Style, shape: tuple[int, int, int], known: bool) -> None:
    dim, start, rotated = shape
    truth = RotarySpec(style, frequencies(rotated, 1e5), start)
    x = torch.randn(12, dim)
    measured = torch.stack([keys_at(x[None], torch.full((12,), p), truth)[0] for p in POSITIONS])
    candidates = [frequencies(rotated, 1e4), truth.inv_freq] if known else [frequencies(rotated, 1e4)]
    fit = fit_rotation(measured, POSITIONS, candidates, 1e-4)
    assert fit is not None
    assert (fit.spec.style, fit.spec.start) == (style, start)
    assert torch.allclose(fit.spec.inv_freq, truth.inv_freq, rtol=0 if known else 1e-3, atol=0 if known else 1e-8)


def test_keys_that_do_not_rotate_are_told_from_keys_that_no_rotation_explains() -> None:
    x = torch.randn(12, 32)
    still = fit_rotation(x.expand(6, 12, 32), POSITIONS, [], 1e-4)
    assert still is not None
    assert still.spec.style == "none"
    assert fit_rotation(torch.randn(6, 12, 32), POSITIONS, [frequencies(32, 1e4)], 1e-4) is None
