"""The C allocator's settings, for CPU training. Imports nothing but the standard library: it must act before torch."""

import ctypes
import os


def keep_heap() -> None:
    """Make large tensors cheap to allocate again and again on a CPU; call it before torch is imported.

    By default glibc maps every large tensor anew and returns it when freed, so each training step pays for page faults
    on all of its memory. Huge pages cut their number, and a heap that is never trimmed avoids them.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    try:
        libc = ctypes.CDLL(None)
        mallopt = libc.mallopt
    except (OSError, AttributeError):  # not glibc
        return
    m_trim_threshold, m_top_pad, m_mmap_max = -1, -2, -4
    mallopt(m_mmap_max, 0)
    mallopt(m_trim_threshold, 2**31 - 1)
    mallopt(m_top_pad, 64 << 20)
