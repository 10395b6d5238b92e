"""Settings: what they are, and which source of them wins.

The only module that reads the environment. Order, highest first: request > admin > file > environment > flag > default.
The environment is read at every call, so a change takes effect on the next request. The kill switch is the OR of all
sources. What changes while an engine runs, by the admin API or a watched file, `kvboost.live` knows.
"""

from __future__ import annotations

import difflib
import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, model_validator

from kvboost.errors import InputError, SettingsError
from kvboost.units import Bytes, Seconds

ENV_PREFIX = "KVBOOST_"
SINK_TOKENS = 32  # rows at these first positions carry the model's attention sink: never moved from, never moved to
FIXED = frozenset(  # settings that an engine reads once, when it is made
    {
        "cache_bytes",
        "kv_cache_size_ratio",
        "namespace_bytes",
        "disk_directory",
        "disk_bytes",
        "redis_url",
        "redis_ttl_s",
        "redis_timeout_s",
        "redis_ca_file",
        "encrypt",
        "write_queue_bytes",
        "settings_file",
        "hash_secret",
    }
)


class Settings(BaseModel):
    """All settings, validated. Environment names are `KVBOOST_` and the field in capitals."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    disable: bool = Field(False, description="Kill switch: every request goes straight to Hugging Face.")
    mode: Literal["off", "observe", "exact", "on"] = Field(
        "on",
        description="off: plain HF. observe: plan and report, serve nothing. exact: EXACT hits only. on: all kinds.",
    )
    fidelity: Literal["exact", "balanced", "fast"] = Field(
        "balanced",
        description="exact never uses moved or inexact rows; the others bound their error.",
    )
    enabled_share: float = Field(
        1.0, ge=0, le=1, description="Server: share of the requests without x-kvboost-enabled that use the cache."
    )
    gate: bool = Field(True, description="Estimate how far off a moved prompt is; above the bound, compute more.")
    risk_bound: float | None = Field(
        None, ge=0, description="Largest estimated KL (nat per token) that is served; replaces the bound of `fidelity`."
    )
    shadow_share: float = Field(
        0.0, ge=0, le=1, description="Share of the requests with inexact rows that are checked in full afterwards."
    )
    recompute_strategy: Literal["none", "selective", "cacheblend", "epic", "guided"] = Field(
        "guided", description="Which rows of moved text are recomputed."
    )
    recompute_ratio: float | None = Field(
        None, ge=0, le=1, description="Share of the moved rows to recompute, probes included; replaces TOPK and HEAD."
    )
    recompute_head_tokens: int = Field(8, ge=0, description="epic: rows recomputed at the head of each moved run.")
    recompute_topk: int = Field(4, ge=0, description="cacheblend: at most so many rows of each moved chunk.")
    recompute_boundary_tokens: int = Field(
        4, ge=0, description="selective: rows at each end of a moved run that may be recomputed."
    )
    entropy_threshold: float = Field(
        0.5, ge=0, le=1, description="selective: rows whose attention entropy exceeds this share of log n."
    )
    deviation_threshold: float = Field(
        0.15,
        ge=0,
        description="cacheblend: rows whose score exceeds this (nat; or times the prompt's mean for values).",
    )
    deviation_score: Literal["attention", "values"] = Field(
        "attention", description="cacheblend: KL of attention distributions, or squared L2 of values."
    )
    sample_step: int = Field(
        25, ge=0, description="guided: every so many moved rows one is recomputed as a sample; 0 for none."
    )
    check_layer: int = Field(1, ge=0, description="cacheblend: the layer at which rows are scored.")
    chunker: Literal["content", "fixed", "semantic"] = Field("content", description="How new text is cut into chunks.")
    chunk_min_tokens: int = Field(32, ge=1, description="Smallest chunk that a rolling-hash cut may leave.")
    chunk_avg_tokens: int = Field(
        128, ge=1, description="Mean distance of rolling-hash cuts; the size of fixed chunks."
    )
    chunk_max_tokens: int = Field(256, ge=1, description="Largest chunk.")
    chunk_boundaries: tuple[int, ...] = Field((), description="Token offsets where this request's text is cut first.")
    cache_bytes: Bytes | None = Field(
        None, ge=0, description="Memory budget, all metadata counted; unset: by kv_cache_size_ratio."
    )
    kv_cache_size_ratio: float = Field(
        0.35,
        ge=0,
        le=1,
        description="Memory budget as a share: of the GPU's memory; on a CPU, of what the weights leave.",
    )
    namespace_bytes: Bytes | None = Field(
        None, ge=0, description="The most that one namespace (cache_salt) may keep in memory; unset: all."
    )
    disk_directory: str = Field(
        "", description="Keeps chunks in this directory too, across restarts; shared by processes."
    )
    disk_bytes: Bytes = Field(16 << 30, ge=0, description="Size of the disk tier, index counted.")
    redis_url: SecretStr = Field(
        SecretStr(""), description="Keeps chunks in this Redis or Valkey too (redis://, rediss://)."
    )
    redis_ttl_s: Seconds = Field(
        7 * 86400.0, gt=0, description="A chunk in Redis goes when it was not used for so long."
    )
    redis_timeout_s: Seconds = Field(
        0.25, gt=0, description="What a request waits for Redis at most, before it computes."
    )
    redis_ca_file: str = Field("", description="Certificates that a rediss:// server is checked against.")
    encrypt: bool = Field(False, description="Encrypt what disk and Redis hold (AES-GCM, key from hash_secret).")
    write_queue_bytes: Bytes = Field(
        256 << 20, ge=0, description="Chunks on their way to disk and Redis; more are dropped."
    )
    codec: Literal["none", "int8", "k8v4"] = Field(
        "none",
        description="How this request's new rows are kept: as computed; keys and values in 8 bits; keys 8, values 4.",
    )
    max_variants: int = Field(4, ge=1, description="Copies of one text, computed in different contexts, that are kept.")
    anchors: bool = Field(True, description="Find moved text by sampled token windows too, not by whole chunks only.")
    min_run_tokens: int = Field(16, ge=1, description="Moved runs shorter than this are computed: loading costs more.")
    min_moved_share: float = Field(
        0.05, ge=0, le=1, description="Moved reuse below this share of a prompt is not taken."
    )
    min_prefix_share: float = Field(
        0.1,
        ge=0,
        le=1,
        description="A reused prefix below this share of a long prompt is not taken: it would cost time.",
    )
    live_suffix_tokens: int = Field(16, ge=1, description="Tokens at the end of a prompt that are never moved.")
    query_block_tokens: int = Field(128, ge=1, description="Query rows per attention block of the selective forward.")
    prefill_block_tokens: int = Field(8192, ge=1, description="Longer prompts are prefilled in blocks of this size.")
    continuation_block_tokens: int = Field(
        512, ge=1, description="Rows behind a reused prefix are prefilled in blocks of this size."
    )
    cache_salt: str = Field("", description="Namespace: requests with different salts never share anything.")
    share_moved: Literal["namespace", "session"] = Field(
        "namespace",
        description="session: text captured behind one session's own text is not moved into another's; warmed text is.",
    )
    session: str = Field(
        "", description="Whose request it is, for share_moved; unset: a session of its own, over with the request."
    )
    hash_secret: SecretStr = Field(SecretStr(""), description="Keys the hashes; equal secrets can share a remote tier.")
    settings_file: str = Field(
        "", description="File of KVBOOST_NAME=value lines, or a directory of such files (a ConfigMap), that is watched."
    )

    @model_validator(mode="after")
    def _ordered_chunk_sizes(self) -> Settings:
        if not self.chunk_min_tokens <= self.chunk_avg_tokens <= self.chunk_max_tokens:
            raise ValueError(
                "chunk sizes must satisfy chunk_min_tokens <= chunk_avg_tokens <= chunk_max_tokens, got "
                f"{self.chunk_min_tokens} / {self.chunk_avg_tokens} / {self.chunk_max_tokens}"
            )
        return self

    @property
    def enabled(self) -> bool:
        """False when the request must go straight to Hugging Face."""
        return not self.disable and self.mode != "off"

    @property
    def exact_only(self) -> bool:
        """True when moved and inexact rows must not be served."""
        return self.fidelity == "exact" or self.mode == "exact"


SECRETS = frozenset(name for name, field in Settings.model_fields.items() if field.annotation is SecretStr)


@dataclass(frozen=True, slots=True)
class Resolved:
    """Effective settings and, per field, the source that won: `request`, `admin`, `file`, `environment`, ..."""

    settings: Settings
    origins: Mapping[str, str]


def resolve(
    flags: Mapping[str, Any] | None = None,
    request: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    *,
    file: Mapping[str, Any] | None = None,
    admin: Mapping[str, Any] | None = None,
) -> Resolved:
    """Merge the sources by precedence and validate.

    Raises `SettingsError` that names the field, the value and its source.
    """
    refuse_fixed(request or {}, "a request")
    by_origin = {"flag": flags, "environment": from_environment(environ), "file": file, "admin": admin}
    sources = {origin: dict(source or {}) for origin, source in {**by_origin, "request": request}.items()}
    for origin, source in sources.items():  # first: nothing else that is wrong may keep the switch from acting
        if "disable" in source and _validate({"disable": source["disable"]}, {"disable": origin}).disable:
            return Resolved(Settings(disable=True), {**_origins(sources), "disable": origin})
    return merge(sources)


def merge(sources: Mapping[str, Mapping[str, Any]]) -> Resolved:
    """Merges sources by their names, the lowest first, and validates all of them, whatever the kill switch says.

    Raises `SettingsError`.
    """
    origins = _origins(sources)
    values = {name: value for source in sources.values() for name, value in source.items()}
    return Resolved(_validate(values, origins), origins)


def from_environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Settings that the environment gives, unchecked."""
    env = os.environ if environ is None else environ
    return {name: env[key] for name in Settings.model_fields if (key := env_name(name)) in env}


