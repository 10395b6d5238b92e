"""Who asks: API keys, and the namespaces and sessions that keep what one has cached from another.

A keys file has one line per key: a tenant's name, and the hash of the key. A tenant may have several keys.

    # name      hash of the key
    search      sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08
    billing     blake3:4878ca0425c739fa427f7eda20fe845f6b2e46ba5fe2a14df5b1e32f50603215
"""

from __future__ import annotations

import hashlib
import logging
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from kvboost.errors import SettingsError
from kvboost.server.errors import ApiError

logger = logging.getLogger("kvboost.server")

_LINE = re.compile(r"(?P<name>[A-Za-z0-9_.@-]{1,64})\s+(?P<hash>sha256|blake3):(?P<digest>[0-9a-fA-F]{64})")


@dataclass(frozen=True, slots=True)
class Caller:
    """Who a request is from: `tenant`, and the digest of the key it used. Both are empty without a keys file."""

    tenant: str = ""
    key_digest: str = ""


class Tenants:
    """The keys that are accepted, read again when their file changes. A bad file keeps the keys that were in force."""

    def __init__(self, path: Path | None) -> None:
        """Raises `SettingsError` if the file cannot be read or has a bad line."""
        self._path = path
        self._lock = threading.Lock()
        self._seen = self._stamp()
        self._tenants = {} if path is None else read_keys(path)
        if path is None:
            logger.warning("no API keys are asked for: everybody is one tenant and shares one cache")

    def caller(self, authorization: str | None) -> Caller:
        """Who the header `Authorization: Bearer KEY` stands for. Raises a 401 for a key that is not known."""
        if self._path is None:
            return Caller()
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise _unauthorized("you did not provide an API key; send the header Authorization: Bearer KEY")
        for name, digest in _digests(key.strip()).items():
            tenant = self._current().get(f"{name}:{digest}")
            if tenant is not None:
                return Caller(tenant, digest)
        raise _unauthorized("the API key is not known to this server")

    def _current(self) -> Mapping[str, str]:
        """The keys in force, after a look at the file."""
        with self._lock:
            stamp = self._stamp()
            if self._path is not None and stamp != self._seen:
                self._seen = stamp
                try:
                    self._tenants = read_keys(self._path)
                except SettingsError as error:
                    logger.error("the keys in force stay: %s", error)
            return self._tenants

    def _stamp(self) -> tuple[int, int, int] | None:
        """What changes when the file does; a link is followed, as ConfigMaps and Secrets are swapped by one."""
        try:
            status = None if self._path is None else self._path.stat()
        except OSError:
            return None
        return None if status is None else (status.st_ino, status.st_mtime_ns, status.st_size)


class Namespaces:
    """Names under which the engine keeps tenants and sessions apart: keyed hashes, so none can be chosen to meet."""

    def __init__(self, secret: str, base: str) -> None:
        """`secret` keys the names, so that servers with one secret share a store; `base` is the server's own salt."""
        self._key = blake3(secret.encode(), derive_key_context="kvboost 2026 server namespaces").digest()
        self._base = base

    def salt(self, caller: Caller, cache_salt: str | None) -> str:
        """The engine's `cache_salt`: the server's own if there is nothing to keep apart."""
        if not caller.tenant and not cache_salt:
            return self._base
        return self._name("salt", self._base, caller.tenant, cache_salt or "")

    def session(self, caller: Caller, session: str | None, user: str | None) -> str:
        """The session: what the header says, else the body's `user`, else the API key; without keys, everybody."""
        kind, name = ("session", session) if session else ("user", user) if user else ("key", caller.key_digest)
        return self._name(kind, caller.tenant, name)

    def _name(self, *parts: str) -> str:
        hasher = blake3(key=self._key)
        for part in parts:
            data = part.encode()
            hasher.update(len(data).to_bytes(8, "little") + data)
        return hasher.hexdigest(16)


def read_keys(path: Path) -> dict[str, str]:
    """Tenant by `algorithm:digest`. Raises `SettingsError` that names the line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"cannot read the API keys in {str(path)!r}: {error}") from None
    tenants: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        match = _LINE.fullmatch(text)
        if text and match is None:
            raise SettingsError(
                f"line {number} of {str(path)!r} is no API key; write a name and sha256: or blake3: and the key's hash"
            )
        if match is not None:
            tenants[f"{match['hash']}:{match['digest'].lower()}"] = match["name"]
    return tenants


def _digests(key: str) -> dict[str, str]:
    """The hashes of a key as they may stand in the file. Keys are long and random, so a plain hash hides them."""
    data = key.encode("utf-8", "surrogateescape")
    return {"sha256": hashlib.sha256(data).hexdigest(), "blake3": blake3(data).hexdigest()}


def _unauthorized(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
