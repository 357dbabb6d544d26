"""Multi-node back ends: the command line each of them needs to start a run.

Owns: one class per back end with its historical name and methods. Does not own running the command (multinode.py).

Two families. pdsh and ssh start `deepspeed.launcher.launch` on every host, which starts the workers of that host; their
command passes through a remote shell, so every word is quoted. The MPI and Slurm starters start every worker themselves
and take the words as they are. Either way the script sees its arguments byte for byte.

`get_cmd(environment, active_resources)` puts what the back end itself needs into ``environment``, the mapping that the
caller then starts the command with.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, MutableMapping, Sequence

from deepspeed.launcher.constants import (
    IMPI_LAUNCHER,
    MPICH_LAUNCHER,
    MVAPICH_LAUNCHER,
    MVAPICH_TMP_HOSTFILE,
    OPENMPI_LAUNCHER,
    PDSH_LAUNCHER,
    PDSH_MAX_FAN_OUT,
    SLURM_LAUNCHER,
    SSH_LAUNCHER,
)
from deepspeed.launcher.environment import PATH_LISTS
from deepspeed.launcher.errors import UsageError
from deepspeed.launcher.hostfile import Slot

Resources = Mapping[str, int] | Mapping[str, Sequence[Slot]]
"""Host -> slots, or just their number."""


def remote_word(text: str) -> str:
    """Quote one word for a POSIX shell on the other side of pdsh or ssh.

    pdsh replaces %h, %n, %u and %% in its command, so the quoted word must not contain a percent sign at all: each is
    written as the shell expression that prints one.
    """
    if "%" not in text:
        return shlex.quote(text)
    parts = [shlex.quote(part) if part else "" for part in text.split("%")]
    return '"$(printf \'\\045\')"'.join(parts)


def export_statement(name: str, content: str) -> str:
    """Shell text that sets a variable on the other host; a path list goes in front of what that host has."""
    rest = f'"${{{name}:+:${name}}}"' if name in PATH_LISTS else ""
    return f"export {name}={remote_word(content)}{rest};"


def _slot_count(slots: int | Sequence[Slot]) -> int:
    return slots if isinstance(slots, int) else len(slots)


class MultiNodeRunner(ABC):
    """A back end for one run. ``exports`` holds the variables every worker must get (`add_export`)."""

    def __init__(self, args: argparse.Namespace, world_info_base64: str) -> None:
        self.args = args
        self.validate_args()
        self.user_arguments = self.parse_user_args()
        self.user_script: str = args.user_script
        self.world_info_base64 = world_info_base64
        self.exports: dict[str, str] = {}

    @abstractmethod
    def backend_exists(self) -> bool:
        """Whether the back end is installed here."""

    @abstractmethod
    def get_cmd(self, environment: MutableMapping[str, str], active_resources: Resources) -> object:
        """The command to run: a list of words (pdsh: see there)."""

    def add_export(self, key: str, var: str) -> None:
        """Have every worker see the variable ``key`` with exactly this value."""
        self.exports[key.strip()] = var

    def parse_user_args(self) -> list[str]:
        return list(self.args.user_args)

    @property
    def name(self) -> str:
        return type(self).__name__

    def validate_args(self) -> None:  # noqa: B027 (most back ends honour every option)
        """UsageError for options this back end cannot honour."""

    @classmethod  # noqa: B027 (nor do most mind the slots)
    def validate_active_resources(cls, active_resources: Resources) -> None:
        """UsageError for a choice of slots this back end cannot make."""

    # --- for subclasses

    @property
    def launcher_arguments(self) -> list[str]:
        return shlex.split(self.args.launcher_args)

    def _python_command(self) -> list[str]:
        """What one worker runs, for starters that start every worker."""
        if self.args.no_python:
            return [self.user_script, *self.user_arguments]
        module = ["-m"] if self.args.module else []
        return [sys.executable, "-u", *module, self.user_script, *self.user_arguments]

    def _node_flags(self) -> list[str]:
        """Options of `deepspeed.launcher.launch` that pass on what the user gave the front end."""
        args = self.args
        flags = [flag for flag in ("no_python", "module", "no_local_rank", "bind_cores_to_rank") if getattr(args, flag)]
        words = [f"--{flag}" for flag in flags]
        if args.save_pid:
            words.append(f"--save_pid={os.getpid()}")
        if args.enable_each_rank_log != "None":
            words.append(f"--enable_each_rank_log={args.enable_each_rank_log}")
        if args.bind_core_list is not None:
            words.append(f"--bind_core_list={args.bind_core_list}")
        return [*words, f"--log_level={args.log_level}"]

    def remote_command(self, node_rank: str, *extra: str) -> str:
        """Text for the remote shell that starts one node's workers. ``node_rank`` is put in as it is."""
        before = [export_statement(name, content) for name, content in self.exports.items()]
        if self.args.venv_script is not None:
            before.insert(0, f"source {remote_word(self.args.venv_script)};")
        before.append(f"cd {remote_word(os.path.abspath('.'))};")
        launch = [
            sys.executable,
            "-u",
            "-m",
            "deepspeed.launcher.launch",
            f"--world_info={self.world_info_base64}",
            node_rank,
            f"--master_addr={self.args.master_addr}",
            f"--master_port={self.args.master_port}",
            *extra,
            *self._node_flags(),
            self.user_script,
            *self.user_arguments,
        ]
        return " ".join([*before, *(word if word == node_rank else remote_word(word) for word in launch)])


