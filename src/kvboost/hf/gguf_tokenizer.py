"""The tokenizer that a GGUF file describes, built from its own metadata.

transformers reads it differently from release to release: 4.57 adds a start token that SmolLM2 does not have and cuts
Gemma's text as if its vocabulary were a unigram model (twice the tokens, perplexity 107 instead of 9), and no release
cuts digits for SmolLM2. Built here, the ids are the same everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

_CONTROL, _USER_DEFINED = 3, 4  # token types of GGUF that are matched in the text before everything else
_WORD_START = "\u2581"  # how SentencePiece writes a space


def read_tokenizer(gguf: Path) -> PreTrainedTokenizerFast:
    """Read vocabulary, merges, special tokens and chat template; the weights are not touched.

    Raises `ValueError` for a vocabulary of a kind that no embedded model has.
    """
    meta = _metadata(gguf)
    tokens: list[str] = meta["tokens"]
    build = {("gpt2", "smollm"): _byte_level, ("llama", "default"): _sentence_pieces}.get((meta["model"], meta["pre"]))
    if build is None:
        raise ValueError(f"vocabulary of the unknown kind {meta['model']!r} / {meta['pre']!r}")
    tokenizer = build(tokens, meta)
    types = meta["token_type"]
    tokenizer.add_special_tokens(_added(tokens, types, _CONTROL, special=True))
    tokenizer.add_tokens(_added(tokens, types, _USER_DEFINED, special=False))
    bos = tokens[meta["bos_token_id"]]
    if meta["add_bos_token"]:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", f"{bos}:1", "$B:1"], special_tokens=[(bos, meta["bos_token_id"])]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=bos,
        eos_token=tokens[meta["eos_token_id"]],
        unk_token=tokens[meta["unknown_token_id"]],
        pad_token=tokens[meta["padding_token_id"]],
        chat_template=meta.get("chat_template"),
        model_input_names=["input_ids", "attention_mask"],  # 4.57 adds token_type_ids, which decoders refuse
        clean_up_tokenization_spaces=False,
    )


def _metadata(gguf: Path) -> dict[str, Any]:
    """The fields under `tokenizer.`, by the last part of their names."""
    from gguf import GGUFReader  # an optional extra

    fields = GGUFReader(gguf).fields
    return {name.rsplit(".", 1)[1]: f.contents() for name, f in fields.items() if name.startswith("tokenizer.")}


def _added(tokens: Sequence[str], types: Sequence[int], kind: int, *, special: bool) -> list[AddedToken]:
    return [AddedToken(t, special=special, normalized=False) for t, k in zip(tokens, types, strict=True) if k == kind]


def _byte_level(tokens: Sequence[str], meta: dict[str, Any]) -> Tokenizer:
    """Byte-level BPE in which every digit is a word of its own."""
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [tuple(m.split(" ")) for m in meta["merges"]]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_pieces(tokens: Sequence[str], meta: dict[str, Any]) -> Tokenizer:
    """SentencePiece BPE with byte fallback."""
    vocabulary = {token: i for i, token in enumerate(tokens)}
    merges = _merges_by_score(vocabulary, meta["scores"])
    unknown = tokens[meta["unknown_token_id"]]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", _WORD_START)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_WORD_START, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def _merges_by_score(vocabulary: dict[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """SentencePiece joins whichever pair makes the piece of the highest score; as merges, that is every way to cut
    every piece in two, pieces of high score first.
    """
    merges: list[tuple[str, str]] = []
    for piece in sorted(vocabulary, key=lambda p: (-scores[vocabulary[p]], vocabulary[p])):
        pairs = [(piece[:i], piece[i:]) for i in range(1, len(piece))]
        known = [pair for pair in pairs if pair[0] in vocabulary and pair[1] in vocabulary]
        merges += sorted(known, key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
    return merges
