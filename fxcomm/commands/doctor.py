"""``fxcomm doctor``: whether this machine can train with fxcomm, and what would fail."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch import nn

from fxcomm.commands.document import Document, Table
from fxcomm.runtime.disk_cache import DiskCache

_TORCH = ((2, 11), (2, 15))


@dataclass(frozen=True)
class Check:
    """What was looked at, what was found, and what to do about it (nothing: it is well)."""

    what: str
    found: str
    advice: str = ""


def doctor() -> Document:
    """Looks at versions, backends, the compiler, the cache, and trains one step. The exit code is 1
    if something would fail."""
    checks = [check() for check in _CHECKS]
    bad = [check for check in checks if check.advice]
    rows = tuple((c.what, "no" if c.advice else "yes", c.found) for c in checks)
    parts: list[str | Table] = [Table("This machine", ("check", "well", "found"), rows)]
    parts += [f"{check.what}: {check.advice}" for check in bad]
    if not bad:
        parts.append("Nothing that would fail was found.")
    data = {c.what: {"well": not c.advice, "found": c.found, "advice": c.advice} for c in checks}
    return Document(data, parts, exit_code=1 if bad else 0)


def _torch_version() -> Check:
    found = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    low, high = _TORCH
    right = low <= found < high
    advice = (
        "" if right else "install a torch from 2.11 to 2.14; private interfaces differ elsewhere"
    )
    return Check("torch", f"{torch.__version__}, Python {platform.python_version()}", advice)


def _libraries() -> Check:
    names = ("networkx", "sympy", "numpy")
    found, missing = [], []
    for name in names:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            missing.append(name)
    advice = f"pip install {' '.join(missing)}" if missing else ""
    return Check("libraries", ", ".join(found), advice)


def _backends() -> Check:
    if not dist.is_available():
        return Check("collectives", "none", "this torch was built without torch.distributed")
    found = [
        name
        for name, there in (("gloo", dist.is_gloo_available()), ("nccl", dist.is_nccl_available()))
        if there
    ]
    cuda = torch.cuda.is_available()
    devices = f"{torch.cuda.device_count()} CUDA devices" if cuda else "no CUDA device"
    advice = ""
    if not found:
        advice = "this torch has neither gloo nor NCCL"
    elif cuda and "nccl" not in found:
        advice = (
            "CUDA devices without NCCL: gloo copies through the host; install a torch with NCCL"
        )
    return Check("collectives", f"{', '.join(found) or 'none'}; {devices}", advice)


def _compiler() -> Check:
    name = os.environ.get("CXX", "g++")
    found = shutil.which(name) or shutil.which("clang++")
    advice = "" if found else "Inductor compiles for CPU with a C++ compiler: install g++"
    return Check("C++ compiler", Path(found).name if found else "none", advice)


def _cache() -> Check:
    folder = os.environ.get("FXCOMM_CACHE")
    if folder == "":
        return Check("cache of tuned plans", "off (FXCOMM_CACHE is empty)")
    cache = DiskCache.of(os.environ)
    cache.put("doctor", "probe", "well")
    works = cache.get("doctor", "probe") == "well"
    advice = "" if works else "its folder cannot be written: every run tunes anew; set FXCOMM_CACHE"
    return Check("cache of tuned plans", "written and read" if works else "lost", advice)


def _torchrun() -> Check:
    world_size = os.environ.get("WORLD_SIZE")
    if world_size is None:
        return Check("launched by", "python: one process trains with plain Inductor")
    return Check("launched by", f"torchrun: rank {os.environ.get('RANK')} of {world_size}")


def _one_step() -> Check:
    """Trains a tiny model, in a process group of one rank of its own if there is none."""
    own = not dist.is_initialized()
    with TemporaryDirectory() as folder:
        if own:
            file = (Path(folder) / "store").as_uri()
            dist.init_process_group("gloo", init_method=file, rank=0, world_size=1)
        try:
            loss = _train()
        except Exception as error:
            return Check(
                "a step with backend='fxcomm'",
                f"{type(error).__name__}",
                f"it failed: {error}",
            )
        finally:
            if own:
                dist.destroy_process_group()
    return Check("a step with backend='fxcomm'", f"loss {loss:.4f}")


def _train() -> float:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    compiled = torch.compile(model, backend="fxcomm")
    optimizer = torch.optim.AdamW(model.parameters())
    loss = compiled(torch.randn(4, 8)).square().mean()
    loss.backward()
    optimizer.step()
    return float(loss)


_CHECKS: tuple[Callable[[], Check], ...] = (
    _torch_version,
    _libraries,
    _backends,
    _compiler,
    _cache,
    _torchrun,
    _one_step,
)
