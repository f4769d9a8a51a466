"""What an error on a device means: memory that could not be had, or a CUDA context that is gone, in which nothing may be tried instead.

A kernel's error comes to light at whichever call waits for the device next. So whoever tries something waits, synchronize(), before it and
after it, and the error is its own.
"""

import contextlib

import torch

from radixserve.errors import DeviceError


def current(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Inside, `device` is what kernels without a tensor's own guard are launched on, and events recorded on; afterwards the thread's own
    choice holds again, which is the user's where this is a library in a process of his."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def is_out_of_memory(error: BaseException) -> bool:
    """The allocator's own error, or a driver's or a CPU allocator's, which have no type of their own. A compiler's, further down in its
    output, is not meant."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    said = first_line(error).lower().replace("_", " ")
    return isinstance(error, RuntimeError) and ("out of memory" in said or "defaultcpuallocator: can't allocate memory" in said)


def first_line(error: BaseException) -> str:
    """At most 200 characters of what it says."""
    lines = (line.strip() for line in str(error).splitlines())
    return next((line[:200] for line in lines if line), "no message")


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all it was given; raises what went wrong there since the last time."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def settle(device: torch.device, doing: str) -> None:
    """synchronize() before something is tried. DeviceError: what was done before has failed, and is called `doing`."""
    try:
        synchronize(device)
    except Exception as error:
        raise DeviceError(f"{device}: {doing} failed: {first_line(error)}") from error


def check_usable(device: torch.device, error: BaseException, doing: str, instead: str) -> None:
    """After `error`, which `doing` ended in: DeviceError where the device can compute nothing any more, and nothing else may be tried."""
    if not _is_usable(device):
        raise DeviceError(
            f"{device}: {doing} failed ({first_line(error)}), and nothing can be computed on the device in this process any more; "
            f"start again {instead}. CUDA_LAUNCH_BLOCKING=1 shows which kernel it was"
        ) from error


def free_memory(device: torch.device) -> str:
    """For messages: what is free of how much."""
    if device.type != "cuda":
        return f"too little is free on {device}"
    free, total = torch.cuda.mem_get_info(device)
    return f"{free / 2**20:.0f} MiB of {total / 2**20:.0f} MiB are free on {device}"


def _is_usable(device: torch.device) -> bool:
    for _ in range(2):  # the error of a launch that was refused is told once more, to whoever asks next; one that stays is the context's
        try:
            _compute(device)
            return True
        except RuntimeError as error:
            if is_out_of_memory(error):
                return True
    return False


def _compute(device: torch.device) -> None:
    synchronize(device)
    torch.zeros(1, device=device).add_(1)
    synchronize(device)
