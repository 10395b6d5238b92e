"""With `share_moved` session, what was computed behind one session's own text is not served to another's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from families import build, random_ids
from kvboost import KVBoost
from kvboost.types import DECLARED, Kind, Lineage
from scenario import DOCUMENTS, QUESTION, SYSTEM, engine, greedy, join

DOCUMENT = join(*DOCUMENTS[:2])
LIVE = 16 - QUESTION.shape[1]  # tokens in front of the question that are never moved
PRIVATE = {"ann": random_ids(60, seed=71), "bob": random_ids(53, seed=72)}


@pytest.fixture
def kv() -> KVBoost:
    return engine(build("llama"), share_moved="session")


def ask(kv: KVBoost, ids: torch.Tensor, session: str, **request: Any) -> Any:
    return greedy(kv.generate, ids, 2, session=session, **request).report


def test_a_document_captured_behind_private_text_is_not_moved_into_another_session(kv: KVBoost) -> None:
    ask(kv, join(PRIVATE["ann"], DOCUMENT, QUESTION), "ann")
    elsewhere = join(PRIVATE["bob"], DOCUMENT, QUESTION)
    assert kv.plan(elsewhere, session="bob").count(Kind.MOVED) == 0
    assert kv.plan(elsewhere, session="ann").count(Kind.MOVED) >= len(DOCUMENT[0]) - LIVE
    assert kv.plan(elsewhere, session="bob", share_moved="namespace").count(Kind.MOVED) >= len(DOCUMENT[0]) - LIVE


def test_sharing_by_namespace_is_the_default_of_the_library() -> None:
    kv = engine(build("llama"))
    ask(kv, join(PRIVATE["ann"], DOCUMENT, QUESTION), "ann")
    assert kv.plan(join(PRIVATE["bob"], DOCUMENT, QUESTION)).count(Kind.MOVED) >= len(DOCUMENT[0]) - LIVE


def test_requests_without_a_session_share_nothing_moved_with_one_another(kv: KVBoost) -> None:
    ask(kv, join(PRIVATE["ann"], DOCUMENT, QUESTION), "")
    assert kv.plan(join(PRIVATE["bob"], DOCUMENT, QUESTION), session="").count(Kind.MOVED) == 0


def test_what_came_of_moved_rows_is_not_continued_by_another_session_of_equal_history(kv: KVBoost) -> None:
    """The link under a public history leads to rows that saw private text."""
    public = join(SYSTEM, DOCUMENT, QUESTION)
    ask(kv, join(PRIVATE["ann"], DOCUMENT, QUESTION), "ann")
    assert ask(kv, public, "ann").moved_tokens > 80
    assert kv.plan(public, session="ann").count(Kind.CONTINUED) > 80
    seen_by_bob = kv.plan(public, session="bob")
    assert seen_by_bob.count(Kind.CONTINUED) == seen_by_bob.count(Kind.MOVED) == 0


def test_equal_histories_that_were_computed_in_full_are_shared(kv: KVBoost) -> None:
    public = join(SYSTEM, DOCUMENT, QUESTION)
    ask(kv, public, "ann")
    assert kv.plan(public, session="bob").count(Kind.EXACT) == public.shape[1] - 1


class Letters:
    """A tokenizer of one id per character."""

    def __call__(self, text: str, **kwargs: Any) -> Any:
        return SimpleNamespace(input_ids=[5 + ord(c) % 90 for c in text])

    def decode(self, ids: list[int], **kwargs: Any) -> str:
        return "".join(chr(32 + i) for i in ids)


TEXT = "Refunds are paid within thirty days if the seal is whole. Nobody pays for broken seals, or for late parcels. "
CONTEXT = "You answer questions about the rules of a shop, and about nothing else. "


def letters(kv: KVBoost, text: str) -> torch.Tensor:
    return torch.tensor([kv.tokenizer(text).input_ids])


def test_a_warmed_text_is_moved_into_every_session(kv: KVBoost) -> None:
    kv.tokenizer = Letters()
    kv.warm(TEXT, CONTEXT)
    moved = kv.plan(join(PRIVATE["bob"], letters(kv, TEXT), QUESTION), session="bob").count(Kind.MOVED)
    assert moved >= len(TEXT) - LIVE


def test_a_text_that_somebody_computed_first_is_declared_by_warming_it(kv: KVBoost) -> None:
    kv.tokenizer = Letters()
    ask(kv, join(letters(kv, CONTEXT + TEXT), QUESTION), "ann")
    elsewhere = join(PRIVATE["bob"], letters(kv, TEXT), QUESTION)
    kv.warm(TEXT, CONTEXT)
    assert kv.plan(elsewhere, session="bob").count(Kind.MOVED) >= len(TEXT) - LIVE
    headers = [r.header for r in kv.store.tiers[0]._records.values()]  # type: ignore[attr-defined]
    assert any(h.session == DECLARED for h in headers)


def test_a_document_right_behind_declared_text_is_moved_whole_but_never_in_part(kv: KVBoost) -> None:
    """Its rows saw nothing but declared text and itself; the rows of its end saw its beginning."""
    kv.tokenizer = Letters()
    kv.warm(TEXT, CONTEXT)
    ask(kv, join(letters(kv, CONTEXT + TEXT), DOCUMENT, QUESTION), "ann")
    assert kv.plan(join(PRIVATE["bob"], DOCUMENT, QUESTION), session="bob").count(Kind.MOVED) >= len(DOCUMENT[0]) - LIVE
    assert kv.plan(join(PRIVATE["bob"], DOCUMENT[:, 5:], QUESTION), session="bob").count(Kind.MOVED) == 0


def test_a_record_at_the_very_beginning_is_not_moved_in_part(kv: KVBoost) -> None:
    secret = PRIVATE["ann"][:, :6]
    ask(kv, join(secret, DOCUMENT, QUESTION), "ann", chunk_boundaries=(80,), chunk_max_tokens=80, chunk_avg_tokens=80)
    plan = kv.plan(join(PRIVATE["bob"], DOCUMENT, QUESTION), session="bob")
    assert plan.count(Kind.MOVED) == 0


parts = st.lists(st.sampled_from(["0", "1", "2", "own"]), min_size=1, max_size=4)


@given(st.lists(st.tuples(st.sampled_from(["ann", "bob", ""]), parts), min_size=2, max_size=6))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_no_row_that_saw_another_session_s_text_is_ever_served(traffic: list[tuple[str, list[str]]]) -> None:
    kv = engine(build("llama"), share_moved="session", min_prefix_share=0.0)
    own = {"ann": 150, "bob": 160, "": 170}  # private text is made of ten ids that nobody else uses
    histories: dict[bytes, set[int]] = {}
    for turn, (session, names) in enumerate(traffic):
        private = torch.tensor([[own[session] + (turn + i) % 10 for i in range(40)]])
        texts = [private if n == "own" else DOCUMENTS[int(n)].clamp(max=149) for n in names]
        ids = join(SYSTEM.clamp(max=149), *texts, QUESTION.clamp(max=149))
        headers = {i: r.header for i, r in kv.store.tiers[0]._records.items()}  # type: ignore[attr-defined]
        for segment in kv.plan(ids, session=session):
            if segment.kind in (Kind.MOVED, Kind.CONTINUED):
                header = headers[segment.record_id or b""]
                foreign = {t // 10 * 10 for t in histories[header.parent] if t >= 150} - {own[session]}
                assert not foreign, "rows behind another's private text"
                mine = kv._naming.keys(1, kv.settings(session=session)).session
                assert header.lineage is not Lineage.APPROXIMATE or (header.session == mine and session)
        out = greedy(kv.generate, ids, 1, session=session)
        tokens = [*ids[0].tolist(), *out.token_ids]
        names_of = kv._naming.keys(1, kv.settings()).history(torch.tensor(tokens).int().numpy())
        for stop in range(len(tokens) + 1):
            histories[names_of.prefix_hash(stop)] = set(tokens[:stop])
