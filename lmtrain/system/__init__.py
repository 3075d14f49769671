"""The machine: device, precision, signals, file system calls, allocator, process group."""
