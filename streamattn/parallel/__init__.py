"""Context parallelism: one sequence on several GPUs, its tokens shared out to the ranks of a process group.

`attention` is `streamattn.attention` for such sequences; `shard`, `unshard` and `positions` say which tokens
a rank holds. ``torchrun --nproc-per-node N -m streamattn.parallel`` checks and times it on this machine.
"""

from streamattn.parallel.functional import attention, choose_mode
from streamattn.parallel.layout import positions, shard, unshard

__all__ = ["attention", "choose_mode", "positions", "shard", "unshard"]
