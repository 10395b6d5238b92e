"""`enable` and `disable`: plain `model.generate` over the cache, with every feature that transformers offers."""

from __future__ import annotations

import copy
import os
import pickle
import re
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, TextIteratorStreamer
from transformers.generation.streamers import BaseStreamer

import kvboost
from families import build_fresh, random_ids
from kvboost import KVBoost
from kvboost.hf import compat
from scenario import SMALL, greedy, join, logits, plain_logits, prompt, relative_error

pytestmark = pytest.mark.smoke


@pytest.fixture
def model() -> Any:
    return build_fresh("llama")


@pytest.fixture
def engine(model: Any) -> KVBoost:
    return kvboost.enable(model, **SMALL)


def test_disable_restores_the_very_objects(model: Any) -> None:
    before = dict(vars(model))
    bound = model.generate
    kvboost.enable(model)
    assert set(vars(model)) - set(before) == {"generate"}
    kvboost.disable(model)
    assert vars(model) == before
    assert model.generate == bound
    kvboost.disable(model)


def test_disable_restores_a_generate_of_the_callers_own(model: Any) -> None:
    own = lambda *args, **kwargs: "mine"  # noqa: E731
    model.generate = own
    kvboost.enable(model)
    kvboost.disable(model)
    assert model.generate is own


def test_enabling_twice_keeps_one_engine(model: Any, engine: KVBoost) -> None:
    assert kvboost.enable(model) is engine
    kvboost.disable(model)
    assert "generate" not in vars(model)


def test_plain_generate_uses_the_cache_and_answers_the_same(model: Any, engine: KVBoost) -> None:
    truth = greedy(lambda *a, **k: type(model).generate(model, *a, **k), prompt())
    for _ in range(3):
        out = greedy(model.generate, prompt())
        assert torch.equal(out.sequences, truth.sequences)
        assert relative_error(logits(out), logits(truth)) <= 1e-5
    assert engine.stats.tokens["exact"] == 2 * (prompt().shape[1] - 1)


def test_sampling_with_a_seed_draws_the_same_tokens(model: Any, engine: KVBoost) -> None:
    def draw() -> torch.Tensor:
        torch.manual_seed(5)
        return model.generate(prompt(), do_sample=True, top_p=0.9, temperature=1.3, max_new_tokens=12)

    first, second = draw(), draw()
    kvboost.disable(model)
    assert torch.equal(first, draw())
    assert torch.equal(second, draw())
    assert engine.stats.tokens["exact"] > 0


class _Recorder(BaseStreamer):
    def __init__(self) -> None:
        self.seen: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.seen += value.reshape(-1).tolist()

    def end(self) -> None:
        pass


class _Ban(LogitsProcessor):
    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        scores[:, self.token] = -torch.inf
        return scores


def test_streamers_and_logits_processors_work(model: Any, engine: KVBoost) -> None:
    model.generate(prompt(), max_new_tokens=1)
    plain = greedy(model.generate, prompt(), 5)
    banned = int(plain.sequences[0, prompt().shape[1]])
    recorder = _Recorder()
    out = model.generate(
        prompt(),
        max_new_tokens=5,
        do_sample=False,
        streamer=recorder,
        logits_processor=LogitsProcessorList([_Ban(banned)]),
    )
    assert recorder.seen == out[0].tolist()
    assert banned not in out[0, prompt().shape[1] :].tolist()
    assert engine.stats.tokens["exact"] >= prompt().shape[1] - 1


def test_the_kill_switch_acts_at_call_time_and_back(
    model: Any, engine: KVBoost, monkeypatch: pytest.MonkeyPatch
) -> None:
    greedy(model.generate, prompt())
    monkeypatch.setenv("KVBOOST_DISABLE", "1")
    for off in (greedy(model.generate, prompt()), greedy(engine.generate, prompt()).output):
        assert relative_error(logits(off), plain_logits(model, prompt())) == 0
    assert engine.stats.fallbacks["switched off"] >= 2
    exact = engine.stats.tokens["exact"]
    monkeypatch.delenv("KVBOOST_DISABLE")
    greedy(model.generate, prompt())
    assert engine.stats.tokens["exact"] > exact


def _padded(ids: torch.Tensor) -> dict[str, Any]:
    mask = torch.ones_like(ids)
    mask[:, :3] = 0
    return {"inputs": ids, "attention_mask": mask}


