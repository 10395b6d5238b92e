"""`kvboost verify`: your own prompts, answered over the cache and in full, and how far apart the two are."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvboost.cli.console import make_table, out, print_json, step
from kvboost.cli.generate import FidelityOption, greedy
from kvboost.cli.models import DTypeOption, ModelOption, open_engine
from kvboost.errors import InputError

if TYPE_CHECKING:
    import torch

    from kvboost.engine import KVBoost

BEYOND = 1  # exit code when the tail is above the bound


@dataclass(frozen=True, slots=True)
class Verdict:
    """One prompt: what was reused, how far off its answer is, and what the gate had said."""

    prompt: int
    tokens: int
    exact: int
    continued: int
    moved: int
    repaired: int  # of the moved ones
    fresh: int
    kl: float  # mean over the continuation, nat
    agreement: float  # share of equal top tokens
    risk: float | None
    escalations: int
    fallback: str | None


def run(
    prompts: Annotated[Path, typer.Argument(help="Prompts: a JSON document per line (text, or chat messages).")],
    model: ModelOption = None,
    dtype: DTypeOption = "auto",
    fidelity: FidelityOption = None,
    continuation_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Tokens that are compared.")] = 16,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Answer prompts over the cache and by a full prefill, in the order of the file, and compare.

    Each line is a JSON string, a list of chat messages, or an object with `prompt` or `messages`. The earlier prompts
    fill the cache for the later ones. The continuation is the full prefill's own. Exit code 1 if the p95 of the KL is
    above the bound of the fidelity in force.
    """
    asked = list(read_prompts(prompts))
    kv = open_engine(model, dtype)
    settings = {} if fidelity is None else {"fidelity": fidelity}
    verdicts = []
    with step("comparing") as tell:
        for number, prompt in enumerate(asked, 1):
            tell(f"prompt {number} of {len(asked)}")
            try:
                verdicts.append(verify(kv, prompt, number, continuation_tokens, settings))
            except InputError as error:
                raise InputError(f"prompt {number} of {str(prompts)!r}: {error}") from None
    kl_bound = bound_of(kv, settings)
    tail = quantile([v.kl for v in verdicts], 0.95)
    show(verdicts, tail, kl_bound, as_json=as_json)
    if tail > kl_bound:
        raise typer.Exit(BEYOND)


def read_prompts(path: Path) -> Iterator[Any]:
    """The prompts of a file. Raises `InputError` that names file and line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {str(path)!r}: {error}") from None
    found = [(i, line) for i, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise InputError(f"{str(path)!r} holds no prompt; write one JSON string or list of messages per line")
    for number, line in found:
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            raise InputError(f"line {number} of {str(path)!r} is not JSON: {error}") from None
        if isinstance(value, dict):
            value = value.get("prompt", value.get("messages"))
        if not isinstance(value, (str, list)) or not value:
            raise InputError(f"line {number} of {str(path)!r} is neither a text, a list of messages, nor holds one")
        yield value


def verify(kv: KVBoost, prompt: Any, number: int, continuation_tokens: int, settings: dict[str, Any]) -> Verdict:
    """Compares one prompt, and then serves it, so that the next ones can reuse it."""
    import torch

    from kvboost.prompts import encode

    input_ids = encode(prompt, kv.tokenizer, kv.model)
    plain = {**greedy(kv, continuation_tokens), "min_new_tokens": continuation_tokens, "disable": True}
    full = kv.generate(input_ids, **plain, output_logits=True, return_dict_in_generate=True)
    answer, truth = input_ids.new_tensor([full.token_ids]), torch.cat(full.output.logits).float()
    try:
        ours, report = kv.score(input_ids, answer, **settings)
    except InputError:  # a prompt that is left to transformers is its own truth
        ours, report = truth, None
    served = kv.generate(input_ids, **greedy(kv, 1), **settings).report
    report = report or served
    kl, agreement = distance(truth, ours)
    return Verdict(
        number,
        report.prompt_tokens,
        report.exact_tokens,
        report.continued_tokens,
        report.moved_tokens,
        report.repaired_tokens,
        report.fresh_tokens,
        kl,
        agreement,
        report.risk,
        report.escalations,
        report.fallback,
    )


def distance(truth: torch.Tensor, ours: torch.Tensor) -> tuple[float, float]:
    """Mean KL(truth || ours) in nat and share of equal top tokens, from logits [m, V]."""
    from kvboost.shadow import kl_divergence

    same = (truth.argmax(-1) == ours.argmax(-1)).float().mean().item()
    return max(0.0, kl_divergence(truth, ours).mean().item()), same


def bound_of(kv: KVBoost, settings: dict[str, Any]) -> float:
    """The KL that the settings promise; for `exact` what rounding may do."""
    from kvboost.repair.gate import bound

    effective = kv.settings(**settings)
    return 1e-3 if effective.exact_only else bound(effective)


def quantile(values: list[float], share: float) -> float:
    """The value that stands at `share` of the ordered ones; of few values the worst."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def show(verdicts: list[Verdict], tail: float, kl_bound: float, *, as_json: bool) -> None:
    """A line per prompt on stdout, then mean, p95 and worst KL beside the bound."""
    mean = statistics.mean(v.kl for v in verdicts)
    worst = max(v.kl for v in verdicts)
    agreement = statistics.mean(v.agreement for v in verdicts)
    if as_json:
        summary = {"kl_mean": mean, "kl_p95": tail, "kl_worst": worst, "bound": kl_bound, "agreement": agreement}
        print_json({**summary, "prompts": [asdict(v) for v in verdicts]})
        return
    counted = ("tokens", "exact", "continued", "moved", "repaired", "fresh")
    table = make_table("prompt", *counted, "KL", "agrees", "risk", numbers=range(10))
    for v in verdicts:
        counts = [f"{getattr(v, name):,}" for name in counted]
        risk = "" if v.risk is None else f"{v.risk:.3f}"
        table.add_row(str(v.prompt), *counts, f"{v.kl:.4f}", f"{v.agreement:.0%}", risk)
    out.print(table)
    within = "within" if tail <= kl_bound else "ABOVE"
    out.print(
        f"KL mean {mean:.4f}, p95 {tail:.4f}, worst {worst:.4f} nat: the p95 is {within} the bound of {kl_bound:g}; "
        f"top tokens agree on {agreement:.1%}",
        highlight=False,
        soft_wrap=True,
    )
