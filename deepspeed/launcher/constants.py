"""Names of the multi-node back ends and the few values that clients import with them."""

from __future__ import annotations

PDSH_LAUNCHER = "pdsh"
PDSH_MAX_FAN_OUT = 1024
OPENMPI_LAUNCHER = "openmpi"
MPICH_LAUNCHER = "mpich"
IMPI_LAUNCHER = "impi"
SLURM_LAUNCHER = "slurm"
MVAPICH_LAUNCHER = "mvapich"
MVAPICH_TMP_HOSTFILE = "/tmp/deepspeed_mvapich_hostfile"
SSH_LAUNCHER = "ssh"

DEFAULT_HOSTFILE = "/job/hostfile"
# The same number as deepspeed.constants.TORCH_DISTRIBUTED_DEFAULT_PORT, without importing anything for it.
DEFAULT_MASTER_PORT = 29500
