"""lorafold: many LoRA adapters over one base model, the same bits whatever else is in the batch."""

from lorafold import errors, ops
from lorafold.adapter import Adapter
from lorafold.numerics import Numerics, default_numerics
from lorafold.pool import Pool
from lorafold.runtime import MultiLora, attach

__version__ = "0.1.0"

__all__ = [
    "Adapter",
    "MultiLora",
    "Numerics",
    "Pool",
    "__version__",
    "attach",
    "default_numerics",
    "errors",
    "ops",
]
