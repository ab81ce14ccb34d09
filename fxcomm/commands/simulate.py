"""``fxcomm simulate``: a model on any number of ranks, without one of them."""

from __future__ import annotations

import math
import re
import runpy
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from fxcomm import compat
from fxcomm.analysis.projection import Cluster, Projection, project
from fxcomm.analysis.roofline import DEVICES, node_cost
from fxcomm.analysis.trace import Capture, trace_step
from fxcomm.commands.document import Document, Table, mb, ms
from fxcomm.commands.explain import account_data, account_parts
from fxcomm.errors import FxcommError

Model = tuple[nn.Module, dict[str, Any]]
"""A model, and the keyword arguments of a batch."""

# Published configurations: (class of the configuration, what differs from its defaults).
_ARCHITECTURES: Mapping[str, tuple[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "gpt2": ("GPT2Config", {}),
        "gptj-6b": ("GPTJConfig", {}),
        "llama3-8b": (
            "LlamaConfig",
            {
                "vocab_size": 128256,
                "hidden_size": 4096,
                "intermediate_size": 14336,
                "num_hidden_layers": 32,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
            },
        ),
        "qwen2.5-7b": (
            "Qwen2Config",
            {
                "vocab_size": 152064,
                "hidden_size": 3584,
                "intermediate_size": 18944,
                "num_hidden_layers": 28,
                "num_attention_heads": 28,
                "num_key_value_heads": 4,
            },
        ),
    }
)
NAMES = tuple(_ARCHITECTURES)

_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}


def bytes_per_second(text: str) -> float:
    """A rate such as "100Gbit/s" or "12.5GB/s" in bytes a second.

    Raises:
        FxcommError: the text is no such rate.
    """
    found = re.fullmatch(r"([0-9.]+)\s*([kmgt]?)(bit|b)(?:/s|ps)", text.strip(), re.IGNORECASE)
    try:
        number = float(found[1]) if found else math.nan
    except ValueError:
        number = math.nan
    if found is None or math.isnan(number):
        raise FxcommError(f"simulate: {text!r} is no rate of a link; write 100Gbit/s or 12.5GB/s")
    bits = found[3] == "b" or found[3].lower() == "bit"
    rate = number * _UNITS[found[2].lower()] / (8 if bits else 1)
    if not rate > 0:
        raise FxcommError(f"simulate: a link of {text!r} moves nothing")
    return rate


def capture_named(model: str, device: str, batch: int, sequence: int) -> Capture:
    """The step of a known model, of a script's, or of a file that ``fxcomm capture`` wrote, with
    costs of ``device``.

    A script defines ``model()``, which returns a module and the keyword arguments of a batch; it
    runs where tensors take no memory and have no values.

    Raises:
        FxcommError: there is no such model, or it cannot be captured.
    """
    if device not in DEVICES:
        raise FxcommError(f"simulate: no device {device!r}; there are {', '.join(DEVICES)}")
    path = Path(model)
    if path.suffix in (".json", ".gz"):
        return _of_file(path, device)
    build: Callable[[], Model]
    if model in _ARCHITECTURES:
        build = partial(_transformer, model, batch, sequence)
    elif path.suffix == ".py":
        build = _of_script(path)
    else:
        raise FxcommError(
            f"simulate: no model {model!r}; there are {', '.join(NAMES)}, or a script.py with a "
            "function model(), or a captured step"
        )
    with compat.without_memory():
        module, arguments = build()
        traced = trace_step(module, (), arguments)
    name = path.stem if path.suffix == ".py" else model
    return traced.captured(name, device, node_cost(DEVICES[device]))


def _of_file(path: Path, device: str) -> Capture:
    capture = Capture.load(path)
    if capture.device != device:
        raise FxcommError(
            f"simulate: {path} holds costs of {capture.device!r}, not of {device!r}; pass "
            f"--device {capture.device}, or capture the model anew"
        )
    return capture


def _of_script(path: Path) -> Callable[[], Model]:
    if not path.is_file():
        raise FxcommError(f"simulate: there is no file {path}")
    found = runpy.run_path(str(path)).get("model")
    if not callable(found):
        raise FxcommError(
            f"simulate: {path} defines no function model(), which would return a module and the "
            "keyword arguments of a batch"
        )
    return found  # type: ignore[no-any-return]


def _transformer(name: str, batch: int, sequence: int) -> Model:
    try:
        import transformers
    except ImportError:
        raise FxcommError(
            f"simulate: {name} is built by the library transformers: pip install transformers"
        ) from None
    kind, fields = _ARCHITECTURES[name]
    config = getattr(transformers, kind)(**fields, use_cache=False)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    tokens = torch.zeros(batch, sequence, dtype=torch.long)
    return _WithLoss(model), {"tokens": tokens}


class _WithLoss(nn.Module):
    """A causal language model that returns its loss on the tokens it is given."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.model(input_ids=tokens, use_cache=False).logits
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def simulate(
    model: str,
    *,
    world_size: int,
    link: str,
    device: str = "h100",
    batch: int = 1,
    sequence: int = 2048,
    budget_s: float = 1.0,
) -> Document:
    """The step of a model (see :func:`capture_named`) on ``world_size`` ranks.

    Raises:
        FxcommError: an argument is of no use, or the model cannot be captured.
    """
    rate = bytes_per_second(link)
    if world_size < 1:
        raise FxcommError(f"simulate: a world of {world_size} ranks")
    capture = capture_named(model, device, batch, sequence)
    projection = project(capture, Cluster(world_size, DEVICES[device], rate), budget_s=budget_s)
    return _document(capture, projection)


def _document(capture: Capture, projection: Projection) -> Document:
    account, memory = projection.account, projection.memory
    sizes = {**asdict(memory), "together": memory.total}
    rows = tuple((name.replace("_", " "), mb(size)) for name, size in sizes.items())
    table = Table("Memory of a rank", ("for", "MB"), rows)
    optimal = " (proven the best)" if projection.found.optimal else ""
    head = (
        f"{capture.name} on {projection.cluster.world_size} ranks: "
        f"{len(capture.parameters)} parameters of {mb(account.problem.nbytes)} MB in "
        f"{len(projection.plan.layout.buckets)} buckets{optimal}; a step takes "
        f"{ms(account.step.seconds)} ms, {account.gap:.1%} above the bound."
    )
    data = {
        "model": capture.name,
        "world_size": projection.cluster.world_size,
        "memory_bytes": {**asdict(memory), "total": memory.total},
        **account_data(account),
    }
    return Document(data, [head, *account_parts(account), table])
