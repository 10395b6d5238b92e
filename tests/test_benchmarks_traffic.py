"""The traffic of `kvboost bench buglocal` and `workloads` keeps its promises; their report is right in miniature."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import scenario
from families import build, random_ids
from ideal import RunIndex, common_prefix
from kvboost import KVBoost
from kvboost.hf import compat
from request import Request, Writer, episodes
from serving import FULL, PREFIX, SYSTEMS, Outcome, append, ask, follow, recorded, run
from serving_report import plot, report
from traffic import BUGLOCAL, SOURCES, WORKLOADS
from traffic_code import SYSTEM, code_rows, mentioned, pools

COUNT = 60
SHORT = 60  # tokens of an excerpt in the miniature


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    folder = Path(__file__).resolve().parents[2] / "shared" / "data" / "models" / "qwen2_tokenizer"
    if not folder.is_dir():
        pytest.skip("the data folder shared/data, beside the repository, is absent")
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def traffic(tokenizer: Any) -> dict[str, list[Request]]:
    return {name: source(tokenizer, COUNT) for name, source in SOURCES.items()}


@pytest.fixture(scope="module")
def kv(tokenizer: Any) -> KVBoost:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama",
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=None,
    )
    return KVBoost(AutoModelForCausalLM.from_config(config).eval(), tokenizer)


@pytest.fixture(scope="module")
def miniature(tokenizer: Any) -> list[Request]:
    return [r for source in BUGLOCAL.values() for r in source(tokenizer, 10, SHORT)]  # type: ignore[call-arg]


@pytest.fixture(scope="module")
def outcomes(kv: KVBoost, miniature: list[Request]) -> list[Outcome]:
    return run(kv, miniature, SYSTEMS, model="tiny")


def tokens(request: Request) -> Any:
    return request.ids[0].numpy().astype(np.int32)


def shared_with_earlier(episode: Sequence[Request]) -> list[float]:
    """Per request, the share of its tokens that any-position reuse of the earlier ones could find."""
    index, shares = RunIndex(), []
    for request in episode:
        shares.append(float(index.mask(tokens(request)).mean()))
        index.add(tokens(request))
    return shares


@pytest.mark.parametrize("name", SOURCES)
def test_a_source_gives_the_same_requests_again_and_a_shorter_run_is_a_beginning(
    name: str, tokenizer: Any, traffic: dict[str, list[Request]]
) -> None:
    again = SOURCES[name](tokenizer, 25)
    assert len(traffic[name]) == COUNT
    assert len(again) == 25
    for a, b in zip(again, traffic[name], strict=False):
        assert torch.equal(a.ids, b.ids)
        assert (a.name, a.warm, a.right, a.mentioned, a.expected) == (b.name, b.warm, b.right, b.mentioned, b.expected)
    assert len({r.name for r in traffic[name]}) == COUNT


@pytest.mark.parametrize("name", SOURCES)
def test_the_first_request_of_an_episode_is_cold_and_both_kinds_occur(
    name: str, traffic: dict[str, list[Request]]
) -> None:
    assert not any(episode[0].warm for episode in episodes(traffic[name]))
    assert {r.warm for r in traffic[name]} == {False, True}


@pytest.mark.parametrize(("name", "share"), [("pairs", 0.8), ("shifted", 0.75), ("lookup", 0.9), ("mdqa", 0.4)])
def test_warm_requests_share_their_text_with_earlier_ones(
    name: str, share: float, traffic: dict[str, list[Request]]
) -> None:
    for episode in episodes(traffic[name]):
        for request, found in zip(episode, shared_with_earlier(episode), strict=True):
            assert found >= share or not request.warm, request.name


def test_cold_requests_of_shifted_show_an_excerpt_for_the_first_time(traffic: dict[str, list[Request]]) -> None:
    for episode in episodes(traffic["shifted"]):
        for request, found in zip(episode, shared_with_earlier(episode), strict=True):
            assert found < 0.75 or request.warm, request.name


def test_pairs_share_their_prefix_and_shifted_none_beyond_the_system_prompt(
    tokenizer: Any, traffic: dict[str, list[Request]]
) -> None:
    system = Writer(tokenizer).system_tokens(SYSTEM)
    for episode in episodes(traffic["pairs"]):
        for request in episode[1:]:
            assert common_prefix(tokens(request), tokens(episode[0])) > 0.8 * request.ids.shape[1]
    for episode in episodes(traffic["shifted"]):
        for i, request in enumerate(episode):
            for other in episode[:i]:
                shared = common_prefix(tokens(request), tokens(other))
                assert system <= shared <= system + 3, "random ticket numbers may begin alike, but not for long"


@pytest.mark.parametrize("name", BUGLOCAL)
def test_bug_localization_prompts_have_the_length_that_is_told(name: str, traffic: dict[str, list[Request]]) -> None:
    assert all(1150 <= r.ids.shape[1] <= 1550 for r in traffic[name])


@pytest.mark.parametrize("name", BUGLOCAL)
def test_no_prompt_holds_the_fix_or_its_commit(
    name: str, tokenizer: Any, shared_data: Path, traffic: dict[str, list[Request]]
) -> None:
    prompts = [tokenizer.decode(r.ids[0]) for r in traffic[name]]
    for line in (shared_data / "buglocal.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        for prompt in prompts:
            assert row["commit"] not in prompt
            assert row["fix_diff"] not in prompt


def test_fields_that_give_the_answer_away_are_not_even_read() -> None:
    assert not {"fix_diff", "commit", "failing_test", "answer_lines", "answer_line_text"} & code_rows()[0].keys()
    assert not any(row["names_in_report"] for row in code_rows())


def test_the_right_option_is_the_function_that_the_report_is_about(
    tokenizer: Any, traffic: dict[str, list[Request]]
) -> None:
    by_report = {row["report"].strip()[:60]: row for row in code_rows()}
    checked = 0
    for request in traffic["pairs"] + traffic["shifted"]:
        text = tokenizer.decode(request.ids[0])
        asked = by_report.get(text.rpartition("\nReport: ")[2][:60].partition("\nCandidates: ")[0])
        if asked is None or asked["report"].strip()[:60] != text.rpartition("\nReport: ")[2][:60]:
            continue  # the report is shorter than what identifies it
        options = [tokenizer.decode(o[0]).strip() for o in request.options]
        assert sorted(options) == sorted(asked["choices"])
        assert options[request.right or 0] == asked["answer_function"]
        assert f"def {asked['answer_function'].rpartition('.')[2]}" in text
        checked += 1
    assert checked > 20


def test_every_choice_is_shown_to_who_must_choose(tokenizer: Any, traffic: dict[str, list[Request]]) -> None:
    for request in traffic["pairs"]:
        text = tokenizer.decode(request.ids[0])
        for option in request.options:
            assert f"def {tokenizer.decode(option[0]).strip().rpartition('.')[2]}" in text, request.name


def test_the_thousand_requests_of_both_traffics_ask_many_reports(tokenizer: Any) -> None:
    asked = {
        name: [tokenizer.decode(r.ids[0]).rpartition("\nReport: ")[2] for r in source(tokenizer, 500)]
        for name, source in BUGLOCAL.items()
    }
    assert len(set(asked["pairs"])) > 490
    assert len(set(asked["shifted"])) >= 250
    assert len(set(asked["pairs"]) & set(asked["shifted"])) < 5  # some reports are a word or two


def test_mentioned_options_are_those_whose_own_name_the_report_uses() -> None:
    row = {"choices": ["A.run", "A.stop", "B.walk", "go"], "report": "stop must not walk"}
    assert mentioned(row) == (1, 2)


def test_no_report_is_in_two_pools() -> None:
    dealt = [row["id"] for pool in pools(code_rows()) for row in pool]
    assert len(dealt) == len(set(dealt))


@pytest.mark.parametrize("name", ["logs", "lookup"])
def test_expected_answers_are_the_right_option_and_stand_in_the_prompt(
    name: str, tokenizer: Any, traffic: dict[str, list[Request]]
) -> None:
    for request in traffic[name]:
        right = tokenizer.decode(request.options[request.right or 0][0]).strip()
        assert right == request.expected[0].strip()
        assert right in tokenizer.decode(request.ids[0])


def test_look_up_prompts_fit_the_small_models(traffic: dict[str, list[Request]]) -> None:
    assert max(r.ids.shape[1] for r in traffic["lookup"]) <= 1500


# --- running ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma3"])  # gemma3: transformers' own cache forgets what leaves a window
@pytest.mark.parametrize("settings", [{"disable": True}, {}])
def test_options_in_one_batch_score_as_each_alone(family: str, settings: dict[str, Any]) -> None:
    engine, ids = scenario.engine(build(family)), random_ids(200, seed=3)
    answers = [random_ids(size, seed=size) for size in (1, 4, 7)]
    out = engine.generate(
        ids, max_new_tokens=1, do_sample=False, output_logits=True, return_dict_in_generate=True, **settings
    )
    first = out.output.logits[0][0].double().log_softmax(-1)
    batch = follow(engine, first, out.output[compat.CACHE_ARGUMENT], [a[0].tolist() for a in answers])
    for answer, (scores, greedy) in zip(answers, batch, strict=True):
        logits, _ = engine.score(ids, answer, disable=True)
        alone = logits.log_softmax(-1).gather(1, answer[0][:, None])[:, 0]
        torch.testing.assert_close(scores, alone, rtol=1e-4, atol=1e-4)
        assert greedy == bool((logits.argmax(-1) == answer[0]).all())


def test_an_expected_text_is_matched_if_greedy_decoding_gives_it(kv: KVBoost, miniature: list[Request]) -> None:
    out = kv.generate(miniature[0].ids, max_new_tokens=3, do_sample=False, disable=True)
    if Writer(kv.tokenizer).encode(out.text)[0].tolist() != out.token_ids:
        pytest.fail("the model's own answer must survive tokenizing; choose another seed")
    request = replace(miniature[0], expected=("something else", out.text))
    assert ask(kv, request, "x", SYSTEMS[FULL]).matched is True
    assert ask(kv, replace(request, expected=("else",)), "x", SYSTEMS[FULL]).matched is False


def test_the_report_on_twenty_requests(outcomes: list[Outcome], capsys: pytest.CaptureFixture[str]) -> None:
    assert len(outcomes) == 20 * len(SYSTEMS)
    figures = report(outcomes, "buglocal")
    json.dumps(figures)
    assert "pairs" in capsys.readouterr().err
    everything = figures["all"]["all"]
    assert everything[FULL]["agreement"] == 1.0
    assert everything[FULL]["over_full"] == pytest.approx(1)
    assert everything[FULL]["fresh"] == 1.0
    assert everything[PREFIX]["kl"]["worst"] < 1e-5
    assert everything[PREFIX]["agreement"] == 1.0
    assert everything[PREFIX]["mcnemar_p"] == 1.0
    assert everything[PREFIX]["moved"] == 0
    assert figures["all"]["traffic"]["chance"] == 0.25
    for figure in everything.values():
        assert figure["exact"] + figure["continued"] + figure["moved"] + figure["fresh"] == pytest.approx(1, abs=1e-3)
        assert sum(figure["reuse_histogram"]) == 20


def test_warm_pairs_are_served_and_cold_ones_computed(outcomes: list[Outcome]) -> None:
    for r in outcomes:
        if r.source == "pairs" and r.system != FULL:
            found = r.ideal_prefix_tokens / r.prompt_tokens
            assert r.reused_share >= 0.9 * found if r.warm else r.reused_share == 0, r.request


def test_shifted_requests_are_reused_by_moving_only(outcomes: list[Outcome]) -> None:
    warm = [r for r in outcomes if r.source == "shifted" and r.warm]
    assert warm
    assert sum(r.moved_tokens for r in warm if r.system == "none") > 0
    for r in warm:
        reused = r.prompt_tokens - r.fresh_tokens
        assert reused <= (r.ideal_prefix_tokens if r.system == PREFIX else r.ideal_tokens), (r.request, r.system)
        assert r.ideal_prefix_tokens < 0.5 * r.prompt_tokens


def test_full_length_warm_pairs_reuse_four_fifths(kv: KVBoost, traffic: dict[str, list[Request]]) -> None:
    found = run(kv, traffic["pairs"][:3], {s: SYSTEMS[s] for s in (FULL, PREFIX, "guided, balanced")})
    assert [r.reused_share > 0.8 for r in found if r.system != FULL] == [False, False, True, True, True, True]


def test_systems_do_not_see_one_anothers_rows(kv: KVBoost, miniature: list[Request]) -> None:
    both = run(kv, miniature[:1], {s: SYSTEMS[s] for s in (FULL, PREFIX, "none", "epic")})
    assert [r.reused_share for r in both] == [0, 0, 0, 0]


def test_a_run_that_was_stopped_goes_on_and_shards_make_up_the_whole(
    kv: KVBoost, miniature: list[Request], tmp_path: Path
) -> None:
    systems = {s: SYSTEMS[s] for s in (FULL, "none")}
    requests, out = miniature[:9], tmp_path / "results.jsonl"
    whole = run(kv, requests, systems, out)
    stopped = tmp_path / "stopped.jsonl"
    append(stopped, whole[:7])  # in the middle of an episode, of a request even
    run(kv, requests, systems, stopped)
    parts = [run(kv, requests, systems, shard=(i, 2)) for i in range(2)]

    def what(results: Sequence[Outcome]) -> set[tuple[Any, ...]]:
        return {(r.request, r.system, r.exact_tokens, r.moved_tokens, r.fresh_tokens, r.choice) for r in results}

    assert recorded(stopped)[:7] == recorded(out)[:7]
    assert len(recorded(stopped)) == len(whole) == 18
    assert what(recorded(stopped)) == what(recorded(out)) == what(parts[0]) | what(parts[1])
    assert run(kv, requests, systems, out) == recorded(out)


def test_agreement_of_another_dtype_is_told_beside_the_first(outcomes: list[Outcome]) -> None:
    full = [r for r in outcomes if r.system == FULL]
    other = [replace(r, dtype="bfloat16", choice=(r.choice or 0) + (i < 5)) for i, r in enumerate(full)]
    figures = report([*full, *other], "buglocal")["all"]["all"]
    assert figures[f"{FULL}, bfloat16"]["agreement"] == 0.75


def test_results_of_two_models_are_not_mixed(outcomes: list[Outcome]) -> None:
    with pytest.raises(SystemExit, match="one model"):
        report([*outcomes, replace(outcomes[0], model="other")], "buglocal")


def test_the_plot_is_written_in_both_formats(outcomes: list[Outcome], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot(outcomes, tmp_path / "buglocal")
    assert (tmp_path / "buglocal.svg").stat().st_size > 1000
    assert (tmp_path / "buglocal.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_other_source_runs_too(name: str, kv: KVBoost, traffic: dict[str, list[Request]]) -> None:
    found = run(kv, traffic[name][:2], {s: SYSTEMS[s] for s in (FULL, PREFIX)}, model="tiny")
    figures = report(found, "workloads")[name]
    assert figures["all"][PREFIX]["kl"]["worst"] < 1e-5
    assert ("exact_match" in figures["all"][FULL]) == (name in ("mdqa", "logs", "lookup"))
    assert ("accuracy" in figures["all"][FULL]) == (name in ("logs", "lookup"))