def env_name(name: str) -> str:
    """The variable of a setting."""
    return ENV_PREFIX + name.upper()


def refuse_fixed(names: Iterable[str], by: str) -> None:
    """Raises `SettingsError` for a setting that cannot be changed while the engine runs."""
    fixed = min(FIXED.intersection(names), default=None)
    if fixed is not None:
        raise SettingsError(f"setting {fixed} is read when the engine is made and cannot be changed by {by}", fixed)


def uses_cache(settings: Settings, request_id: str, header: str | None = None) -> bool:
    """Whether a request of the server uses the cache: its header decides, else a draw by `enabled_share`.

    The draw depends on the id alone, so a retry is served alike, and a larger share keeps all that a smaller one drew.
    The kill switch beats the header. Raises `InputError` for a header that is neither true nor false.
    """
    wanted = {"true": True, "1": True, "false": False, "0": False, None: None}
    given = header.strip().lower() if header is not None else None
    if given not in wanted:
        raise InputError("the header x-kvboost-enabled has to be true or false")
    if not settings.enabled or wanted[given] is not None:
        return settings.enabled and bool(wanted[given])
    drawn = int.from_bytes(hashlib.blake2b(request_id.encode(), digest_size=8).digest(), "big")
    return drawn < settings.enabled_share * 2**64


