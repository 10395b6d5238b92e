"""What went wrong in a tier: counted by kind, and logged once per kind and minute. Every one of them is a miss."""

from __future__ import annotations

import errno
import logging
import sqlite3
import threading
import time
from collections import Counter

logger = logging.getLogger(__name__)

QUIET_S = 60.0  # between two lines of one kind

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_PERMISSION = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_SQLITE_KINDS = (  # by what the message contains: Python 3.10 does not tell the error code
    ("locked", "busy"),
    ("full", "full"),
    ("readonly", "permission"),
    ("disk I/O", "io"),
    ("unable to open", "io"),
)


class Trouble:
    """Counts and logs the failures of one tier. Thread-safe."""

    def __init__(self, tier_name: str) -> None:
        self._tier_name = tier_name
        self.lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._quiet_until: dict[str, float] = {}

    def note(self, kind: str, message: object) -> None:
        """Counts one failure; the log gets at most one line per kind and minute."""
        now = time.monotonic()
        with self.lock:
            self._counts[kind] += 1
            quiet = now < self._quiet_until.get(kind, 0.0)
            if not quiet:
                self._quiet_until[kind] = now + QUIET_S
        if not quiet:
            logger.warning(
                "%s tier: %s (%s; counted, and not logged again for a minute)", self._tier_name, message, kind
            )

    def counts(self) -> dict[str, int]:
        """Failures by kind so far."""
        with self.lock:
            return dict(self._counts)


def kind_of(error: OSError | sqlite3.Error | UnicodeError) -> str:
    """`full`, `permission`, `busy` (another process holds the lock), `closed`, `index` (damaged) or `io`."""
    if isinstance(error, OSError):
        return "full" if error.errno in _FULL else "permission" if error.errno in _PERMISSION else "io"
    if isinstance(error, sqlite3.ProgrammingError):
        return "closed"  # by another thread, meanwhile
    if isinstance(error, sqlite3.OperationalError):  # the rest of them: tables are missing, formats are strange
        return next((kind for text, kind in _SQLITE_KINDS if text in str(error)), "index")
    return "index"  # a UnicodeError too: SQLite tells what it found, and Python cannot read it
