"""Training operators for language models: put into Hugging Face Transformers, or used alone from `bastile.ops`.

import bastile
bastile.apply()  # every model of this process, built before or after
"""

from bastile import ops, optim
from bastile._library import version
from bastile.autotune import clear_autotune_cache, set_autotune
from bastile.patching import apply, apply_to_model, get_patched_ops, reset
from bastile.recompute import set_recompute
from bastile.report import Report, report
from bastile.warmup import Warmup, warmup_all_kernels

__version__ = version()
__all__ = [
    "Report",
    "Warmup",
    "apply",
    "apply_to_model",
    "clear_autotune_cache",
    "get_patched_ops",
    "ops",
    "optim",
    "report",
    "reset",
    "set_autotune",
    "set_recompute",
    "warmup_all_kernels",
]
