"""The way to a Redis or Valkey server: how it is reached, how long a call may take, what its failures are called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from kvboost.errors import SettingsError
from kvboost.store.breaker import Breaker
from kvboost.store.lane import Lane
from kvboost.store.trouble import Trouble

if TYPE_CHECKING:
    import redis

INSTALL = "pip install '.[redis]' in the checkout"
PEER_FAILED = frozenset({"timeout", "unreachable", "refused"})  # open the breaker; the others concern one call
T = TypeVar("T")


def connect(
    url: str, *, timeout_s: float, username: str | None = None, password: str | None = None, ca_file: str | None = None
) -> redis.Redis:
    """A client of `redis://`, `rediss://` (TLS) or `unix://`; nothing is sent yet.

    User name and password of the URL win over the arguments. `ca_file` holds the certificates that TLS trusts, unset
    those of the system. What else the URL's query names goes to the client (`?ssl_certfile=...&ssl_keyfile=...`).
    Raises `SettingsError` if the package `redis` is missing or the URL is none.
    """
    try:
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry
    except ImportError:
        raise SettingsError(f"a Redis tier needs the package redis: {INSTALL}") from None
    arguments: dict[str, Any] = {
        "username": username,
        "password": password,
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "retry": Retry(NoBackoff(), 0),  # the breaker decides when to try again
        "socket_read_size": 1 << 20,  # payloads are megabytes; the default of 32 KiB takes six times as long
        "protocol": 2,  # what every server speaks
    }
    try:
        if urlsplit(url).scheme == "rediss":
            arguments |= {"ssl_ca_certs": ca_file, "ssl_cert_reqs": "required", "ssl_check_hostname": True}
        return redis.Redis.from_url(url, **arguments)
    except (ValueError, TypeError):  # their messages may show a part of the password
        raise SettingsError(
            "the URL of the Redis tier is invalid; it reads redis://[[user]:password@]host[:port][/db], rediss:// for "
            "TLS, or unix://path, with special characters of a password percent-encoded"
        ) from None


def address(client: redis.Redis) -> str:
    """Where a client connects to, without user name and password."""
    to = client.connection_pool.connection_kwargs
    return (
        str(to["path"]) if "path" in to else f"{to.get('host', 'localhost')}:{to.get('port', 6379)}/{to.get('db', 0)}"
    )


def kind_of(error: Exception) -> str:
    """What a failure is counted as."""
    from redis import exceptions

    if isinstance(error, TimeoutError | exceptions.TimeoutError):
        return "timeout"
    if isinstance(error, exceptions.AuthenticationError):
        return "refused"
    if isinstance(error, exceptions.NoPermissionError):
        return "permission"
    if isinstance(error, exceptions.ConnectionError | OSError):
        return "unreachable"
    if isinstance(error, exceptions.OutOfMemoryError):
        return "full"
    if isinstance(error, exceptions.ReadOnlyError):
        return "read_only"
    text = str(error)
    if text.startswith("NOAUTH"):
        return "refused"
    return "damaged" if text.startswith("WRONGTYPE") else "failed"


class Line:
    """Calls to one server, each bounded in time and answered whatever happens. Thread-safe."""

    def __init__(self, client: redis.Redis, timeout_s: float, breaker: Breaker) -> None:
        self._client = client
        self._timeout_s = timeout_s
        self._breaker = breaker
        self._lane = Lane("kvboost-redis")
        self._trouble = Trouble("redis")
        self._closed = False

    @property
    def errors(self) -> Mapping[str, int]:
        """Failures by kind; `open` are calls that were not tried."""
        return self._trouble.counts()

    def note(self, kind: str, message: object) -> None:
        """Counts, and now and then logs, what the caller found in an answer."""
        self._trouble.note(kind, message)

    def call(self, action: Callable[[], T], otherwise: T, more_s: float = 0.0) -> T:
        """What `action` returns; `otherwise` if it fails, takes longer than the timeout and `more_s`, or is not tried.

        `action` runs in another thread, and goes on there if it is too late: it must not touch what the caller uses.
        """
        if self._closed or not self._breaker.allows():
            kind = "closed" if self._closed else "open"
            self._trouble.note(kind, f"calls to {address(self._client)} are not tried")
            return otherwise
        try:
            answer = self._lane.run(action, self._timeout_s + more_s)
        except Exception as error:
            self._failed(error)
            return otherwise
        self._breaker.succeeded()
        return answer

    def close(self) -> None:
        """Closes the connections. Afterwards no call is tried."""
        self._closed = True
        self._client.connection_pool.disconnect()

    def _failed(self, error: Exception) -> None:
        kind = kind_of(error)
        self._trouble.note(kind, f"{address(self._client)} failed: {type(error).__name__}")
        if kind not in PEER_FAILED:
            self._breaker.succeeded()  # it did answer
            return
        self._breaker.failed()
        if kind == "timeout":
            self._client.connection_pool.disconnect()  # whoever still waits for an answer stops waiting
