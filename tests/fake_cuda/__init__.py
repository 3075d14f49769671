"""What can be seen of a CUDA device where there is none; `tests/test_fake_cuda.py` runs the cases, in a process of
their own, with this package as a plugin: the library must be there before torch is."""

import ctypes
import os

LIBRARY = "FAKE_CUDA_LIBRARY"

if LIBRARY in os.environ:
    ctypes.CDLL(os.environ[LIBRARY])
