"""fxcomm: a torch.compile backend for sharded, overlapped data-parallel training.

    model = torch.compile(Model(), backend="fxcomm")

is the whole interface of plain training; the names below are for what plain torch has no word for.
"""

from fxcomm.api import (
    full_grad,
    no_sync,
    optimizer_state_bytes,
    record_steps,
    save_report,
    save_timeline,
    stats,
    synchronize,
    tuned,
)
from fxcomm.errors import (
    FxcommError,
    OptionsError,
    RankMismatchError,
    ShardedGradientError,
    UnsupportedModelError,
    UnsupportedOptimizerError,
)
from fxcomm.options import Options
from fxcomm.runtime.statistics import StepStats
from fxcomm.tuned import Tuned

__version__ = "0.1.0"

__all__ = [
    "FxcommError",
    "Options",
    "OptionsError",
    "RankMismatchError",
    "ShardedGradientError",
    "StepStats",
    "Tuned",
    "UnsupportedModelError",
    "UnsupportedOptimizerError",
    "full_grad",
    "no_sync",
    "optimizer_state_bytes",
    "record_steps",
    "save_report",
    "save_timeline",
    "stats",
    "synchronize",
    "tuned",
]
