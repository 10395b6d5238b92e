"""Gives memory that evicted chunks left behind back to the operating system."""

from __future__ import annotations

import ctypes


def return_free_pages() -> None:
    """Returns free pages of the C heap; does nothing where the C library has no `malloc_trim`.

    glibc raises its mmap threshold when large blocks are freed, later chunks then come from the heap, and the holes of
    evicted ones stay resident: without this a 1 GiB cache held 1.4 GiB after 180 evictions.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
