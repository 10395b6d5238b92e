"""Settings that change under the load of `load`: how soon a change acts, and whether a later answer contradicts it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from load_clients import Result
from load_server import KVBoostServer, state

WANTED_S = 1.0  # in which a change must act
GIVEN_UP_S = 20.0
STEP_S = 0.01

Told = Callable[[Mapping[str, Any]], bool]


def _switched_off(usage: Mapping[str, Any]) -> bool:
    return bool(usage["fallback"] == "switched off")


def _switched_on(usage: Mapping[str, Any]) -> bool:
    return not _switched_off(usage)


def _by(strategy: str) -> Told:
    return lambda usage: usage["strategy"] in (None, strategy) and _switched_on(usage)


@dataclass(frozen=True)
class Change:
    """At `at` of the run the settings file becomes `lines`. `acts` reads metrics and settings, `shown` an answer."""

    at: float
    name: str
    lines: tuple[str, ...]
    acts: Told
    shown: Told


CHANGES = (
    Change(0.15, "kill switch on", ("KVBOOST_DISABLE=1",), lambda s: s["kvboost_disabled"] == 1, _switched_off),
    Change(0.3, "kill switch off", (), lambda s: s["kvboost_disabled"] == 0, _switched_on),
    Change(
        0.45,
        "strategy",
        ("KVBOOST_RECOMPUTE_STRATEGY=epic",),
        lambda s: s["recompute_strategy"] == "epic",
        _by("epic"),
    ),
    Change(
        0.6,
        "budget of repair",
        ("KVBOOST_RECOMPUTE_RATIO=0.4",),
        lambda s: s["kvboost_configured_recompute_ratio"] == 0.4,
        _by("guided"),
    ),
    Change(
        0.75,
        "a bad file, refused",
        ("KVBOOST_RECOMPUTE_RATIO=7",),
        lambda s: s["kvboost_settings_rejected_total"] == 1 and s["kvboost_configured_recompute_ratio"] == 0.4,
        _by("guided"),
    ),
    Change(0.85, "defaults", (), lambda s: s["kvboost_configured_recompute_ratio"] == 0.15, _by("guided")),
)


@dataclass(frozen=True)
class Made:
    """A change that was made `at_s` (`time.monotonic`), and after how long it acted; None: it did not."""

    change: Change
    at_s: float
    effect_s: float | None


async def make_changes(
    server: KVBoostServer, progress: Callable[[], float], changes: Sequence[Change] = CHANGES
) -> list[Made]:
    """Makes every change when its share of the run is reached, and looks until it acts."""
    made = []
    async with server.admin() as admin:
        for change in changes:
            while progress() < change.at:
                await asyncio.sleep(STEP_S)
            server.change(change.lines)
            at_s = time.monotonic()
            while not (acts := change.acts(await state(admin))) and time.monotonic() - at_s < GIVEN_UP_S:
                await asyncio.sleep(STEP_S)
            made.append(Made(change, at_s, time.monotonic() - at_s if acts else None))
    return made


def judged(made: Sequence[Made], results: Sequence[Result]) -> list[dict[str, Any]]:
    """Per change: the time to its effect, and of the answers that began a second later, how many contradict it.

    Answers that ended after the next change are left out: they may have waited for their turn until then.
    """
    told = []
    ends = [m.at_s for m in made[1:]] + [float("inf")]
    for m, end_s in zip(made, ends, strict=True):
        later = [r for r in results if r.usage and r.began_s >= m.at_s + WANTED_S and r.ended_s <= end_s]
        against = sum(not m.change.shown(r.usage["kvboost"]) for r in later)
        told.append(
            {"change": m.change.name, "effect_s": m.effect_s, "answers_after": len(later), "contradicting": against}
        )
    return told
