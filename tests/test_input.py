"""Wrong input: each a clear message that names what, the value and the remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from families import VOCABULARY, build
from kvboost import InputError, KVBoost, ModelError, SettingsError, enable
from kvboost.config import resolve, unknown_environment
from kvboost.hf import declared
from kvboost.hf.loading import load_model
from kvboost.stats import EngineStats
from scenario import engine


@pytest.fixture
def stories(shared_data: Path) -> Any:
    return load_model(shared_data / "models" / "stories260K-llama")


PROMPTS: list[tuple[Any, str]] = [
    ([], "the prompt is empty"),
    (torch.empty(1, 0, dtype=torch.long), "the prompt is empty"),
    ([5] * 600, "600 tokens, but the model takes fewer than 512"),
    ([5, VOCABULARY], f"token id {VOCABULARY} is outside of the model's vocabulary"),
    ([5, -1], "token id -1 is outside"),
    (12, "not int"),
    (["a", "b"], "not list of str"),
    (b"x", "not bytes$"),
    ([1, "a"], "not list of int and str"),
    (torch.ones(2, 5, dtype=torch.long), "a tensor prompt holds one sequence"),
    ("text", "need a tokenizer"),
    ([{"role": "user", "content": "x"}], "need a tokenizer"),
]


@pytest.mark.parametrize(("prompt", "message"), PROMPTS, ids=[m for _, m in PROMPTS])
def test_a_prompt_that_cannot_be_answered_is_refused_by_name(prompt: Any, message: str) -> None:
    kv = engine(build("llama"))
    with pytest.raises(InputError, match=message.replace("(", r"\(")):
        kv.generate(prompt)


def test_messages_without_a_chat_template_are_refused(stories: Any) -> None:
    with pytest.raises(InputError, match="no chat template"):
        KVBoost(*stories).generate([{"role": "user", "content": "x"}])


def test_an_empty_document_cannot_be_warmed(stories: Any) -> None:
    with pytest.raises(InputError, match="no text to warm"):
        KVBoost(*stories).warm(" \n")


def test_half_of_a_surrogate_pair_is_no_text(stories: Any) -> None:
    kv = KVBoost(*stories)
    for ask in (kv.generate, kv.warm):
        with pytest.raises(InputError, match="half of a surrogate pair"):
            ask("Once \ud800 upon")


@pytest.mark.parametrize("make", [KVBoost, enable])
def test_what_is_no_model_is_named(make: Any) -> None:
    for wrong in (None, "Qwen/Qwen2.5-3B"):
        with pytest.raises(ModelError, match=f"{wrong!r} is no model; .*from_pretrained"):
            make(wrong, None)


SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"recompute_strategy": "magic"}, "recompute_strategy .*'magic'.*'epic' or 'guided'"),
    ({"cache_bytes": -1}, "cache_bytes .*-1.*greater than or equal to 0"),
    ({"recompute_head_tokens": -5}, "recompute_head_tokens .*-5"),
    ({"chunk_min_tokens": 500}, "chunk sizes must satisfy"),
    ({"colour": "red"}, r"colour \(from flag\) is no setting\. Known settings: disable"),
    ({"fidelty": "fast"}, r"fidelty \(from flag\) is no setting; did you mean fidelity\?"),
    ({"mode": "sometimes"}, "mode .*'sometimes'"),
]


@pytest.mark.parametrize(("flags", "message"), SETTINGS, ids=[next(iter(f)) for f, _ in SETTINGS])
def test_an_invalid_setting_names_itself_its_value_and_what_is_allowed(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        engine(build("llama"), **flags)


def test_an_invalid_environment_value_names_the_variable() -> None:
    with pytest.raises(SettingsError, match=r"KVBOOST_RECOMPUTE_HEAD_TOKENS \(from environment\).*'many'"):
        resolve(environ={"KVBOOST_RECOMPUTE_HEAD_TOKENS": "many"})


def test_a_request_setting_beats_environment_beats_flag_beats_default() -> None:
    environ = {"KVBOOST_FIDELITY": "fast", "KVBOOST_RECOMPUTE_HEAD_TOKENS": "3"}
    resolved = resolve({"fidelity": "exact", "chunker": "fixed"}, {"fidelity": "balanced"}, environ)
    assert resolved.settings.fidelity == "balanced"
    assert resolved.settings.recompute_head_tokens == 3
    origins = {k: resolved.origins[k] for k in ("fidelity", "recompute_head_tokens", "chunker", "mode")}
    assert origins == {
        "fidelity": "request",
        "recompute_head_tokens": "environment",
        "chunker": "flag",
        "mode": "default",
    }


@pytest.mark.parametrize(
    ("flags", "request_", "environ"),
    [
        ({"disable": True}, {"disable": False}, {}),
        ({}, {"disable": True}, {"KVBOOST_DISABLE": "0"}),
        ({}, {"disable": False}, {"KVBOOST_DISABLE": "1"}),
    ],
)
def test_the_kill_switch_is_the_or_of_all_sources(flags: Any, request_: Any, environ: Any) -> None:
    assert not resolve(flags, request_, environ).settings.enabled


def test_a_directory_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"is not a model directory: it has no config\.json"):
        KVBoost.from_pretrained(tmp_path)


def test_a_damaged_model_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="cannot load a causal language model"):
        KVBoost.from_pretrained(tmp_path)


def test_a_tokenizer_of_another_model_is_refused(shared_data: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(shared_data / "models" / "qwen2_tokenizer")
    with pytest.raises(ModelError, match="do not belong together"):
        KVBoost(build("llama"), tokenizer)


class _Config:
    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"rope_type": "yarn", "factor": 4.0}, "'yarn' without original_max_position_embeddings"),
        ({"rope_type": "linear"}, "'linear' without factor"),
        ({"type": "spiral"}, "rope_type is 'spiral', which is none of default, linear"),
        ({"rope_type": "longrope", "short_factor": [1.0]}, "'longrope' without long_factor"),
    ],
)
def test_an_inconsistent_rotary_declaration_is_reported_by_field(parameters: Any, message: str) -> None:
    assert any(message in p for p in declared.problems(_Config(rope_scaling=parameters)))


def test_a_wrong_rotary_base_is_found_by_probing() -> None:
    from families import build_fresh

    model = build_fresh("llama")
    model.config.rope_theta = 50_000.0
    if hasattr(model.config, "rope_parameters"):
        model.config.rope_parameters = {"rope_type": "default", "rope_theta": 50_000.0}
    kv = engine(model)
    assert any("keys rotate with base 10000, but the config declares" in w for w in kv.support.warnings)


def test_the_kill_switch_acts_even_when_other_settings_are_invalid() -> None:
    environ = {"KVBOOST_DISABLE": "1", "KVBOOST_RECOMPUTE_STRATEGY": "magic"}
    assert not resolve({"cache_bytes": 10}, {}, environ).settings.enabled


def test_a_setting_that_is_read_once_cannot_be_changed_by_a_request() -> None:
    with pytest.raises(SettingsError, match="cache_bytes is read when the engine is made"):
        engine(build("llama")).generate([5] * 40, cache_bytes=1)


def test_yarn_whose_original_length_was_filled_in_is_reported() -> None:
    parameters = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    config = _Config(rope_scaling=parameters, max_position_embeddings=4096)
    assert "without original_max_position_embeddings" in declared.problems(config)[0]


def test_an_environment_variable_that_is_no_setting_is_named_with_the_likely_one() -> None:
    told = unknown_environment({"KVBOOST_FIDELTY": "exact", "KVBOOST_FIDELITY": "exact", "HOME": "/"})
    assert told == ["KVBOOST_FIDELTY is no setting; did you mean KVBOOST_FIDELITY?"]
    assert unknown_environment({"KVBOOST_NOSUCH": "1"}) == ["KVBOOST_NOSUCH is no setting"]


def test_messages_that_the_template_cannot_render_are_refused(smollm2_dir: Path) -> None:
    from transformers import AutoTokenizer

    from kvboost.prompts import render

    with pytest.raises(InputError, match="the chat template cannot render these messages"):
        render([{"content": "x"}], AutoTokenizer.from_pretrained(smollm2_dir))


def test_a_path_that_does_not_exist_is_called_so() -> None:
    with pytest.raises(ModelError, match="there is no directory '/no/such/model'"):
        load_model("/no/such/model")


def test_the_value_of_a_secret_setting_is_not_told() -> None:
    with pytest.raises(SettingsError, match="hash_secret") as raised:
        resolve({}, {"hash_secret": 12345678})
    assert "12345678" not in str(raised.value)


def test_reasons_that_quote_what_callers_sent_are_counted_together_beyond_a_number() -> None:
    stats = EngineStats()
    for number in range(1000):
        stats.count_fallback(f"setting fidelity has the invalid value 'f{number}'")
    assert len(stats.fallbacks) <= 65
    assert stats.fallbacks.total() == 1000