def unknown_environment(environ: Mapping[str, str] | None = None) -> list[str]:
    """A sentence for every environment variable that looks like a setting and is none; a typo has no effect."""
    known = {env_name(name): None for name in Settings.model_fields}
    given = [key for key in (os.environ if environ is None else environ) if key.startswith(ENV_PREFIX)]
    return [no_setting(key, key.removeprefix(ENV_PREFIX).lower(), env_name) for key in given if key not in known]


def no_setting(shown: str, name: str, spell: Callable[[str], str] = str) -> str:
    """Says that `shown` is no setting, and which one of a name like `name` may be meant, as `spell` writes it."""
    near = difflib.get_close_matches(name, Settings.model_fields, 1)
    return f"{shown} is no setting{f'; did you mean {spell(near[0])}?' if near else ''}"


def _origins(sources: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    given = {name: origin for origin, source in sources.items() for name in source}
    return {**dict.fromkeys(Settings.model_fields, "default"), **given}


def _validate(values: Mapping[str, Any], origins: Mapping[str, str]) -> Settings:
    try:
        return Settings(**values)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]) if first["loc"] else ""
        if not name:
            raise SettingsError(first["msg"]) from None
        origin = origins.get(name, "flag")
        shown = env_name(name) if origin in ("environment", "file") else name
        if name not in Settings.model_fields:
            told = no_setting(f"{shown} (from {origin})", name)
            known = "" if told.endswith("?") else f". Known settings: {', '.join(Settings.model_fields)}."
            raise SettingsError(told + known, name) from None
        value = "a secret" if name in SECRETS else repr(first["input"])
        raise SettingsError(
            f"setting {shown} (from {origin}) has the invalid value {value}: {first['msg']}.", name
        ) from None