class PDSHRunner(MultiNodeRunner):
    """pdsh over ssh: one remote command per host."""

    def backend_exists(self) -> bool:
        return shutil.which("pdsh") is not None

    @property
    def name(self) -> str:
        return PDSH_LAUNCHER

    def get_cmd(
        self, environment: MutableMapping[str, str], active_resources: Resources
    ) -> tuple[list[str], list[str], MutableMapping[str, str]]:
        """Return (command, command that ends the run on every host, environment for both)."""
        environment["PDSH_RCMD_TYPE"] = "ssh"
        if self.args.ssh_port is not None:
            append = environment.get("PDSH_SSH_ARGS_APPEND", "")
            environment["PDSH_SSH_ARGS_APPEND"] = f"{append} -p {self.args.ssh_port}"
        head = ["pdsh", "-S", "-f", str(PDSH_MAX_FAN_OUT), "-w", ",".join(active_resources), *self.launcher_arguments]
        # The bracket keeps the pattern from matching the shell that carries it.
        world, port = self.world_info_base64, self.args.master_port
        pattern = f"[d]eepspeed.launcher.launch --world_info={world} .*--master_port={port}"
        return (
            [*head, self.remote_command("--node_rank=%n")],
            [*head, f"pkill -f {remote_word(pattern)}"],
            environment,
        )


class SSHRunner(MultiNodeRunner):
    """Plain ssh: one client per host, nothing else to install."""

    def backend_exists(self) -> bool:
        return shutil.which("ssh") is not None

    @property
    def name(self) -> str:
        return SSH_LAUNCHER

    def get_cmd(self, environment: MutableMapping[str, str], active_resources: Resources) -> list[list[str]]:
        """Return one command per host. The node ends its workers when its standard input closes, that is when the
        client here ends for any reason."""
        port = ["-p", str(self.args.ssh_port)] if self.args.ssh_port is not None else []
        head = ["ssh", *port, *self.launcher_arguments]
        return [
            [*head, host, self.remote_command(f"--node_rank={rank}", "--end_with_stdin")]
            for rank, host in enumerate(active_resources)
        ]


class _WholePoolRunner(MultiNodeRunner):
    """Starters that read hosts themselves and cannot take a part of the pool."""

    def __init__(self, args: argparse.Namespace, world_info_base64: str, resource_pool: Resources) -> None:
        super().__init__(args, world_info_base64)
        self.resource_pool = resource_pool

    def validate_args(self) -> None:
        super().validate_args()
        if self.args.include or self.args.exclude:
            raise UsageError(
                f"--include / --exclude: the {self.name} launcher cannot choose hosts; write a hostfile with those "
                "to use"
            )
        if self.args.num_nodes != -1 or self.args.num_gpus != -1:
            raise UsageError(
                f"--num_nodes / --num_gpus: the {self.name} launcher starts all slots of the hostfile; change that"
            )
        if ":" in self.args.user_args:
            raise UsageError(
                f"the script's argument ':' would be taken by the {self.name} launcher as the start of another "
                "program; use --launcher pdsh or ssh"
            )

    @property
    def num_processes(self) -> int:
        return sum(_slot_count(slots) for slots in self.resource_pool.values())

    def _processes_per_node(self) -> int:
        counts = {_slot_count(slots) for slots in self.resource_pool.values()}
        if len(counts) != 1:
            listing = ", ".join(f"{host}: {_slot_count(slots)}" for host, slots in self.resource_pool.items())
            raise UsageError(f"the {self.name} launcher needs the same number of slots on every host; found {listing}")
        return counts.pop()


