"""TGI's API, asked by Hugging Face's clients over a real connection to a real, tiny model."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
import pytest
from huggingface_hub import InferenceClient
from huggingface_hub.errors import OverloadedError, ValidationError

from kvboost import KVBoost
from kvboost.server import ServerOptions, make_app
from kvboost.serving import JobFailed
from server_fake import ScriptedService
from server_run import STORY, get, open_service, post, serving, stories

TGI = Path(__file__).resolve().parents[1] / ".venv-tgi"


@dataclass
class Server:
    url: str
    kv: KVBoost

    def post(self, path: str, **body: Any) -> httpx.Response:
        return post(self.url + path, json=body)


@pytest.fixture(scope="module")
def server(shared_data: Path) -> Iterator[Server]:
    kv = stories(shared_data)
    with open_service(kv) as service, serving(make_app(service, kv, ServerOptions("stories"))) as url:
        yield Server(url, kv)


@pytest.fixture
def client(server: Server, monkeypatch: pytest.MonkeyPatch) -> InferenceClient:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)  # it may ask this machine
    return InferenceClient(server.url)


def alone(server: Server, new_tokens: int) -> str:
    answer = server.kv.generate(STORY, max_new_tokens=new_tokens, do_sample=False, pad_token_id=0, cache_salt="alone")
    return answer.text


def test_inference_client_generates(server: Server, client: InferenceClient) -> None:
    text = client.text_generation(STORY, max_new_tokens=8)
    assert text.strip() == alone(server, 8).strip()
    assert "".join(client.text_generation(STORY, max_new_tokens=8, stream=True)) == text
    assert client.text_generation(STORY, max_new_tokens=8, return_full_text=True) == STORY + text


def test_details_of_a_greedy_answer(client: InferenceClient) -> None:
    told = client.text_generation(STORY, max_new_tokens=8, details=True, top_n_tokens=2)
    assert told.details.finish_reason == "length"
    assert told.details.generated_tokens == len(told.details.tokens) == len(told.details.top_tokens) == 8
    assert told.details.seed is None
    assert all(t.logprob <= 0 and not t.special for t in told.details.tokens)
    events = list(client.text_generation(STORY, max_new_tokens=8, details=True, stream=True))
    assert [e.token.id for e in events] == [t.id for t in told.details.tokens]
    assert [e.details is None for e in events] == [True] * 7 + [False]
    assert events[-1].generated_text == told.generated_text
    assert events[-1].details.input_length > 8


def test_seed_of_a_drawn_answer_is_told_and_repeats_it(client: InferenceClient) -> None:
    first = client.text_generation(STORY, max_new_tokens=12, details=True, do_sample=True, temperature=1.5)
    again = client.text_generation(
        STORY, max_new_tokens=12, details=True, do_sample=True, temperature=1.5, seed=first.details.seed
    )
    assert again.generated_text == first.generated_text


def test_stop_text_is_kept_as_tgi_keeps_it(client: InferenceClient) -> None:
    full = client.text_generation(STORY, max_new_tokens=40)
    word = full.split()[3]
    told = client.text_generation(STORY, max_new_tokens=40, stop=[word], details=True)
    assert told.generated_text == full[: full.index(word) + len(word)]
    assert told.details.finish_reason == "stop_sequence"
    streamed = client.text_generation(STORY, max_new_tokens=40, stop=[word], stream=True)
    assert "".join(streamed) == told.generated_text


def test_truncate_keeps_the_end_of_the_prompt(server: Server) -> None:
    long = "word " * 700 + STORY
    answer = server.post("/generate", inputs=long, parameters={"truncate": 50, "max_new_tokens": 4, "details": True})
    assert answer.status_code == 200
    assert server.post("/generate", inputs=long, parameters={"max_new_tokens": 4}).status_code == 422


def test_chat_of_the_inference_client(server: Server, client: InferenceClient) -> None:
    messages = [{"role": "user", "content": STORY}]
    answer = client.chat_completion(messages, max_tokens=8, temperature=0)
    assert answer.choices[0].message.content
    assert answer.usage.prompt_tokens_details["cached_tokens"] >= 0
    chunks = client.chat_completion(messages, max_tokens=8, temperature=0, stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == answer.choices[0].message.content


def test_base_url_answers_in_a_list_or_as_a_stream(server: Server) -> None:
    asked = {"inputs": STORY, "parameters": {"max_new_tokens": 4}}
    whole = server.post("/generate", **asked).json()
    assert server.post("/", **asked).json() == [whole]
    streamed = server.post("/", **asked, stream=True)
    events = [json.loads(e.removeprefix("data:")) for e in streamed.text.split("\n\n") if e]
    assert events[-1]["generated_text"] == whole["generated_text"]


@pytest.mark.usefixtures("client")
def test_info_tells_model_and_limits(server: Server) -> None:
    told = get(f"{server.url}/info").json()
    assert told["model_id"] == "stories"
    assert (told["max_input_tokens"], told["max_total_tokens"], told["model_dtype"]) == (511, 512, "float32")
    assert InferenceClient(server.url, provider="hf-inference").get_endpoint_info() == told


@pytest.mark.parametrize(
    ("field", "parameters"),
    [
        ("best_of", {"best_of": 2}),
        ("watermark", {"watermark": True}),
        ("typical_p", {"typical_p": 0.5}),
        ("decoder_input_details", {"decoder_input_details": True}),
        ("grammar", {"grammar": {"type": "json", "value": {}}}),
        ("adapter_id", {"adapter_id": "a"}),
        ("temperature", {"temperature": 0}),
        ("top_p", {"top_p": 1.0}),
        ("max_new_tokens", {"max_new_tokens": 0}),
        ("max_new_tokens", {"max_new_tokens": 511}),
        ("stop", {"stop": ["a"] * 5}),
        ("nonsense", {"nonsense": 1}),
    ],
)
def test_what_is_not_honoured_is_a_422_in_tgis_shape(server: Server, field: str, parameters: dict[str, Any]) -> None:
    for path in ("/generate", "/generate_stream", "/"):
        answer = server.post(path, inputs=STORY, parameters=parameters)
        assert answer.status_code == 422
        assert answer.json()["error_type"] == "validation"
        assert field in answer.json()["error"]


def test_errors_reach_the_client_as_its_own(client: InferenceClient) -> None:
    with pytest.raises(ValidationError, match="watermark"):
        client.text_generation("x", watermark=True)


def test_busy_and_failing_service(shared_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    kv = stories(shared_data)
    service = ScriptedService(["Once"], JobFailed("no luck"))
    with serving(make_app(service, kv, ServerOptions("stories"))) as url:
        failed = post(f"{url}/generate", json={"inputs": "x"})
        assert (failed.status_code, failed.json()["error_type"]) == (424, "generation")
        service.draining = True
        with pytest.raises(OverloadedError):
            InferenceClient(url).text_generation("x")


def test_text_generation_client(server: Server) -> None:
    if not (TGI / "ready").exists():
        pytest.skip("the environment of the text-generation client is absent: make .venv-tgi/ready")
    script = Path(__file__).with_name("tgi_client.py")
    asking = [TGI / "bin" / "python", script, server.url, STORY]
    done = subprocess.run(asking, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    heard = json.loads(done.stdout)
    assert heard["text"].strip() == alone(server, 8).strip()
    assert heard["streamed"] == heard["last"] == heard["text"]
    assert (heard["finish_reason"], len(heard["tokens"])) == ("length", 8)
    assert heard["stopped"].startswith(STORY)
    assert heard["stopped"].endswith(" very")
    assert heard["stopped_by"] == "stop_sequence"
    assert heard["drawn"][0] == heard["drawn"][1]
    assert heard["seed"] == 3
    assert heard["chat"]
    assert "watermark" in heard["refused"]
