"""A file of settings that changes while the engine runs: whether there is a new version, and what it says.

A look costs one `stat`. Nothing half-written is taken: a version is read once it has been left alone for `SETTLE_S`,
and not taken if it changed while it was read. What a link is swapped to is whole at once, as when Kubernetes changes a
ConfigMap.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path

from dotenv.parser import parse_stream

from kvboost.config import ENV_PREFIX, unknown_environment

SETTLE_S = 0.05
MAX_BYTES = 1 << 20  # what a ConfigMap may hold
SWAPPED = "..data"  # the link inside a mounted ConfigMap that leads to the current version's directory


@dataclass(frozen=True, slots=True)
class Version:
    """What a version of the file says: settings by field name, unvalidated, or why it cannot be taken.

    With a problem, `values` are what could be read all the same; `readable` is False where nothing could.
    """

    values: Mapping[str, str] = field(default_factory=dict)
    problem: str | None = None
    ignored: tuple[str, ...] = ()  # names that are not ours
    readable: bool = True
    removed: bool = False


@dataclass(frozen=True, slots=True)
class _Mark:
    """What distinguishes versions. `changed_at_s` is wall time, not part of the identity."""

    identity: tuple[object, ...]
    changed_at_s: float = field(compare=False)


class SettingsFile:
    """Watches `path`: lines `KVBOOST_NAME=value`, or a directory with a file per name. Not thread-safe.

    `reads` counts how often the content was read.
    """

    def __init__(self, path: str | os.PathLike[str], *, clock: Callable[[], float] = time.monotonic) -> None:
        self.path = Path(path)
        self.reads = 0
        self._clock = clock
        self._taken: _Mark | None = None
        self._taken_from = ""  # the resolved path of the version that was taken
        self._seen: _Mark | None = None  # a version that is not taken yet
        self._seen_at = 0.0

    def look(self) -> Version | None:
        """The version that is there now, if it is another one than the last look returned; else None."""
        mark = _mark(self.path)
        if mark == self._taken:
            self._seen = None
            return None
        resolved = _resolved(self.path)
        if not self._is_whole(mark, resolved):
            return None
        self.reads += mark.identity[0] in ("file", "directory")
        version = _read(Path(resolved), mark)
        if _mark(self.path) != mark or _resolved(self.path) != resolved:
            return None  # it changed meanwhile; the next look sees what it has become
        self._taken, self._taken_from, self._seen = mark, resolved, None
        return version

    def _is_whole(self, mark: _Mark, resolved: str) -> bool:
        in_place = os.path.join(os.path.realpath(self.path.parent), self.path.name)
        swapped = resolved not in (self._taken_from, in_place)
        if swapped or time.time() - mark.changed_at_s >= SETTLE_S:
            return True
        if mark != self._seen:
            self._seen, self._seen_at = mark, self._clock()
        return self._clock() - self._seen_at >= SETTLE_S  # where the file's clock is not ours


def _resolved(path: Path) -> str:
    """Where the content stands, all links followed."""
    swapped = path / SWAPPED
    return os.path.realpath(swapped if swapped.is_symlink() else path)


def _mark(path: Path) -> _Mark:
    try:
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return _Mark(("absent",), _changed_at_s(path.parent))
    except OSError as error:
        return _Mark(("unreadable", error.errno), 0.0)
    if not stat.S_ISDIR(found.st_mode):
        return _Mark(("file", *_identity(found)), found.st_mtime)
    try:
        return _mark_directory(path)
    except OSError as error:
        return _Mark(("unreadable", error.errno), 0.0)


def _mark_directory(path: Path) -> _Mark:
    swapped = path / SWAPPED
    if swapped.is_symlink():
        found = os.stat(swapped)
        return _Mark(("directory", os.readlink(swapped), *_identity(found)), found.st_mtime)
    names = sorted(n for n in os.listdir(path) if n.startswith(ENV_PREFIX))
    entries = {name: _stat_or_none(path / name) for name in names}
    changed_at_s = max([s.st_mtime for s in entries.values() if s is not None], default=0.0)
    identities = ((name, None if s is None else _identity(s)) for name, s in entries.items())
    return _Mark(("directory", *identities), max(changed_at_s, _changed_at_s(path)))


def _stat_or_none(path: Path) -> os.stat_result | None:
    try:
        return os.stat(path)
    except FileNotFoundError:  # removed meanwhile, or a link into nothing: reading will tell
        return None


def _identity(found: os.stat_result) -> tuple[int, ...]:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _changed_at_s(path: Path) -> float:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return 0.0


def _read(path: Path, mark: _Mark) -> Version:
    try:
        if mark.identity[0] == "absent":
            return Version(removed=True)
        if mark.identity[0] == "unreadable":
            os.stat(path)
        if path.is_dir():
            return _of_lines(
                {p.name: _text(p).strip() for p in sorted(path.iterdir()) if p.name.startswith(ENV_PREFIX)}
            )
        return _parse(_text(path))
    except (OSError, ValueError) as error:
        told = error.strerror if isinstance(error, OSError) else str(error)
        return Version(problem=f"it cannot be read: {told}", readable=False)


def _text(path: Path) -> str:
    """The content of a file. Raises `ValueError` if it is not text of a sane size."""
    with path.open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ValueError(f"it has more than {MAX_BYTES} bytes")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 ({error.reason} at byte {error.start})") from None


def _parse(text: str) -> Version:
    bindings = [b for b in parse_stream(StringIO(text)) if b.error or b.key is not None]
    version = _of_lines({b.key: b.value for b in bindings if b.key is not None and b.value is not None})
    bad = next((b.original.line for b in bindings if b.error or b.value is None), None)  # never its text: a secret
    problem = version.problem if bad is None else f"line {bad} is not KVBOOST_NAME=value"
    return Version(version.values, problem, version.ignored)


def _of_lines(given: Mapping[str, str]) -> Version:
    """`given` by the names of environment variables."""
    ours = {key: value for key, value in given.items() if key.startswith(ENV_PREFIX)}
    unknown = unknown_environment(ours)
    values = {key.removeprefix(ENV_PREFIX).lower(): value for key, value in ours.items()}
    return Version(values, unknown[0] if unknown else None, tuple(sorted(given.keys() - ours.keys())))