class OpenMPIRunner(_WholePoolRunner):
    """Open MPI's mpirun."""

    _DEFAULT_PARAMETERS = (("btl", "^openib"), ("btl_tcp_if_include", "eth0"))

    def __init__(self, args: argparse.Namespace, world_info_base64: str, resource_pool: Resources) -> None:
        super().__init__(args, world_info_base64, resource_pool)
        self.add_export("UCX_TLS", "tcp")

    def backend_exists(self) -> bool:
        return shutil.which("ompi_info") is not None

    @property
    def name(self) -> str:
        return OPENMPI_LAUNCHER

    def get_cmd(self, environment: MutableMapping[str, str], active_resources: Resources) -> list[str]:
        given = self.launcher_arguments
        chosen = {given[index + 1] for index, word in enumerate(given[:-1]) if word in ("-mca", "--mca")}
        defaults = [
            word
            for parameter, content in self._DEFAULT_PARAMETERS
            if parameter not in chosen
            for word in ("--mca", parameter, content)
        ]
        exports = [word for name, content in self.exports.items() for word in ("-x", f"{name}={content}")]
        return [
            "mpirun",
            "-n",
            str(self.num_processes),
            "-hostfile",
            self.args.hostfile,
            *defaults,
            *given,
            *exports,
            *self._python_command(),
        ]


class MPICHRunner(_WholePoolRunner):
    """MPICH's mpirun (Hydra). Ranks are told by variables of its own, which launcher_helper.py translates."""

    def backend_exists(self) -> bool:
        version = _mpirun_version()
        return version is not None and not re.search(r"Intel|Open MPI|Open ?RTE", version)

    @property
    def name(self) -> str:
        return MPICH_LAUNCHER

    def _common(self) -> dict[str, str]:
        return {
            **self.exports,
            "MASTER_ADDR": self.args.master_addr,
            "MASTER_PORT": str(self.args.master_port),
            "WORLD_SIZE": str(self.num_processes),
            "LOCAL_SIZE": str(self._processes_per_node()),
        }

    def get_cmd(self, environment: MutableMapping[str, str], active_resources: Resources) -> list[str]:
        args = self.args
        exports = [word for name, content in self._common().items() for word in ("-genv", name, content)]
        helper = os.path.join(os.path.dirname(os.path.abspath(__file__)), "launcher_helper.py")
        flags = [f"--{flag}" for flag in ("module", "no_python", "bind_cores_to_rank") if getattr(args, flag)]
        if args.bind_core_list is not None:
            flags.append(f"--bind_core_list={args.bind_core_list}")
        return [
            "mpirun",
            "-n",
            str(self.num_processes),
            "-ppn",
            str(self._processes_per_node()),
            *self.launcher_arguments,
            *exports,
            "-hosts",
            ",".join(self.resource_pool),
            sys.executable,
            "-u",
            helper,
            "--launcher",
            MPICH_LAUNCHER,
            *flags,
            self.user_script,
            *self.user_arguments,
        ]


class IMPIRunner(MPICHRunner):
    """Intel MPI's mpirun: one program segment per rank, so each gets its own variables and cores."""

    def backend_exists(self) -> bool:
        return "Intel" in (_mpirun_version() or "")

    @property
    def name(self) -> str:
        return IMPI_LAUNCHER

    def get_cmd(self, environment: MutableMapping[str, str], active_resources: Resources) -> list[str]:
        per_node = self._processes_per_node()
        common = {**self._common(), "I_MPI_PIN": "0"}
        prefixes: list[list[str]] = [[] for _ in range(per_node)]
        if self.args.bind_cores_to_rank:
            from deepspeed.utils.numa import get_numactl_cmd

            bindings = [get_numactl_cmd(self.args.bind_core_list, per_node, local) for local in range(per_node)]
            common["OMP_NUM_THREADS"] = str(bindings[0][0])
            prefixes = [prefix for _, prefix in bindings]
        command = ["mpirun", "-ppn", str(per_node), *self.launcher_arguments]
        command += [word for name, content in common.items() for word in ("-genv", name, content)]
        command += ["-hosts", ",".join(self.resource_pool)]
        for rank in range(self.num_processes):
            local = rank % per_node
            separator = [":"] if rank else []
            command += [*separator, "-n", "1", "-env", "RANK", str(rank), "-env", "LOCAL_RANK", str(local)]
            command += [*prefixes[local], *self._python_command()]
        return command


