"""OpenAI's API, asked by the official clients over a real connection to a real, tiny model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI
from openai.types.chat import ChatCompletion

from kvboost import KVBoost
from kvboost.server import ServerOptions, make_app
from kvboost.server.tools import ToolCallReader
from kvboost.serving import JobFailed
from server_fake import ScriptedService
from server_run import STORY, get, open_service, post, serving, stories

MODEL = "stories"
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'


@dataclass
class Server:
    url: str
    kv: KVBoost
    service: Any
    client: openai.OpenAI


@pytest.fixture(scope="module")
def server(shared_data: Path) -> Iterator[Server]:
    kv = stories(shared_data)
    with (
        open_service(kv) as service,
        serving(make_app(service, kv, ServerOptions(MODEL))) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield Server(url, kv, service, client)


@pytest.fixture
def scripted(shared_data: Path) -> Iterator[Server]:
    """A server whose model says what the test tells it."""
    kv = stories(shared_data)
    service = ScriptedService()
    with (
        serving(make_app(service, kv, ServerOptions(MODEL))) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield Server(url, kv, service, client)


def user(text: str = STORY) -> list[Any]:
    return [{"role": "user", "content": text}]


def chat(server: Server, **more: Any) -> Any:
    asked = {"model": MODEL, "messages": user(), "max_tokens": 12, "temperature": 0}
    return server.client.chat.completions.create(**{**asked, **more})


def reused(answer: Any) -> int:
    return int(answer.usage.prompt_tokens_details.cached_tokens)


# --- chat -------------------------------------------------------------------------------------------------------------


def test_greedy_answer_is_that_of_the_library(server: Server) -> None:
    answer = chat(server)
    alone = server.kv.generate(user(), max_new_tokens=12, do_sample=False, pad_token_id=0, cache_salt="alone")
    assert answer.choices[0].message.content == alone.text
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.prompt_tokens == alone.report.prompt_tokens
    assert answer.usage.completion_tokens == 12
    assert answer.system_fingerprint


def test_usage_tells_what_was_reused_and_sums_to_the_prompt(server: Server) -> None:
    text = "The cat sat on a mat and looked at the moon. " * 4
    first, second = (chat(server, messages=user(text)) for _ in range(2))
    assert reused(first) == 0
    assert reused(second) == second.usage.prompt_tokens - 1
    split = second.usage.kvboost
    assert split["exact"] + split["continued"] + split["moved"] + split["fresh"] == second.usage.prompt_tokens
    assert split["exact"] == reused(second)


def test_stream_says_the_same_and_ends_with_usage(server: Server) -> None:
    whole = chat(server)
    chunks = list(chat(server, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert all(c.usage is None for c in chunks[:-1])
    assert chunks[-1].usage.completion_tokens == 12
    assert reused(chunks[-1]) > 0


def test_stream_ends_with_done_and_has_no_usage_unless_asked(server: Server) -> None:
    body = {"model": MODEL, "messages": user(), "max_tokens": 3, "stream": True}
    answer = post(f"{server.url}/v1/chat/completions", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    assert all("usage" not in json.loads(line.removeprefix("data: ")) for line in lines[:-1])


def test_equal_seeds_draw_equal_answers(server: Server) -> None:
    def drawn(seed: int) -> str:
        return str(chat(server, temperature=1.5, seed=seed, max_tokens=20).choices[0].message.content)

    assert drawn(7) == drawn(7)
    assert len({drawn(seed) for seed in range(4)}) > 1


def test_several_choices_are_drawn_with_seeds_of_their_own(server: Server) -> None:
    answer = chat(server, n=3, temperature=1.5, seed=1, max_tokens=20)
    texts = [c.message.content for c in answer.choices]
    assert [c.index for c in answer.choices] == [0, 1, 2]
    assert len(set(texts)) > 1
    assert texts[0] == chat(server, temperature=1.5, seed=1, max_tokens=20).choices[0].message.content
    assert answer.usage.completion_tokens == 60
    streamed = ["", "", ""]
    for chunk in chat(server, n=3, temperature=1.5, seed=1, max_tokens=20, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == texts


def test_stop_text_ends_the_answer_and_is_not_in_it(server: Server) -> None:
    full = chat(server, max_tokens=40).choices[0].message.content
    word = full.split()[4]
    answer = chat(server, max_tokens=40, stop=["never said", word]).choices[0]
    assert answer.message.content == full[: full.index(word)]
    assert answer.finish_reason == "stop"


def test_log_probabilities(server: Server) -> None:
    told = chat(server, logprobs=True, top_logprobs=3, max_tokens=4).choices[0].logprobs.content
    assert len(told) == 4
    for token in told:
        assert len(token.top_logprobs) == 3
        assert token.logprob == max(t.logprob for t in token.top_logprobs)  # greedy
        assert bytes(token.bytes).decode() == token.token
    assert chat(server).choices[0].logprobs is None


def test_logit_bias_forbids_a_token(server: Server) -> None:
    first = chat(server, max_tokens=1, logprobs=True).choices[0].logprobs.content[0].token
    written_so = [i for i in range(512) if server.kv.tokenizer.decode([i]) == first]
    other = chat(server, max_tokens=1, logprobs=True, logit_bias={str(i): -100 for i in written_so})
    assert other.choices[0].logprobs.content[0].token != first


def test_settings_of_one_request(server: Server) -> None:
    chat(server)
    assert reused(chat(server)) > 0
    assert reused(chat(server, extra_body={"kvboost": {"disable": True}})) == 0
    assert reused(chat(server, extra_headers={"x-kvboost-enabled": "false"})) == 0
    assert reused(chat(server, extra_body={"cache_salt": "another"})) == 0
    assert reused(chat(server, extra_body={"cache_salt": "another"})) > 0
    observed = chat(server, extra_body={"kvboost": {"mode": "observe"}})
    assert reused(observed) == 0
    assert observed.usage.kvboost["exact"] > 0  # what would have hit


def test_moved_text_is_reported_and_header_fidelity_wins(server: Server) -> None:
    document = STORY + "After that they all went home and had some soup. Then Lily went to bed. "
    chat(server, messages=user("I like dogs and cats and the sun. My mom likes to bake. " * 2 + document))
    head = "Tom was a big boy who had a red car and a blue car. He did not like to share. " * 2
    moved = chat(server, messages=user(head + document), extra_body={"kvboost": {"gate": False}})
    assert moved.usage.kvboost["moved"] > 0
    assert moved.usage.kvboost["strategy"] == "guided"
    assert reused(moved) == moved.usage.kvboost["moved"] - moved.usage.kvboost["repaired"] + sum(
        moved.usage.kvboost[k] for k in ("exact", "continued")
    )
    head = "Ben was a small boy who had a green hat and a blue hat. He did not like to read. " * 2
    exact = chat(server, messages=user(head + document), extra_headers={"x-kvboost-fidelity": "exact"},
                 extra_body={"kvboost": {"fidelity": "fast", "gate": False}})  # fmt: skip
    assert exact.usage.kvboost["moved"] == 0


# --- tools ------------------------------------------------------------------------------------------------------------


def test_tools_reach_the_prompt_through_the_template(server: Server) -> None:
    without, with_tools = chat(server), chat(server, tools=[WEATHER])
    assert with_tools.usage.prompt_tokens > without.usage.prompt_tokens
    assert chat(server, tools=[WEATHER], tool_choice="none").usage.prompt_tokens == without.usage.prompt_tokens


def test_template_without_tools_is_a_400(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.kv.tokenizer, "chat_template", "{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(openai.BadRequestError, match="template") as error:
        chat(server, tools=[WEATHER])
    assert error.value.param == "tools"


@pytest.mark.parametrize("texts", [[CALL], list(CALL), ["Let me see. ", *list(CALL)]])
def test_call_in_an_answer_becomes_a_tool_call(scripted: Server, texts: list[str]) -> None:
    scripted.service.texts = texts
    answer: ChatCompletion = chat(scripted, tools=[WEATHER])
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == ("Let me see." if len(texts[0]) > 2 and texts[0] != CALL else None)
    assert choice.message.tool_calls is not None
    assert json.loads(choice.message.tool_calls[0].function.arguments) == {"city": "Ulm"}

    with scripted.client.chat.completions.stream(model=MODEL, messages=user(), tools=[WEATHER]) as stream:
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls"
    assert final.message.tool_calls[0].function.name == "weather"
    assert "<" not in (final.message.content or "")


def test_langchain_binds_tools(scripted: Server) -> None:
    scripted.service.texts = ["<tool_", 'call>{"name": "weather", "arguments": {"city": "Ulm"}}</tool_call>']
    model = ChatOpenAI(model=MODEL, base_url=f"{scripted.url}/v1", api_key="none", max_retries=0)
    called = model.bind_tools([WEATHER]).invoke([HumanMessage("Is it raining?")])
    assert called.tool_calls[0]["args"] == {"city": "Ulm"}


def test_calls_and_results_go_back_into_the_prompt(scripted: Server) -> None:
    scripted.service.texts = [CALL]
    asked = chat(scripted, tools=[WEATHER]).choices[0].message
    scripted.service.texts = ["It rains."]
    result = {"role": "tool", "tool_call_id": asked.tool_calls[0].id, "content": "rain"}
    answer = chat(scripted, messages=[*user("Weather?"), asked, result], tools=[WEATHER])
    assert answer.choices[0].message.content == "It rains."
    prompt = scripted.kv.tokenizer.decode(scripted.service.jobs[-1].input_ids)
    assert 'weather {"city": "Ulm"} rain' in " ".join(prompt.split())


@pytest.mark.parametrize(
    ("said", "text", "names"),
    [
        ('{"name": "weather", "arguments": {}}', "", ["weather"]),
        ('[{"name": "weather", "parameters": {}}, {"name": "weather", "arguments": "{}"}]', "", ["weather", "weather"]),
        ('{"name": "unknown", "arguments": {}}', '{"name": "unknown", "arguments": {}}', []),
        ('{"temperature": 3}', '{"temperature": 3}', []),
        ("<tool_call>not json</tool_call>", "<tool_call>not json</tool_call>", []),
        ("a < b and <tool", "a < b and <tool", []),
        ('  <tool_call>{"name": "weather", "arguments": {}}', "", ["weather"]),
        ('{"name": ["weather"]}', '{"name": ["weather"]}', []),
        ("", "", []),
    ],
)
def test_what_is_read_as_a_call(said: str, text: str, names: list[str]) -> None:
    for pieces in ([said], list(said)):
        reader = ToolCallReader({"weather"})
        shown = "".join(reader.feed(p) for p in pieces)
        rest, calls = reader.finish()
        assert (shown + rest, [c["function"]["name"] for c in calls]) == (text, names)


# --- completions and models -------------------------------------------------------------------------------------------


def complete(server: Server, **more: Any) -> Any:
    asked = {"model": MODEL, "prompt": STORY, "max_tokens": 6, "temperature": 0}
    return server.client.completions.create(**{**asked, **more})


def test_prompt_as_text_ids_or_a_list_of_one(server: Server) -> None:
    ids = server.kv.tokenizer(STORY).input_ids
    texts = {complete(server, prompt=p).choices[0].text for p in (STORY, [STORY], ids, [ids])}
    assert len(texts) == 1
    with pytest.raises(openai.BadRequestError) as error:
        complete(server, prompt=["a", "b"])
    assert error.value.param == "prompt"


def test_completion_streams_echoes_and_tells_log_probabilities(server: Server) -> None:
    whole = complete(server, logprobs=2)
    told = whole.choices[0].logprobs
    assert len(told.tokens) == len(told.token_logprobs) == len(told.text_offset) == 6
    assert all(len(top) <= 2 for top in told.top_logprobs)
    chunks = list(complete(server, stream=True, logprobs=2, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].text for c in chunks if c.choices) == whole.choices[0].text
    assert [o for c in chunks if c.choices for o in c.choices[0].logprobs.text_offset] == told.text_offset
    assert chunks[-1].usage.completion_tokens == 6
    assert complete(server, echo=True).choices[0].text == STORY + whole.choices[0].text
    assert "".join(c.choices[0].text for c in complete(server, echo=True, stream=True)).startswith(STORY)


def test_models(server: Server) -> None:
    assert [m.id for m in server.client.models.list()] == [MODEL]
    assert server.client.models.retrieve(MODEL).max_model_len == 512
    with pytest.raises(openai.NotFoundError) as error:
        server.client.models.retrieve("gpt-9")
    assert error.value.code == "model_not_found"


def test_langchain_answers_and_streams(server: Server) -> None:
    model = ChatOpenAI(model=MODEL, base_url=f"{server.url}/v1", api_key="none", max_tokens=8, temperature=0)
    answer = model.invoke(STORY)
    assert "".join(str(part.content) for part in model.stream(STORY)) == answer.content
    assert model.invoke(STORY).usage_metadata["input_token_details"]["cache_read"] > 0


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("param", "asked"),
    [
        ("response_format", {"response_format": {"type": "json_object"}}),
        ("response_format", {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}}),
        ("tool_choice", {"tools": [WEATHER], "tool_choice": "required"}),
        ("tool_choice", {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "weather"}}}),
        ("functions", {"functions": [{"name": "f"}]}),
        ("modalities", {"modalities": ["audio"]}),
        ("reasoning_effort", {"reasoning_effort": "high"}),
        ("nonsense", {"extra_body": {"nonsense": 1}}),
        ("kvboost.redis_url", {"extra_body": {"kvboost": {"redis_url": "redis://elsewhere"}}}),
        ("kvboost.fidelity", {"extra_body": {"kvboost": {"fidelity": "perfect"}}}),
        ("temperature", {"temperature": -1}),
        ("temperature", {"temperature": "hot"}),
        ("top_p", {"top_p": 1.5}),
        ("n", {"n": 0}),
        ("n", {"n": 10**9}),
        ("max_tokens", {"max_tokens": 0}),
        ("max_tokens", {"max_tokens": 510}),
        ("max_completion_tokens", {"max_completion_tokens": 5000}),
        ("stop", {"stop": ["a", "b", "c", "d", "e"]}),
        ("stop", {"stop": ""}),
        ("seed", {"seed": 2**70}),
        ("logit_bias", {"logit_bias": {"99999": 1}}),
        ("logit_bias.5", {"logit_bias": {"5": 1000}}),
        ("top_logprobs", {"top_logprobs": 2}),
        ("top_logprobs", {"logprobs": True, "top_logprobs": 21}),
        ("stream_options", {"stream_options": {"include_usage": True}}),
        ("messages", {"messages": []}),
        ("messages.0.role", {"messages": [{"role": "pope", "content": "x"}]}),
        ("messages.0.content.0.type", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
        ("messages", {"messages": [{"role": "user", "content": "word " * 600}]}),
        ("x-kvboost-fidelity", {"extra_headers": {"x-kvboost-fidelity": "perfect"}}),
        ("x-kvboost-enabled", {"extra_headers": {"x-kvboost-enabled": "perhaps"}}),
        ("x-request-timeout-s", {"extra_headers": {"x-request-timeout-s": "nan"}}),
    ],
)
def test_what_cannot_be_honoured_is_a_400_that_names_the_field(
    server: Server, param: str, asked: dict[str, Any]
) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        chat(server, **asked)
    assert error.value.param == param
    assert len(error.value.body["message"]) > 20


@pytest.mark.parametrize(
    ("param", "asked"),
    [
        ("suffix", {"suffix": "the end"}),
        ("best_of", {"best_of": 3}),
        ("logprobs", {"echo": True, "logprobs": 1}),
        ("prompt", {"prompt": []}),
        ("prompt", {"prompt": [-1]}),
        ("prompt", {"prompt": [10**30]}),
    ],
)
def test_completions_refuse_by_name_too(server: Server, param: str, asked: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        complete(server, **asked)
    assert error.value.param == param


def test_harmless_fields_and_nulls_are_accepted(server: Server) -> None:
    answer = chat(
        server, user="u", store=True, metadata={"a": "b"}, service_tier="auto", n=None, stop=None, prediction=None,
        safety_identifier="s", prompt_cache_key="k", response_format={"type": "text"}, extra_body={"audio": None},
    )  # fmt: skip
    assert answer.choices[0].message.content


def test_too_long_prompt_is_told_with_the_numbers(server: Server) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        chat(server, max_tokens=450)
    assert error.value.code == "context_length_exceeded"
    assert "512" in error.value.message
    assert "450" in error.value.message


def test_failing_model_is_a_500_and_in_a_stream_an_error_event(scripted: Server) -> None:
    scripted.service.error = JobFailed("no luck")
    with pytest.raises(openai.InternalServerError, match="no luck"):
        chat(scripted)
    with pytest.raises(openai.InternalServerError):
        list(chat(scripted, stream=True))  # before its first token a stream has a status too
    scripted.service.texts = ["Once"]
    heard = []
    with pytest.raises(openai.APIError, match="no luck"):
        heard += [c.choices[0].delta.content for c in chat(scripted, stream=True)]


def test_request_id_is_echoed(server: Server) -> None:
    answer = server.client.chat.completions.with_raw_response.create(
        model=MODEL, messages=user(), max_tokens=1, extra_headers={"x-request-id": "my-id.7"}
    )
    assert answer.headers["x-request-id"] == "my-id.7"
    refused = post(f"{server.url}/v1/completions", json={}, headers={"x-request-id": "bad id"})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "x-request-id"
    assert get(f"{server.url}/health").headers["x-request-id"]
