"""The command line: verdicts, answers, settings, errors in one line, and a reference page that is current."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel
from typer.testing import CliRunner

import kvboost
from kvboost.cli import app, bench, breakeven, diagnosis
from kvboost.cli.breakeven import RunCost
from kvboost.cli.reference import render_reference

ROOT = Path(__file__).parents[1]
PROMPT = (
    "Once upon a time there was a little girl who had a red ball. She played with it in the park every day, and her "
    "friend Tom wanted to play too."
)


@pytest.fixture
def stories(shared_data: Path) -> str:
    """A Llama of 260 thousand parameters that was trained on children's stories."""
    return str(shared_data / "models" / "stories260K-llama")


@pytest.fixture
def gpt2(stories: str, tmp_path: Path) -> str:
    """A model with learned absolute positions, with a tokenizer that fits."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=512, n_positions=256, n_embd=32, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    AutoTokenizer.from_pretrained(stories).save_pretrained(tmp_path / "gpt2")
    return str(tmp_path / "gpt2")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Few measurements, and one thread: for a model this small, threads only wait for each other."""
    monkeypatch.setattr(breakeven, "REPEATS", 1)
    monkeypatch.setattr(breakeven, "RUN_TOKENS", (8, 64))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def run(*arguments: str, input: str | None = None) -> Any:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, list(arguments), input=input)


def one_line_error(result: Any) -> str:
    """The error line of a failed command; progress lines may stand before it."""
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, result.stderr
    assert result.stderr.splitlines()[-1] == lines[0], "the error is the last line"
    return lines[0]


# --- verify -----------------------------------------------------------------------------------------------------------

STORIES = [
    "Lily had a small cat. The cat liked to sleep in the sun all day long, and it never wanted to go out in the rain. ",
    "Tom went to the big park with his dad. They saw a bird in a tree and a frog in the pond, and they were happy. ",
    "One day a boy found a key under a stone. He asked his mom what the key was for, but she did not know it either. ",
]


def write_prompts(path: Path, *values: Any) -> str:
    path.write_text("".join(json.dumps(v) + "\n" for v in values), encoding="utf-8")
    return str(path)


def reordered() -> list[str]:
    head = "These are stories for small children. Read them all, and then go on with the last one. "
    return [head + "".join(STORIES[i] for i in order) + "Then" for order in ((0, 1, 2), (0, 1, 2), (2, 0, 1))]


def test_verify_measures_exact_reuse_as_no_error_and_moved_reuse_as_some(stories: str, tmp_path: Path) -> None:
    path = write_prompts(tmp_path / "p.jsonl", *reordered())
    result = run("verify", path, "--model", stories, "--fidelity", "fast", "--json")
    found = json.loads(result.stdout)
    first, again, moved = found["prompts"]
    assert first["exact"] == first["moved"] == 0
    assert again["exact"] == again["tokens"] - 1
    assert max(first["kl"], again["kl"]) < 1e-6
    assert moved["moved"] > 60
    assert moved["kl"] > 1e-6 or moved["fallback"]
    assert moved["risk"] is not None
    for told in found["prompts"]:
        assert told["exact"] + told["continued"] + told["moved"] + told["fresh"] == told["tokens"]
    assert result.exit_code == (1 if found["kl_p95"] > found["bound"] else 0)


def test_verify_never_calls_rows_behind_moved_ones_exact(stories: str, tmp_path: Path) -> None:
    path = write_prompts(tmp_path / "p.jsonl", *reordered(), reordered()[-1])
    prompts = json.loads(run("verify", path, "--model", stories, "--fidelity", "fast", "--json").stdout)["prompts"]
    assert prompts[2]["moved"] > 60
    assert prompts[3]["continued"] > 60
    assert prompts[3]["exact"] < prompts[2]["tokens"] - prompts[2]["moved"]


