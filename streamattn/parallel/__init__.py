"""Context parallelism: one sequence on several GPUs, its tokens shared out to the ranks of a process group.

`attention` is `streamattn.attention` for such sequences; `shard`, `unshard` and `positions` say which tokens
a rank holds, and `sharing` lets patched models run on shards. ``torchrun --nproc-per-node N -m
streamattn.parallel`` checks and times it on this machine.
"""

from streamattn.parallel.functional import attention
from streamattn.parallel.layout import positions, shard, unshard
from streamattn.parallel.sharing import shared, sharing

__all__ = ["attention", "positions", "shard", "shared", "sharing", "unshard"]
