"""The token map: every token once, in order, in the class of its kind; and its drawings."""

from __future__ import annotations

from html import unescape
from html.parser import HTMLParser
from io import StringIO

import numpy as np
import pytest
from rich.console import Console

from kvboost.cli.strip import TokenStrip
from kvboost.demo.page import render_page
from kvboost.tokenmap import MappedChunk, make_token_map, token_texts
from kvboost.types import Kind, ReusePlan, Segment, Span

TEXT = "The <b>lazy</b> dog\nnaïve 语言 🙂 & more!"


class ByteTokenizer:
    """One token per byte, so that most characters outside ASCII take several."""

    def decode(self, token_ids: list[int], clean_up_tokenization_spaces: bool = False) -> str:
        return bytes(token_ids).decode("utf-8", errors="replace")


class SpaceEater:
    """Drops the space before the first token that it is given, as SentencePiece tokenizers do."""

    WORDS = (" once", " upon", "ly", " a", " time")

    def decode(self, token_ids: list[int], clean_up_tokenization_spaces: bool = False) -> str:
        return "".join(self.WORDS[i] for i in token_ids).removeprefix(" ")


IDS = list(TEXT.encode())
PLAN = ReusePlan(
    len(IDS),
    (
        Segment(Span(0, 4), Kind.EXACT, b"a"),
        Segment(Span(4, 9), Kind.CONTINUED, b"b", source_position=4),
        Segment(Span(9, 20), Kind.MOVED, b"c", source_position=109),
        Segment(Span(20, len(IDS)), Kind.FRESH),
    ),
    repaired=np.array([9, 10, 15], np.int32),
)


@pytest.fixture
def chunks() -> tuple[MappedChunk, ...]:
    return make_token_map(PLAN, IDS, ByteTokenizer())


class Tokens(HTMLParser):
    """Collects (kind, text) of every token, and the `data-about` of every chunk."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens: list[tuple[str, str]] = []
        self.about: list[str] = []
        self.links: list[str] = []
        self._open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.links += [v for k, v in attrs if k in ("src", "href") and v]
        if tag == "span":
            self._open.append(values.get("class") or "")
            if "data-about" in values:
                self.about.append(values["data-about"] or "")
                assert values["tabindex"] == "0", "a chunk can be reached without a mouse"
            elif self._open[-1].startswith("t "):
                self.tokens.append((self._open[-1][2:], ""))

    def handle_endtag(self, tag: str) -> None:
        if tag == "span":
            self._open.pop()

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1].startswith("t "):
            kind, text = self.tokens[-1]
            self.tokens[-1] = (kind, text + data)


def parse(chunks: tuple[MappedChunk, ...]) -> Tokens:
    parser = Tokens()
    parser.feed(render_page(chunks, "A <title>", [("request", "gain"), ("<cold>", "1.0x")]))
    return parser


def test_the_page_holds_every_token_once_in_order(chunks: tuple[MappedChunk, ...]) -> None:
    tokens = parse(chunks).tokens
    assert len(tokens) == len(IDS)
    assert "".join(text for _, text in tokens) == TEXT


def test_the_classes_of_the_tokens_are_the_kinds_of_the_plan(chunks: tuple[MappedChunk, ...]) -> None:
    expected = [s.kind.value for s in PLAN for _ in range(len(s.span))]
    for row in PLAN.repaired:
        expected[row] = "repaired"
    assert [kind for kind, _ in parse(chunks).tokens] == expected


def test_every_chunk_tells_its_source_position_and_shift(chunks: tuple[MappedChunk, ...]) -> None:
    about = parse(chunks).about
    assert len(about) == len(PLAN.segments)
    assert "computed at position 109, moved by -100; 3 computed again" in about[2]
    assert "computed for this prompt" in about[3]


def test_the_page_needs_no_network_and_no_script(chunks: tuple[MappedChunk, ...]) -> None:
    page = render_page(chunks, "A <title>")
    assert parse(chunks).links == []
    assert "<script" not in page
    assert "url(" not in page
    assert "@import" not in page
    assert "A &lt;title&gt;" in page
    assert TEXT not in unescape(page).replace("</span>", ""), "each token stands in its own element"


def test_a_character_of_several_tokens_belongs_to_its_last_one() -> None:
    assert token_texts(list("é!".encode()), ByteTokenizer()) == ["", "é", "!"]


def test_bytes_that_are_no_text_do_not_swallow_the_rest() -> None:
    texts = token_texts([*[0xFF] * 12, *b"ok"], ByteTokenizer())
    assert len(texts) == 14
    assert "".join(texts).endswith("ok")


def test_leading_spaces_survive_tokenizers_that_drop_them() -> None:
    assert "".join(token_texts([0, 1, 2, 3, 4], SpaceEater())) == "once upon" + "ly a time"


def test_ids_of_another_prompt_are_refused() -> None:
    with pytest.raises(ValueError, match="token ids"):
        make_token_map(PLAN, IDS[:-1], ByteTokenizer())


def test_the_terminal_shows_one_letter_per_token_without_colour(chunks: tuple[MappedChunk, ...]) -> None:
    console = Console(file=StringIO(), width=200, no_color=True, color_system=None)
    console.print(TokenStrip(chunks))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    fresh = len(IDS) - 20
    assert "EEEECCCCCRRMMMMRMMMM" + "F" * fresh in text
    assert "-100" in text
