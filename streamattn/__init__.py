"""StreamAttn: a drop-in attention layer for PyTorch on one fused kernel family.

`attention` is the function, `StreamMultiHeadAttention` the module, `patch_model` the one-liner that rewires a
whole model; `qk_norm_rope` is what many layers do to q and k before. Importing the package initialises no
CUDA and imports neither transformers nor Triton.
"""

from typing import TYPE_CHECKING

from streamattn.functional import attention, flash_attention
from streamattn.module import StreamMultiHeadAttention
from streamattn.prologue import qk_norm_rope

if TYPE_CHECKING:
    from patches import patch_model, patch_report, unpatch_model

__version__ = "0.1.0"
__all__ = [
    "StreamMultiHeadAttention",
    "attention",
    "flash_attention",
    "patch_model",
    "patch_report",
    "qk_norm_rope",
    "unpatch_model",
]


def __getattr__(name: str):
    if name in ("patch_model", "patch_report", "unpatch_model"):
        import patches

        if not hasattr(patches, name):
            place = getattr(patches, "__file__", None) or list(patches.__path__)
            raise ImportError(
                f"`import patches` finds {place}, not StreamAttn's package; rename that folder or file"
            )
        return getattr(patches, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
