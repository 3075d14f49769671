"""The C allocator's settings for CPU training. It must run before torch is imported."""

import ctypes
import os


def retain_heap() -> None:
    """Make it cheap to allocate large CPU tensors again and again; call this before torch is imported.

    By default glibc maps every large tensor afresh and unmaps it when freed (and trims the heap), so each training step
    pays for page faults on all of its memory. Huge pages reduce their number, and a heap that is never trimmed avoids
    them.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # not glibc
        return
    m_trim_threshold, m_top_pad, m_mmap_max = -1, -2, -4
    mallopt(m_mmap_max, 0)
    mallopt(m_trim_threshold, 2**31 - 1)
    mallopt(m_top_pad, 64 << 20)
