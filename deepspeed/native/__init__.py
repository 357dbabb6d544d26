"""C++ code of the package: compiled for this CPU at first use, cached, called through ctypes."""
