"""Names: what must differ does, what must agree does."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvboost.keys import ANCHOR_TOKENS, ANCHOR_WINDOW, KeySpace
from kvboost.store.records import Seal
from kvboost.types import Int32Array

TOKENS = st.lists(st.integers(0, 2**20), max_size=120).map(lambda x: np.array(x, np.int32))


def space(secret: str = "s", fingerprint: bytes = b"f", namespace: str = "n", regime: str = "0") -> KeySpace:
    return KeySpace(secret=secret, fingerprint=fingerprint, namespace=namespace, regime=regime)


def test_every_part_of_the_root_separates_all_names() -> None:
    tokens = np.arange(40, dtype=np.int32)
    spaces = [
        space(),
        space(secret="t"),
        space(fingerprint=b"g"),
        space(namespace="m"),
        space(regime="1"),
        space(fingerprint=b"fn", namespace=""),
        space(fingerprint=b"", namespace="fn"),
    ]
    for names in (
        [s.content_hash(tokens) for s in spaces],
        [s.history(tokens).prefix_hash(40) for s in spaces],
        [s.anchors(tokens)[0][1] for s in spaces],
    ):
        assert len(set(names)) == len(spaces)


def test_a_history_and_a_text_of_the_same_tokens_have_different_names() -> None:
    tokens = np.arange(20, dtype=np.int32)
    assert space().content_hash(tokens) != space().history(tokens).prefix_hash(20)


@given(TOKENS, st.data())
def test_prefix_hashes_depend_on_the_tokens_alone(tokens: Int32Array, data: st.DataObject) -> None:
    stops = data.draw(st.lists(st.integers(0, len(tokens)), max_size=8))
    history = space().history(tokens)
    for stop in stops:
        assert history.prefix_hash(stop) == space().history(tokens[:stop]).prefix_hash(stop)


@given(TOKENS, TOKENS)
def test_different_tokens_have_different_names(a: Int32Array, b: Int32Array) -> None:
    same = a.tolist() == b.tolist()
    assert (space().content_hash(a) == space().content_hash(b)) is same
    assert (space().history(a).prefix_hash(len(a)) == space().history(b).prefix_hash(len(b))) is same


RUN = ANCHOR_TOKENS + ANCHOR_WINDOW - 1


@given(TOKENS, TOKENS, st.integers(0, 2**32 - 1), TOKENS, TOKENS)
def test_texts_that_share_a_run_share_an_anchor_inside_it(
    a: Int32Array, b: Int32Array, seed: int, c: Int32Array, d: Int32Array
) -> None:
    run = np.random.default_rng(seed).integers(0, 50, RUN).astype(np.int32)
    first, second = np.concatenate([a, run, b]), np.concatenate([c, run, d])
    inside = [
        {name for at, name in space().anchors(text) if start <= at <= start + RUN - ANCHOR_TOKENS}
        for text, start in ((first, len(a)), (second, len(c)))
    ]
    assert inside[0] & inside[1]


@given(st.lists(st.integers(0, 3), max_size=300).map(lambda x: np.array(x, np.int32)))
def test_anchors_are_windows_of_the_text_in_order(tokens: Int32Array) -> None:
    anchors = space().anchors(tokens)
    offsets = [at for at, _ in anchors]
    assert offsets == sorted(set(offsets))
    assert all(0 <= at <= len(tokens) - ANCHOR_TOKENS for at in offsets)
    by_window: dict[tuple[int, ...], bytes] = {}
    for at, name in anchors:
        assert by_window.setdefault(tuple(tokens[at : at + ANCHOR_TOKENS].tolist()), name) == name


def test_any_text_can_be_a_namespace_or_a_secret() -> None:
    """Half of a surrogate pair is what JSON may hold, and what an environment that is not UTF-8 gives."""
    assert len({space(secret="\ud800").root, space(namespace="\ud800").root, space().root}) == 3
    Seal("\udc80")