class SlurmRunner(MultiNodeRunner):
    """srun inside or outside an allocation."""

    def __init__(self, args: argparse.Namespace, world_info_base64: str, resource_pool: Resources) -> None:
        super().__init__(args, world_info_base64)
        self.resource_pool = resource_pool

    def backend_exists(self) -> bool:
        return shutil.which("sinfo") is not None

    @property
    def name(self) -> str:
        return SLURM_LAUNCHER

    @classmethod
    def validate_active_resources(cls, active_resources: Resources) -> None:
        counts = {host: _slot_count(slots) for host, slots in active_resources.items()}
        if len(set(counts.values())) > 1:
            listing = ", ".join(f"{host}: {count}" for host, count in counts.items())
            raise UsageError(f"the slurm launcher needs the same number of slots on every host; found {listing}")
        for host, slots in active_resources.items():
            if not isinstance(slots, int) and list(slots) != list(range(len(slots))):
                raise UsageError(
                    f"the slurm launcher cannot choose single devices, found {', '.join(map(str, slots))} on {host}; "
                    "choose whole hosts, or the first N slots of every host"
                )

    def get_cmd(self, environment: MutableMapping[str, str], active_resources: Resources) -> list[str]:
        self.validate_active_resources(active_resources)
        args = self.args
        filtered = bool(args.include or args.exclude)
        command = ["srun", "-n", str(sum(_slot_count(slots) for slots in active_resources.values()))]
        command += self.launcher_arguments
        if filtered:
            command += ["--nodelist", ",".join(active_resources)]
        if filtered or args.num_nodes > 0:
            command += ["--nodes", str(len(active_resources))]
        if args.num_gpus > 0:
            command += ["--gpus-per-node", str(args.num_gpus)]
        # srun cuts this list at commas and knows no quotes. With ALL it passes its whole environment on, so that is how
        # every other value reaches the workers unharmed.
        plain = {name: content for name, content in self.exports.items() if re.fullmatch(r"[\w./:@%+=-]*", content)}
        environment.update(self.exports)
        environment.update(MASTER_ADDR=args.master_addr, MASTER_PORT=str(args.master_port))
        command.append(",".join(["--export=ALL", *(f"{name}={content}" for name, content in plain.items())]))
        return [*command, *self._python_command()]


class MVAPICHRunner(_WholePoolRunner):
    """MVAPICH2-GDR's mpirun."""

    def __init__(self, args: argparse.Namespace, world_info_base64: str, resource_pool: Resources) -> None:
        super().__init__(args, world_info_base64, resource_pool)
        for name, content in (
            ("MV2_SMP_USE_CMA", "0"),  # cross-memory attach is often forbidden in containers
            ("MV2_DEBUG_SHOW_BACKTRACE", "1"),
            ("MV2_USE_CUDA", "1"),
            ("MV2_SUPPORT_DL", "1"),
            ("MV2_ENABLE_AFFINITY", "0"),  # MPI_THREAD_MULTIPLE
            ("MV2_INTER_ALLGATHER_TUNING", "5"),
            ("MV2_CUDA_USE_NAIVE", "0"),
        ):
            self.add_export(name, content)

    def backend_exists(self) -> bool:
        if shutil.which("mpiname") is None:
            return False
        answer = subprocess.run(["mpiname"], capture_output=True, text=True, check=False).stdout
        return "MVAPICH2-GDR" in answer

    @property
    def name(self) -> str:
        return MVAPICH_LAUNCHER

    def get_cmd(self, environment: MutableMapping[str, str], active_resources: Resources) -> list[str]:
        per_node = self._processes_per_node()
        with open(MVAPICH_TMP_HOSTFILE, "w", encoding="utf-8") as hosts:
            hosts.writelines(f"{host}\n" for host in self.resource_pool)
        exports = [word for name, content in self.exports.items() for word in ("-env", f"{name}={content}")]
        return [
            "mpirun",
            "-np",
            str(self.num_processes),
            "-ppn",
            str(per_node),
            "--hostfile",
            MVAPICH_TMP_HOSTFILE,
            *self.launcher_arguments,
            *exports,
            *self._python_command(),
        ]


def _mpirun_version() -> str | None:
    """What the installed mpirun says about itself; None without one."""
    if shutil.which("mpirun") is None:
        return None
    answer = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=False)
    return answer.stdout + answer.stderr


LAUNCHER_CLASSES: dict[str, type[MultiNodeRunner]] = {
    PDSH_LAUNCHER: PDSHRunner,
    SSH_LAUNCHER: SSHRunner,
    OPENMPI_LAUNCHER: OpenMPIRunner,
    MPICH_LAUNCHER: MPICHRunner,
    IMPI_LAUNCHER: IMPIRunner,
    MVAPICH_LAUNCHER: MVAPICHRunner,
    SLURM_LAUNCHER: SlurmRunner,
}
"""``--launcher`` -> back end."""
