"""Page-locked host buffers for code outside the accelerator (see `deepspeed.accelerator.host_pinning`)."""

from deepspeed.accelerator.host_pinning import NativePinnedMemory, native_backend_selected
from deepspeed.accelerator.real_accelerator import get_accelerator

__all__ = ["NativePinnedMemory", "get_active_native_pinned_memory", "get_native_pinned_memory"]


def get_native_pinned_memory() -> NativePinnedMemory:
    """The native buffers of the current accelerator, whichever backend is selected."""
    return get_accelerator().native_pinned_memory


def get_active_native_pinned_memory() -> NativePinnedMemory | None:
    """The native buffers if ``DS_PIN_MEMORY_BACKEND=native``, else None (torch's pinned allocator is in use)."""
    return get_native_pinned_memory() if native_backend_selected() else None