def test_verify_goes_on_after_a_prompt_that_the_cache_does_not_serve(
    stories: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvboost.hf.support.ModelSupport.refuses_length", lambda _, n: "too short" if n < 9 else None)
    path = write_prompts(tmp_path / "p.jsonl", "One", *reordered())
    left, *served = json.loads(run("verify", path, "--model", stories, "--json").stdout)["prompts"]
    assert left["fallback"] == "too short"
    assert (left["fresh"], left["kl"], left["agreement"]) == (left["tokens"], 0.0, 1.0)
    assert [p["fallback"] for p in served][:2] == [None, None]


def test_verify_fails_when_the_error_is_above_the_bound(
    stories: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_prompts(tmp_path / "p.jsonl", *reordered())
    monkeypatch.setenv("KVBOOST_GATE", "false")
    monkeypatch.setenv("KVBOOST_RECOMPUTE_STRATEGY", "none")
    monkeypatch.setenv("KVBOOST_RISK_BOUND", "1e-9")
    result = run("verify", path, "--model", stories)
    assert result.exit_code == 1
    assert "ABOVE the bound" in result.stdout


@pytest.mark.parametrize(
    ("content", "message"),
    [("", "holds no prompt"), ("{oops\n", "line 1"), ('"fine"\n{"text": 3}\n', "line 2"), (None, "cannot read")],
)
def test_verify_names_the_file_and_the_line_that_is_wrong(content: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    error = one_line_error(run("verify", str(path)))
    assert message in error
    assert "prompts.jsonl" in error


# --- doctor -----------------------------------------------------------------------------------------------------------


def test_doctor_says_that_a_llama_reuses_text_at_any_position(stories: str) -> None:
    result = run("doctor", stories)
    assert result.exit_code == 0, result.output
    assert "text at any position" in result.stdout
    assert "break-even" in result.stdout


def test_doctor_json_tells_layers_bytes_and_probed_base(stories: str) -> None:
    found = json.loads(run("doctor", stories, "--json").stdout)
    assert found["limited"] is False
    assert found["bytes_per_token"] == 5 * 4 * (8 + 8) * 4  # layers x heads x (key + value) x float32
    (kind,) = found["layers"]
    assert (kind["layers"], kind["window"], kind["rotary"]) == ("0-4", None, "half")
    assert kind["base"] == pytest.approx(10_000)
    assert set(found["self_check"]) == {"continuation", "recompute", "shift"}
    assert all(e <= found["self_check_tolerance"] for e in found["self_check"].values())


def test_doctor_tells_what_quantizing_would_cost(stories: str) -> None:
    found = json.loads(run("doctor", stories, "--json").stdout)["quantization"]
    assert found["int8"]["refused"] is None
    assert 0 < found["int8"]["kl"] < found["k8v4"]["kl"]
    assert found["int8"]["least_db"]["keys"] > 50
    assert "codec k8v4" in run("doctor", stories).stdout


def test_doctor_reports_gpt2_as_exact_only_with_the_reason(gpt2: str) -> None:
    result = run("doctor", gpt2)
    assert result.exit_code == 1, result.output
    assert "exact prefixes only" in result.stdout
    assert "because" in result.stdout
    found = json.loads(run("doctor", gpt2, "--json").stdout)
    assert found["limited"] is True
    assert "position" in found["reason"] or "rotat" in found["reason"]
    assert found["break_even_tokens"] is None


@pytest.mark.parametrize("command", [["doctor"], ["generate", "hello", "--model"], ["demo", "--model"]])
def test_a_folder_without_a_model_is_an_error_in_one_line(command: list[str], tmp_path: Path) -> None:
    assert "config.json" in one_line_error(run(*command, str(tmp_path)))


def test_a_path_that_does_not_exist_is_an_error_in_one_line(tmp_path: Path) -> None:
    assert "missing" in one_line_error(run("doctor", str(tmp_path / "missing")))


@pytest.mark.parametrize(
    ("gains", "expected"),
    [
        ((-1.0, 1.0), 12),  # halfway between 8 and 16
        ((1.0, -1.0, 1.0), 24),  # a lucky short run does not count: longer ones lost
        ((1.0, 1.0), 8),
        ((-1.0, -1.0), None),
    ],
)
def test_break_even_is_interpolated_behind_the_last_loss(gains: tuple[float, ...], expected: int | None) -> None:
    costs = [RunCost(n, 5.0 + gain, 5.0) for n, gain in zip((8, 16, 32), gains, strict=False)]
    assert breakeven.break_even(costs) == expected


def test_layer_numbers_are_shown_as_ranges() -> None:
    assert diagnosis.ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"


# --- generate and warm ------------------------------------------------------------------------------------------------


def test_generate_prints_what_transformers_would(stories: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(stories)
    tokenizer = AutoTokenizer.from_pretrained(stories)
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    expected = model.generate(ids, max_new_tokens=24, do_sample=False)[0, ids.shape[1] :].tolist()
    result = run("generate", PROMPT, "--model", stories, "--max-new-tokens", "24", "--json")
    answer = json.loads(result.stdout)
    assert answer["token_ids"] == expected
    assert answer["report"]["prompt_tokens"] == ids.shape[1]
    plain = run("generate", "-", "--model", stories, "--max-new-tokens", "24", input=PROMPT)
    assert plain.stdout == answer["text"] + "\n", "only the answer goes to stdout"


def test_generate_reuses_what_was_warmed_and_reports_it(
    stories: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVBOOST_RISK_BOUND", "100")  # the gate was fitted on larger models and refuses this one's
    document = tmp_path / "story.txt"
    document.write_text(PROMPT + " Then it began to rain, and they ran home to eat some cake.")
    asked = f"Read this story with care, and then go on with it in the same way. {document.read_text()} One day"
    options = ("--model", stories, "--max-new-tokens", "4", "--warm", str(document), "--json")
    report = json.loads(run("generate", asked, *options).stdout)["report"]
    assert report["moved_tokens"] > 0, report
    exact = json.loads(run("generate", asked, *options, "--fidelity", "exact").stdout)["report"]
    assert exact["moved_tokens"] == 0


def test_generate_chat_without_a_template_is_refused(stories: str) -> None:
    refused = run("generate", PROMPT, "--model", stories, "--chat")
    assert "no chat template" in one_line_error(refused)
    assert refused.stdout == ""


def test_warm_reports_what_it_kept_and_that_it_does_not_last(stories: str, tmp_path: Path) -> None:
    document = tmp_path / "story.txt"
    document.write_text(PROMPT * 2)
    result = run("warm", str(document), "--model", stories, "--then", "What then?", "--max-new-tokens", "4")
    assert result.exit_code == 0, result.output
    assert "story.txt" in result.stdout
    assert "process" in result.stderr


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00"], ids=["missing", "binary"])
def test_an_unreadable_file_is_named_in_one_line(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    if content is not None:
        path.write_bytes(content)
    assert "notes.txt" in one_line_error(run("warm", str(path), "--model", "unused"))


def test_an_empty_prompt_is_an_error_in_one_line() -> None:
    assert "empty" in one_line_error(run("generate", "-", "--model", "unused", input=""))


# --- demo -------------------------------------------------------------------------------------------------------------


def test_demo_plays_six_requests_and_writes_the_page(
    stories: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvboost.demo import stories as shipped

    documents = [f"Once there was a {x} who {y}. {x} was happy, and {y} again every single day." for x, y in ANIMALS]
    story = shipped.Story("logs", "A short story", "Read the stories.", documents, ["And then?", "What next?"])
    other = shipped.Story("review", "Another", "Hello.", [f"{d} The end." for d in reversed(documents)], ["So?"])
    monkeypatch.setattr(shipped, "load_stories", lambda: (story, other))
    page = tmp_path / "map.html"
    result = run("demo", "--model", stories, "--html", str(page))
    assert result.exit_code == 0, result.output
    for shown in ("cold", "same prefix", "new timestamp", "reordered", "subset + new", "nothing shared"):
        assert shown in result.stdout
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")


ANIMALS = [("Ben", "ran"), ("Lily", "jumped"), ("Tom", "sang a song"), ("Sue", "ate cake"), ("Max", "hid in a box")]


def test_demo_refuses_a_page_in_a_missing_folder_before_it_loads_a_model(tmp_path: Path) -> None:
    assert "folder" in one_line_error(run("demo", "--html", str(tmp_path / "none" / "map.html")))


# --- the rest ---------------------------------------------------------------------------------------------------------


def test_config_show_tells_which_source_won(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBOOST_FIDELITY", "exact")
    shown = json.loads(run("config", "show", "--json").stdout)
    assert set(shown) == set(kvboost.Settings.model_fields)
    assert (shown["fidelity"]["value"], shown["fidelity"]["origin"]) == ("exact", "environment")
    assert shown["mode"]["origin"] == "default"
    line = next(x for x in run("config", "show", "--origin").stdout.splitlines() if x.strip().startswith("fidelity"))
    assert line.split()[:3] == ["fidelity", "exact", "environment"]


def test_config_show_warns_of_a_variable_that_is_no_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBOOST_FIDELTY", "fast")
    assert "KVBOOST_FIDELTY is no setting; did you mean KVBOOST_FIDELITY?" in run("config", "show").stderr


def test_a_mistake_in_the_settings_is_told_before_a_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBOOST_FIDELITY", "foo")
    error = one_line_error(run("generate", "hi", "--model", "no/such/model"))
    assert "KVBOOST_FIDELITY (from environment) has the invalid value 'foo'" in error


def test_config_show_masks_the_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBOOST_HASH_SECRET", "open sesame")
    assert "sesame" not in run("config", "show").stdout


def test_a_wrong_setting_is_named_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBOOST_FIDELITY", "perfect")
    assert "KVBOOST_FIDELITY" in one_line_error(run("config", "show"))


def test_bench_lists_scripts_with_their_first_line_and_passes_arguments_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = '"""Say it."""\nimport sys\nif __name__ == "__main__":\n    sys.exit(len(sys.argv))\n'
    (tmp_path / "echo.py").write_text(script)
    (tmp_path / "helper.py").write_text('"""Not to be run."""\n')
    monkeypatch.setattr(bench, "folder", lambda: tmp_path)
    listed = run("bench").stdout
    assert "echo" in listed
    assert "Say it." in listed
    assert "helper" not in listed
    assert run("bench", "echo", "--help", "-x").exit_code == 3
    assert "echo" in one_line_error(run("bench", "speeed"))


def test_version() -> None:
    assert run("--version").stdout == f"kvboost {kvboost.__version__}\n"


def test_the_reference_page_is_current() -> None:
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert page == render_reference(app), "run: python -m kvboost.cli docs > docs/cli.md"
