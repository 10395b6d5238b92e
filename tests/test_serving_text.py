"""Text that is told piece by piece: no character is split, stop strings are found wherever tokens end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from kvboost.serving.text import TextStream, TokenTexts

TEXT = "Grüße, 東京! A family: 👩‍👩‍👧‍👦. Tabs\tand  spaces\n\n\nend. naïve café Ω"


def from_bytes(ids: list[int]) -> str:
    """The hardest tokenizer: every byte is a token."""
    return bytes(ids).decode("utf-8", errors="replace")


def told(stream: TextStream, ids: list[int]) -> list[str]:
    """What is told after each token, up to the end of the answer."""
    texts = []
    for token in ids:
        texts.append(stream.push(token))
        if stream.stopped:
            return texts
    return [*texts, stream.finish()]


@given(st.text(max_size=40))
def test_no_character_is_split_and_nothing_is_lost(text: str) -> None:
    pieces = told(TextStream(from_bytes), list(text.encode()))
    assert "".join(pieces) == text
    assert all(p.encode("utf-8", errors="strict").decode() == p for p in pieces)
    if "\ufffd" not in text:
        assert not any("\ufffd" in p for p in pieces)


@given(st.text(alphabet="abcé", max_size=30), st.lists(st.text(alphabet="abcé", min_size=1, max_size=4), max_size=3))
def test_the_answer_ends_at_the_first_stop_string_that_is_complete(text: str, stop: list[str]) -> None:
    for keep in (False, True):
        stream = TextStream(from_bytes, stop, keep_stop=keep)
        answer = "".join(told(stream, list(text.encode())))
        ends = [(text.index(s) + len(s), -len(s)) for s in stop if s in text]
        if not ends:
            assert answer == text
            assert not stream.stopped
            continue
        end, length = min(ends)
        assert stream.stopped
        assert answer == text[: end if keep else end + length]
        assert stream.kept_tokens == len(answer.encode())


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    stream = TextStream(from_bytes, ["\n\nQ:"])
    assert told(stream, list(b"a\n\nb\n\nQ")) == ["a", "", "", "\n\nb", "", "", "", "\n\nQ"]


def test_bytes_that_never_become_a_character_are_told_in_the_end() -> None:
    pieces = told(TextStream(from_bytes), [0xFF] * 20)
    assert "".join(pieces) == "\ufffd" * 20
    assert any(pieces[:10]), "a client sees that something comes"


def tokenizers(data: Path) -> list[Any]:
    names = ("stories260K-llama", "qwen2_tokenizer")
    return [AutoTokenizer.from_pretrained(data / "models" / name) for name in names]


def test_real_tokenizers_tell_what_they_decode_at_once(shared_data: Path) -> None:
    for tokenizer in tokenizers(shared_data):
        ids = tokenizer(TEXT, add_special_tokens=False).input_ids
        special = tokenizer.eos_token_id
        for sequence in (
            ids,
            [special, *ids, special, special],
            [i for pair in zip(ids, ids, strict=True) for i in pair],
        ):

            def decode(some: list[int], tokenizer: Any = tokenizer) -> str:
                return tokenizer.decode(some, skip_special_tokens=True)

            pieces = told(TextStream(decode), sequence)
            assert "".join(pieces) == decode(sequence)


def test_the_text_of_a_single_token_has_its_space(shared_data: Path) -> None:
    for tokenizer in tokenizers(shared_data):
        texts = TokenTexts(tokenizer)
        ids = tokenizer("Once upon a time", add_special_tokens=False).input_ids
        assert "".join(texts.of(i) for i in ids).strip() == "Once upon a time"
        assert any(texts.of(i).startswith(" ") for i in ids)
        assert texts.of(tokenizer.eos_token_id) == tokenizer.eos_token
