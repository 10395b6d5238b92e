"""What the C heap does with freed memory: keeps it for the next request, or gives it back to the operating system."""

from __future__ import annotations

import ctypes
import os

# malloc.h of glibc
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
LARGEST_MMAP_THRESHOLD_BYTES = 32 << 20  # glibc takes no larger one
NEVER_TRIM = (1 << 31) - 1
TUNED_BY_HAND = ("MALLOC_", "GLIBC_TUNABLES")


def keep_free_pages() -> bool:
    """Lets a server's heap keep what one request freed for the next; only `return_free_pages` gives it back then.

    For the whole process, so a library must not call it; before other threads allocate. Otherwise glibc returns the
    activations of every forward, and clearing their pages again took 5 % of the time of a prefill of 900 tokens on CPU.
    False, and nothing is done, where the C library has no `mallopt`, or the environment tunes it already.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(name.startswith(TUNED_BY_HAND) for name in os.environ):
        return False
    wanted = {M_ARENA_MAX: 1, M_MMAP_THRESHOLD: LARGEST_MMAP_THRESHOLD_BYTES, M_TRIM_THRESHOLD: NEVER_TRIM}
    return all(mallopt(option, value) == 1 for option, value in wanted.items())


def return_free_pages() -> None:
    """Returns free pages of the C heap; does nothing where the C library has no `malloc_trim`.

    glibc raises its mmap threshold when large blocks are freed, later chunks then come from the heap, and the holes of
    evicted ones stay resident: without this a 1 GiB cache held 1.4 GiB after 180 evictions.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
