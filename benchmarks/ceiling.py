"""How much a better choice of rows could gain: the same budget, spent by oracles that compare with a full prefill.

    python benchmarks/ceiling.py [--gemma] --out FILE [--first 20] [--limit 30] [--shard 0/2]
    python benchmarks/ceiling.py --report FILES

No strategy can know these scores, and none is charged for them; the chosen rows are recomputed as any strategy's are,
without the correction that `guided` has besides:

    deviation    how far the stored values of a row are from those of a full prefill, mean over the layers
    attended     that, times the attention of the question over the unrepaired cache, as `guided` sees it
    attributed   the share of the KL that the row's error makes: integrated gradients (Sundararajan et al. 2017) of
                 KL(full prefill || ours) along the straight line from the stored rows to the true ones
    read         how much the full prefill's answer depends on the row: the trace of its Fisher information, by labels
                 drawn from the model over the unrepaired cache; of errors it knows nothing
    drafted      the same for an answer that was drafted over the unrepaired cache: no knowledge, but 31 decode steps

They show what better choices reach, and are no upper bounds: rows are judged one by one, and recomputed over rows that
are not repaired. On `tune` cases, since they may give ideas. Options as of `bench repair`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import torch

import cells
import repair
from compare import Result, report
from fidelity import CONTINUATION, full_prefill
from kvboost import KVBoost
from kvboost.config import Settings
from kvboost.hf import compat
from kvboost.hf.assembly import Assembly
from kvboost.hf.signals import glance
from kvboost.repair import STRATEGIES
from kvboost.repair.guided import question
from kvboost.repair.selection import Selection, moved_positions, top
from kvboost.shadow import kl_divergence

ORACLES = ("deviation", "attended", "attributed", "read", "drafted")
SYSTEMS: Mapping[str, dict[str, Any]] = {
    **{name: repair.SYSTEMS[name] for name in ("none", "epic", "guided")},
    **{name: {"recompute_strategy": "guided", "gate": False} for name in ORACLES},
}
POINTS = (0.125, 0.375, 0.625, 0.875)  # of the line, by the midpoint rule
DRAWS = 2  # labels per token, for the Fisher information


class Oracle:
    """A strategy that knows the full prefill: its rows, its answer [1, 32] and its logits there, float32 [32, V]."""

    def __init__(self, kv: KVBoost, input_ids: torch.Tensor) -> None:
        self.name = ORACLES[0]
        self.answer, self.truth = full_prefill(kv, input_ids)
        cache = compat.DynamicCache()
        with torch.no_grad():
            compat.forward(kv.model, cache, input_ids=input_ids, logits_to_keep=1)
        self.keys, self.values = [la.keys for la in cache.layers], [la.values for la in cache.layers]

    def __call__(self, assembly: Assembly, settings: Settings) -> Selection:
        moved = moved_positions(assembly.plan)
        score = self.score(assembly, torch.from_numpy(moved).long())
        return Selection(top(moved, score, repair.BUDGET * len(moved)))

    def score(self, assembly: Assembly, moved: torch.Tensor) -> torch.Tensor:
        """What the oracle of this name knows of the moved rows, float32 [n]."""
        match self.name:
            case "deviation":
                return self.deviation(assembly, moved)
            case "attended":
                seen = glance(assembly, assembly.positions(question(assembly.plan)))
                return self.deviation(assembly, moved) * seen.mass[moved]
            case "attributed":
                return self.attribution(assembly, moved)
            case "read":
                return self.information(assembly, moved, self.answer[:, :-1])
            case "drafted":
                return self.information(assembly, moved, self.draft(assembly, moved))
            case _:
                raise ValueError(f"there is no oracle {self.name!r}; known: {', '.join(ORACLES)}")

    def deviation(self, assembly: Assembly, moved: torch.Tensor) -> torch.Tensor:
        """Squared distance of stored from true values over the mean squared length of true ones, float32 [n]."""
        _, stored = assembly.layout.per_layer(assembly.payload)
        total = torch.zeros(len(moved))
        for mine, true in zip(stored, self.values, strict=True):
            energy = true[:, :, moved].pow(2).sum((0, 1, 3)).mean()
            total += (true - mine)[:, :, moved].pow(2).sum((0, 1, 3)) / energy
        return total / len(stored)

    def rows(self, assembly: Assembly, moved: torch.Tensor, done: float) -> tuple[list[torch.Tensor], ...]:
        """Rows before the last segment, per layer keys and then values: stored (`done` 0) to true (1) where moved, true
        where FRESH, all asked for gradients; and the errors of the moved ones.
        """
        cut = assembly.plan.segments[-1].span.start
        keys, values = assembly.layout.per_layer(assembly.payload)
        true = [x[:, :, :cut] for x in (*self.keys, *self.values)]
        error = [t[:, :, moved] - x[:, :, moved] for t, x in zip(true, (*keys, *values), strict=True)]
        rows = [t.index_add(2, moved, e, alpha=done - 1) for t, e in zip(true, error, strict=True)]
        return [r.requires_grad_() for r in rows], error

    def attribution(self, assembly: Assembly, moved: torch.Tensor) -> torch.Tensor:
        """The part of the KL that each row's error makes, nat per token, float32 [n]."""
        part = torch.zeros(len(moved))
        for done in POINTS:
            rows, error = self.rows(assembly, moved, done)
            with torch.enable_grad():
                kl = kl_divergence(self.truth, logits(assembly, rows, self.answer[:, :-1])).mean()
                gradients = torch.autograd.grad(kl, rows)
            for gradient, e in zip(gradients, error, strict=True):
                part -= (gradient[:, :, moved] * e).sum((0, 1, 3)) / len(POINTS)
        return part

    def information(self, assembly: Assembly, moved: torch.Tensor, answer: torch.Tensor) -> torch.Tensor:
        """Squared length of the gradient of a drawn answer's likelihood, by row, float32 [n]."""
        rows, _ = self.rows(assembly, moved, 0.0)
        generator = torch.Generator().manual_seed(0)
        total = torch.zeros(len(moved))
        with torch.enable_grad():
            likely = logits(assembly, rows, answer).log_softmax(-1)
            labels = torch.multinomial(likely.detach().exp(), DRAWS, replacement=True, generator=generator)
            for drawn in labels.T:
                score = likely.gather(1, drawn[:, None]).sum()
                for gradient in torch.autograd.grad(score, rows, retain_graph=True):
                    total += gradient[:, :, moved].pow(2).sum((0, 1, 3)) / DRAWS
        return total

    def draft(self, assembly: Assembly, moved: torch.Tensor) -> torch.Tensor:
        """The greedy answer over the unrepaired rows, [1, 31]."""
        rows, _ = self.rows(assembly, moved, 0.0)
        cache, following = over(assembly, rows)
        ids = [following]
        with torch.no_grad():
            for _ in range(CONTINUATION - 1):
                out = compat.forward(assembly.model, cache, input_ids=ids[-1], logits_to_keep=1)
                ids.append(out.logits[0, -1].argmax()[None, None])
        return torch.cat(ids[1:], 1)


