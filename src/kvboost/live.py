"""The settings of a running engine: what may change under it, from an administrator or a watched file.

request > admin > file > environment > flag > default

Every change is validated as a whole, with all that is below and above it, before it counts. What is refused changes
nothing, but for the kill switch, which acts even in a file that is rejected.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kvboost.config import FIXED, Resolved, Settings, from_environment, merge, no_setting, refuse_fixed, resolve
from kvboost.errors import SettingsError
from kvboost.settings_file import SETTLE_S, SettingsFile, Version

logger = logging.getLogger("kvboost")


@dataclass(frozen=True, slots=True)
class LiveStatus:
    """A snapshot. `generation` counts the changes that were taken, `rejected` versions of the file that were not."""

    generation: int
    rejected: int
    last_error: str | None  # why the file's present version is not in force; None if it is
    file: str  # its path, or ""
    file_present: bool
    needs_restart: tuple[str, ...]  # settings that the file wants otherwise than the engine was made with
    admin: Mapping[str, Any]  # overrides in force


class LiveSettings:
    """Merges all sources at every call. Thread-safe.

    Raises `SettingsError` for an invalid flag or environment; a bad file is rejected, counted, and logged once.
    """

    def __init__(self, flags: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None) -> None:
        self._flags = dict(flags or {})
        self._environ = environ
        self._lock = threading.RLock()
        self._admin: dict[str, Any] = {}
        self._in_file: dict[str, Any] = {}
        self._fixed_in_file: dict[str, Any] | None = None  # what the file gave of them when the engine was made
        self._killed_by_file = False  # by a version that was rejected
        self._generation = self._rejected = 0
        self._last_error: str | None = None
        self._present = False
        self._needs_restart: tuple[str, ...] = ()
        path = from_environment(environ).get("settings_file") or self._flags.get("settings_file")
        self._file = SettingsFile(path) if path else None
        self._begin()
        self._made_with = self._fixed_values(self._in_file)
        self._fixed_in_file = {n: v for n, v in self._in_file.items() if n in FIXED}

    def resolve(self, request: Mapping[str, Any] | None = None) -> Resolved:
        """The settings in force right now, for one request. Raises `SettingsError`."""
        with self._lock:
            self._look()
            file = {**self._in_file, "disable": True} if self._killed_by_file else self._in_file
            admin = self._admin
        return resolve(self._flags, request, self._environ, file=file, admin=admin)

    def set(self, values: Mapping[str, Any]) -> int:
        """Overrides settings until they are cleared, all or none; returns the generation. Raises `SettingsError`."""
        refuse_fixed(values, "an administrator")
        with self._lock:
            self._look()
            return self._take(admin={**self._admin, **values})

    def clear(self, names: Iterable[str] | None = None) -> int:
        """Takes overrides back, all with None; returns the generation.

        Raises `SettingsError` for a name that is no setting, or if the rest would not fit together.
        """
        with self._lock:
            self._look()
            gone = set(self._admin if names is None else names)
            unknown = min(gone - Settings.model_fields.keys(), default=None)
            if unknown is not None:
                raise SettingsError(no_setting(unknown, unknown), unknown)
            return self._take(admin={n: v for n, v in self._admin.items() if n not in gone})

    def status(self) -> LiveStatus:
        """A consistent snapshot, after a look at the file."""
        with self._lock:
            self._look()
            return LiveStatus(
                self._generation,
                self._rejected,
                self._last_error,
                "" if self._file is None else str(self._file.path),
                self._present,
                self._needs_restart,
                dict(self._admin),
            )

    @property
    def file_reads(self) -> int:
        """How often the file's content was read."""
        return 0 if self._file is None else self._file.reads

    # --- the file ---------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """The first version; one that is being written just now is waited for."""
        if self._file is None:
            return
        if not self._look():
            time.sleep(2 * SETTLE_S)
            self._look()
        if not self._present and self._last_error is None:
            logger.warning("the settings file %s does not exist (yet); it is watched", self._file.path)

    def _look(self) -> bool:
        """Takes a new version of the file, if there is one; returns whether there was."""
        version = self._file.look() if self._file is not None else None
        if version is None:
            return False
        was_present, self._present = self._present, not version.removed
        try:
            if version.problem is not None:
                raise SettingsError(version.problem)
            self._report_fixed(version)
            self._take(file=self._with_first_fixed(version.values))
        except SettingsError as error:
            self._reject(version, str(error))
        else:
            self._killed_by_file, self._last_error = False, None
            if was_present or self._present:
                self._tell(version)
        return True

    def _with_first_fixed(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The values, with what is read once as it was when the engine was made."""
        if self._fixed_in_file is None:
            return dict(values)
        return {**{n: v for n, v in values.items() if n not in FIXED}, **self._fixed_in_file}

    def _report_fixed(self, version: Version) -> None:
        """Notes and tells once which settings a restart would change. Raises `SettingsError` for an invalid value."""
        if self._fixed_in_file is None:
            return
        self._check(file=version.values, admin=self._admin)
        wanted = self._fixed_values(version.values)
        made_with = self._made_with or wanted
        former, self._needs_restart = self._needs_restart, tuple(n for n in wanted if wanted[n] != made_with[n])
        new = sorted(set(self._needs_restart) - set(former))
        if new:
            logger.warning("settings that are read once change with the next restart only: %s", ", ".join(new))

    def _fixed_values(self, file: Mapping[str, Any]) -> dict[str, Any]:
        with contextlib.suppress(SettingsError):
            settings = merge(self._sources(file, {})).settings
            return {name: getattr(settings, name) for name in sorted(FIXED)}
        return {}  # an invalid environment: the engine will not be made

    def _reject(self, version: Version, problem: str) -> None:
        self._rejected += 1
        self._last_error = problem
        if version.readable:
            self._killed_by_file = _says_disable(version.values)
        killed = " (but KVBOOST_DISABLE in it holds)" if self._killed_by_file else ""
        logger.error("the settings file is rejected, the last good one stays in force%s: %s", killed, problem)

    def _tell(self, version: Version) -> None:
        what = "is gone" if version.removed else f"is in force ({', '.join(sorted(version.values)) or 'no settings'})"
        logger.info("settings file %s, generation %d", what, self._generation)
        if version.ignored:
            names = ", ".join(name[:40] for name in version.ignored[:5])
            logger.warning("%d names in the settings file are no settings: %s", len(version.ignored), names)

    # --- taking a change --------------------------------------------------------------------------------------------

    def _take(self, file: Mapping[str, Any] | None = None, admin: Mapping[str, Any] | None = None) -> int:
        """Replaces what is given, all or nothing. Raises `SettingsError`."""
        new_file = self._in_file if file is None else dict(file)
        new_admin = self._admin if admin is None else dict(admin)
        self._check(new_file, new_admin)
        if (new_file, new_admin) != (self._in_file, self._admin):
            self._generation += 1
        self._in_file, self._admin = new_file, new_admin
        return self._generation

    def _check(self, file: Mapping[str, Any], admin: Mapping[str, Any]) -> None:
        """Raises `SettingsError` if a value is invalid, or if the sources together are and were not before."""
        _check_values("file", file)
        _check_values("admin", admin)
        try:
            merge(self._sources(file, admin))
        except SettingsError:
            if self._is_sound():
                raise

    def _is_sound(self) -> bool:
        try:
            merge(self._sources(self._in_file, self._admin))
        except SettingsError:
            return False
        return True

    def _sources(self, file: Mapping[str, Any], admin: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
        return {"flag": self._flags, "environment": from_environment(self._environ), "file": file, "admin": admin}


def _check_values(origin: str, source: Mapping[str, Any]) -> None:
    """Raises `SettingsError` for a value that is invalid by itself; what does not fit together may fit the others."""
    try:
        merge({origin: source})
    except SettingsError as error:
        if error.setting is not None:
            raise


def _says_disable(values: Mapping[str, Any]) -> bool:
    try:
        return merge({"file": {"disable": values.get("disable", False)}}).settings.disable
    except SettingsError:
        return False
