"""Several processes, on one machine or many: communicators, and computations that divide their arrays among ranks.

Start a program by ``scripts/launch.sh N python program.py``, or any MPI's mpiexec; the same program runs without.
"""

from gpu_ops.distributed.comm import Comm
from gpu_ops.distributed.engine import Pending
from gpu_ops.distributed.world import Mesh, world

__all__ = ["Comm", "Mesh", "Pending", "world"]