def over(assembly: Assembly, rows: list[torch.Tensor]) -> tuple[compat.DynamicCache, torch.Tensor]:
    """A cache of `rows`, as `Oracle.rows` gives them, and the ids of the prompt that follow, [1, n]."""
    half = len(rows) // 2
    return compat.make_dynamic_cache(rows[:half], rows[half:]), assembly.input_ids[:, rows[0].shape[2] :]


def logits(assembly: Assembly, rows: list[torch.Tensor], answer: torch.Tensor) -> torch.Tensor:
    """Logits of a teacher-forced answer behind `rows`, float32 [32, V]."""
    cache, following = over(assembly, rows)
    ids = torch.cat([following, answer], 1)
    found: torch.Tensor = compat.forward(assembly.model, cache, input_ids=ids, logits_to_keep=CONTINUATION).logits[0]
    return found


def measure(
    kv: KVBoost, reader: cells.Reader, case: cells.Case, systems: Mapping[str, Any], contexts: list[str]
) -> Iterator[Result]:
    """As `repair.measure`, with the oracles in place of `guided`."""
    oracle = Oracle(kv, reader.prompt(case))

    def switch(system: str) -> None:
        oracle.name = system
        STRATEGIES["guided"] = oracle if system in ORACLES else guided  # type: ignore[index]

    guided = STRATEGIES["guided"]
    with mock.patch.dict(STRATEGIES):
        yield from repair.measure(kv, reader, case, systems, contexts, before=switch)


def main() -> None:
    """Runs or reports, and ends with one JSON line."""
    parser = repair.make_parser(__doc__, SYSTEMS)
    parser.set_defaults(split="tune", first=20, limit=30)
    results = repair.results_of(parser.parse_args(), SYSTEMS, measure)
    print(json.dumps({"benchmark": "ceiling", "budget": repair.BUDGET, **report(results, ours="attributed")}))


if __name__ == "__main__":
    main()
