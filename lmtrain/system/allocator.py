"""Settings of the C allocator for computing on a CPU."""

import ctypes
import os


def retain_heap() -> None:
    """Make it cheap to allocate large CPU tensors again and again. Must be called before torch is imported.

    By default glibc maps memory for every large tensor, unmaps it when the tensor is freed, and trims the heap, so each
    training step has page faults on all of its memory. Huge pages make them fewer; a heap that is never trimmed avoids
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
