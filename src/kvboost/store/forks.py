"""Locks in a process that forks: a child has none of the threads that may have held them.

A lock that guards more than one step is taken before the fork, so that the child finds what it guards whole. Nothing
that holds one waits for another lock, so taking it cannot end in a deadlock. A lock around single steps is made anew in
the child. The disk tier has several locks in an order of its own (`disk.py`).
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

_guarded: weakref.WeakSet[Any] = weakref.WeakSet()  # objects whose `_lock` is taken
_renewed: weakref.WeakSet[Any] = weakref.WeakSet()  # objects whose `_lock` is replaced
_held: list[Any] = []


def hold_lock_in_forks(owner: Any) -> None:
    """`owner._lock` is held while the process forks."""
    _guarded.add(owner)


def renew_lock_in_forks(owner: Any) -> None:
    """`owner._lock`, a `threading.Lock`, is a new one in a forked child."""
    _renewed.add(owner)


def _before() -> None:
    for owner in list(_guarded):
        owner._lock.acquire()
        _held.append(owner._lock)


def _after() -> None:
    while _held:
        _held.pop().release()


def _after_in_child() -> None:
    _after()
    for owner in list(_renewed):
        owner._lock = threading.Lock()


os.register_at_fork(before=_before, after_in_parent=_after, after_in_child=_after_in_child)
