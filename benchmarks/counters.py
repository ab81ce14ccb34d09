"""What the machine counts: bytes on the loopback interface, peak memory of this process."""

from __future__ import annotations

import os
import platform
import resource
from pathlib import Path

import torch

NET_DEV = Path("/proc/net/dev")
STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")

# /proc/net/dev: eight columns of received counts, then eight of sent ones, bytes first
SENT_BYTES = 8


def loopback_sent() -> int:
    """Bytes that all processes of this machine sent over the loopback interface so far."""
    for line in NET_DEV.read_text().splitlines():
        name, _, columns = line.partition(":")
        if name.strip() == "lo":
            return int(columns.split()[SENT_BYTES])
    raise RuntimeError(f"no loopback interface in {NET_DEV}")


def reset_peak_memory(device: torch.device) -> None:
    """Let the peak start again from what is in use now."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        CLEAR_REFS.write_text("5")  # proc(5): 5 resets the peak resident set size


def peak_memory(device: torch.device) -> int:
    """Peak bytes since the last reset: allocated on the GPU, or resident in this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    for line in STATUS.read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def machine() -> dict[str, object]:
    """What to know about this machine when one reads a figure."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "load": os.getloadavg()[0],
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }
