"""Kernels in C++ (csrc/): compiled on first use into the user's cache, or ahead of time, and loaded as one library. No torch in here."""

from radixserve.native.compiler import KernelBuildError
from radixserve.native.library import check, load_library, loaded_library, reason_without_library

__all__ = ["KernelBuildError", "check", "load_library", "loaded_library", "reason_without_library"]