UNSERVED: dict[str, Any] = {
    "beam search": lambda m: {"inputs": prompt(), "num_beams": 2},
    "several sequences per prompt": lambda m: {"inputs": prompt(), "num_return_sequences": 2, "do_sample": True},
    "batch size is not 1": lambda m: {"inputs": prompt().repeat(2, 1)},
    "the prompt is padded": lambda m: _padded(prompt()),
    "use_cache is False": lambda m: {"inputs": prompt(), "use_cache": False},
    "another cache implementation": lambda m: {"inputs": prompt(), "cache_implementation": "static"},
    "assisted decoding": lambda m: {"inputs": prompt(), "prompt_lookup_num_tokens": 3},
    "hidden states of all prompt rows": lambda m: {
        "inputs": prompt(),
        "output_hidden_states": True,
        "return_dict_in_generate": True,
    },
    "the prompt is not a tensor of token ids": lambda m: {"inputs_embeds": m.get_input_embeddings()(prompt())},
    "argument 'position_ids' is not understood by the cache": lambda m: {
        "inputs": prompt(),
        "position_ids": torch.arange(prompt().shape[1])[None],
    },
    "the prompt has fewer than two tokens": lambda m: {"inputs": random_ids(1)},
}


@pytest.mark.parametrize("reason", UNSERVED)
def test_what_the_cache_cannot_serve_goes_to_transformers_unchanged(
    reason: str, model: Any, engine: KVBoost, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("WARNING", logger="kvboost")  # the command line may have silenced it in this process
    call = UNSERVED[reason]

    def run() -> Any:
        torch.manual_seed(0)
        out = model.generate(max_new_tokens=3, **call(model))
        return out if isinstance(out, torch.Tensor) else out.sequences

    for _ in range(2):
        ours = run()
    assert engine.stats.fallbacks == {reason: 2}
    lines = [r for r in caplog.records if r.name == "kvboost" and r.levelname == "WARNING" and reason in r.getMessage()]
    assert len(lines) == 1
    kvboost.disable(model)
    assert torch.equal(ours, run())


def test_a_prompt_with_pad_tokens_and_no_mask_is_padded_as_transformers_sees_it(model: Any, engine: KVBoost) -> None:
    model.generation_config.pad_token_id = 50
    ids = prompt()
    ids[0, 45] = 50
    for _ in range(2):
        ours = greedy(model.generate, ids)
    assert engine.stats.fallbacks["the prompt is padded"] == 2
    kvboost.disable(model)
    assert torch.equal(logits(ours), logits(greedy(model.generate, ids)))


@pytest.mark.parametrize("options", [{"use_cache": False}, {"num_beams": 2}, {"num_return_sequences": 2}])
def test_options_of_the_models_own_generation_config_count_beside_a_given_one(
    options: dict[str, Any], model: Any, engine: KVBoost
) -> None:
    for name, value in options.items():
        setattr(model.generation_config, name, value)
    given = GenerationConfig(max_new_tokens=2, do_sample="num_return_sequences" in options)
    for _ in range(2):
        model.generate(prompt(), generation_config=given)
    assert sum(engine.stats.fallbacks.values()) == 2


def test_an_explicit_none_overrides_the_config(model: Any, engine: KVBoost) -> None:
    stop = int(greedy(model.generate, prompt(), 2).sequences[0, -1])
    model.generation_config.eos_token_id = stop
    out = model.generate(prompt(), max_new_tokens=6, do_sample=False, eos_token_id=None)
    kvboost.disable(model)
    assert torch.equal(out, model.generate(prompt(), max_new_tokens=6, do_sample=False, eos_token_id=None))


def test_a_copy_of_an_enabled_model_is_its_own(model: Any, engine: KVBoost) -> None:
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.model.layers[0].self_attn.k_proj.weight.mul_(2.0)
    ours = greedy(twin.generate, prompt())
    assert torch.equal(logits(ours), plain_logits(twin, prompt()))
    restored = pickle.loads(pickle.dumps(model))
    assert torch.equal(
        restored.generate(prompt(), max_new_tokens=2), type(model).generate(model, prompt(), max_new_tokens=2)
    )


def test_a_generate_that_the_model_already_had_is_still_called(model: Any) -> None:
    calls = []

    def own(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return type(model).generate(model, *args, **kwargs)

    model.generate = own
    kvboost.enable(model, **SMALL)
    greedy(model.generate, prompt())
    assert calls == [1]


def test_an_invalid_environment_never_fails_a_call_of_an_enabled_model(
    model: Any, engine: KVBoost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVBOOST_RECOMPUTE_STRATEGY", "magic")
    out = greedy(model.generate, prompt())
    assert relative_error(logits(out), plain_logits_of(model)) == 0
    assert any("KVBOOST_RECOMPUTE_STRATEGY" in reason for reason in engine.stats.fallbacks)


def plain_logits_of(model: Any) -> torch.Tensor:
    return logits(greedy(lambda *a, **k: type(model).generate(model, *a, **k), prompt()))


def test_autocast_is_not_mixed_with_what_was_computed_without_it(model: Any, engine: KVBoost) -> None:
    greedy(model.generate, prompt())
    with torch.autocast("cpu", torch.bfloat16):
        greedy(model.generate, prompt())
    assert engine.stats.fallbacks["autocast is on"] == 1


def test_a_callers_own_cache_and_train_mode_pass_through(model: Any, engine: KVBoost) -> None:
    from kvboost.hf import probe

    cache = probe.run(model, prompt()[:, :-1])
    greedy(model.generate, prompt(), **{compat.CACHE_ARGUMENT: cache})
    assert engine.stats.fallbacks["the caller brings a cache"] == 1
    model.train()
    greedy(model.generate, prompt())
    assert engine.stats.fallbacks["the model is in train mode"] == 1


def test_an_abandoned_stream_holds_no_lock(model: Any, engine: KVBoost) -> None:
    class Abandon(BaseStreamer):
        def put(self, value: torch.Tensor) -> None:
            raise ConnectionError("client went away")

        def end(self) -> None:
            pass

    greedy(model.generate, prompt("0123"), 1)
    with pytest.raises(ConnectionError):
        model.generate(prompt("2031"), max_new_tokens=4, streamer=Abandon())
    out = greedy(model.generate, prompt("2031"), 1)
    assert out.sequences.shape[1] == prompt("2031").shape[1] + 1
    assert engine.store.stats().pinned_entries == 0


def test_stop_strings_and_resuming_after_them(shared_data: Any) -> None:
    from kvboost.hf.loading import load_model

    model, tokenizer = load_model(shared_data / "models" / "stories260K-llama")
    kv = kvboost.enable(model, tokenizer, **SMALL)
    text = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park."
    inputs = tokenizer(text, return_tensors="pt", return_token_type_ids=False)
    stopped = model.generate(**inputs, max_new_tokens=60, do_sample=False, stop_strings=["."], tokenizer=tokenizer)
    answer = tokenizer.decode(stopped[0, inputs.input_ids.shape[1] :])
    assert "." in answer
    assert len(answer) < 300
    resumed = tokenizer(tokenizer.decode(stopped[0], skip_special_tokens=True) + " Then", return_tensors="pt").input_ids
    out = kv.generate(resumed, max_new_tokens=8, do_sample=False)
    kvboost.disable(model)
    truth = model.generate(resumed, max_new_tokens=8, do_sample=False)
    assert out.token_ids == truth[0, resumed.shape[1] :].tolist()
    assert out.report.exact_tokens >= inputs.input_ids.shape[1] - 1


def test_text_streams_through_a_thread(shared_data: Any) -> None:
    import threading

    from kvboost.hf.loading import load_model

    model, tokenizer = load_model(shared_data / "models" / "stories260K-llama")
    kvboost.enable(model, tokenizer, **SMALL)
    inputs = tokenizer("Once upon a time, there was a little dog.", return_tensors="pt", return_token_type_ids=False)
    whole = tokenizer.decode(
        model.generate(**inputs, max_new_tokens=20, do_sample=False)[0, inputs.input_ids.shape[1] :],
        skip_special_tokens=True,
    )
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    thread = threading.Thread(
        target=model.generate, kwargs={**inputs, "max_new_tokens": 20, "do_sample": False, "streamer": streamer}
    )
    thread.start()
    assert re.sub(r"\s", "", "".join(streamer)) == re.sub(r"\s", "", whole)
    thread.join()


def test_environment_changes_the_strategy_of_the_next_request(
    model: Any, engine: KVBoost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVBOOST_GATE", "false")
    greedy(model.generate, prompt("0123"), 1)
    monkeypatch.setenv("KVBOOST_RECOMPUTE_STRATEGY", "none")
    greedy(model.generate, prompt("2031"), 1)
    assert engine.stats.tokens["repaired"] == 0 < engine.stats.tokens["moved"]
    monkeypatch.setenv("KVBOOST_RECOMPUTE_STRATEGY", "epic")
    greedy(model.generate, prompt("1302"), 1)
    assert engine.stats.tokens["repaired"] > 0
    assert "KVBOOST_DISABLE" not in os.environ
    assert join(prompt()).shape == prompt().shape
