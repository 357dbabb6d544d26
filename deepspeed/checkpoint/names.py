"""Names of checkpoint files and folders: the only place that spells them. Pure text, no files are touched.

<save_dir>/latest                                          the tag, text
<save_dir>/zero_to_fp32.py, zero_to_torch.py               recovery scripts, when optimizer state is sharded
<save_dir>/<tag>/mp_rank_00_model_states.pt                weights and everything that is not per rank
<save_dir>/<tag>/zero_pp_rank_D_mp_rank_00_model_states.pt the same at stage 3, by every shard rank; weights are in
                                                           the optimizer-states files, or here when frozen
<save_dir>/<tag>/[bf16_]zero_pp_rank_D_mp_rank_00_optim_states.pt     masters and optimizer state of shard rank D
<save_dir>/<tag>/rng_state_R.pt                            random states of global rank R
<save_dir>/<tag>/manifest.json                             every file with its size and checksum; makes a tag valid
<save_dir>/latest_universal                                name of a universal folder, text
<universal>/zero/optimizer_state.pt                        what all parameters of a universal folder share
<universal>/zero/<parameter>/fp32.pt exp_avg.pt step.pt .. its master and states; model states lie beside zero/
<save_dir>/.<tag>.saving-<token>/                          a save in progress, or what a crash left of one
<save_dir>/.<tag>.replaced-<token>/                        the old folder of a tag, for the moment of its replacement
<save_dir>/.<tag>.deleted-<token>/                         a folder on its way out
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from deepspeed.checkpoint.constants import (
    BF16_ZERO_FILE_PREFIX,
    LAYER_FILE_PREFIX,
    MODEL_FILE_PREFIX,
    MODEL_FILE_SUFFIX,
    OPTIM_FILE_SUFFIX,
    ZERO_FILE_PREFIX,
)

LATEST = "latest"
LATEST_UNIVERSAL = "latest_universal"
MANIFEST = "manifest.json"
UNIVERSAL_STATES = "zero"
UNIVERSAL_COMMON = f"{UNIVERSAL_STATES}/optimizer_state.pt"
RECOVERY_SCRIPTS = ("zero_to_fp32.py", "zero_to_torch.py")
DEFAULT_TAG = "global_step{}"
# As a tag to load: the folder given is itself the tag folder.
THIS_FOLDER = "."

_HIDDEN = re.compile(r"^\.(?P<name>.+)\.(?P<kind>saving|replaced|deleted)-(?P<token>[0-9a-f]+)$")
_PARTIAL = re.compile(r"^\..+\.\d+\.partial$")
_OPTIM = re.compile(
    rf"^(?P<bf16>bf16_|fp16_)?{ZERO_FILE_PREFIX}(?P<dp>\d+)_{MODEL_FILE_PREFIX}(?P<mp>\d+)_?{OPTIM_FILE_SUFFIX[1:]}$"
)
_MODEL = re.compile(rf"^{ZERO_FILE_PREFIX}(?P<dp>\d+)_{MODEL_FILE_PREFIX}(?P<mp>\d+){MODEL_FILE_SUFFIX}$")
_OURS = re.compile(
    rf"^({MANIFEST}|rng_state_\d+\.pt|.*{MODEL_FILE_SUFFIX}|.*{OPTIM_FILE_SUFFIX[1:]}|{LAYER_FILE_PREFIX}\d+.*\.pt)$"
)
_BAD_IN_TAG = re.compile(r"[\x00-\x1f\\]")


def model_file(mp_rank: int) -> str:
    """Model states of one model-parallel rank (weights replicated over the data-parallel ranks)."""
    return f"{MODEL_FILE_PREFIX}{mp_rank:02d}{MODEL_FILE_SUFFIX}"


def sharded_model_file(dp_rank: int, mp_rank: int) -> str:
    """Model states of one shard rank, where weights are sharded (stage 3)."""
    return f"{ZERO_FILE_PREFIX}{dp_rank}_{model_file(mp_rank)}"


def optim_file(dp_rank: int, mp_rank: int, *, bf16: bool) -> str:
    """Optimizer states of one shard."""
    prefix = BF16_ZERO_FILE_PREFIX if bf16 else ZERO_FILE_PREFIX
    return f"{prefix}{dp_rank}_{MODEL_FILE_PREFIX}{mp_rank:02d}{OPTIM_FILE_SUFFIX}"


def rng_file(rank: int) -> str:
    """Random states of one global rank."""
    return f"rng_state_{rank}.pt"


def universal_file(param: str, key: str) -> str:
    """One state of one parameter in a universal folder. Raises ValueError for names that would lead out of it."""
    for part in (param, key):
        if not part or part.startswith("/") or any(step in ("", ".", "..") for step in part.split("/")):
            raise ValueError(f"{part!r} cannot be part of a path in a universal checkpoint")
        if _BAD_IN_TAG.search(part):
            raise ValueError(f"{part!r} holds a backslash or a control character, no universal checkpoint can hold it")
    return f"{UNIVERSAL_STATES}/{param}/{key}.pt"


@dataclass(frozen=True)
class OptimName:
    """What the name of an optimizer-states file says."""

    dp_rank: int
    mp_rank: int
    bf16: bool


def parse_optim_file(name: str) -> OptimName | None:
    """The parts of an optimizer-states file name (files without the underscore before the suffix too), else None."""
    found = _OPTIM.match(name)
    if found is None:
        return None
    return OptimName(int(found["dp"]), int(found["mp"]), found["bf16"] == "bf16_")


def parse_sharded_model_file(name: str) -> tuple[int, int] | None:
    """``(shard rank, model-parallel rank)`` of a name made by :func:`sharded_model_file`, else None."""
    found = _MODEL.match(name)
    return (int(found["dp"]), int(found["mp"])) if found else None


def shard_rank_of(name: str) -> int | None:
    """Shard rank whose file this is; None for a file that all shards share."""
    optim, model = parse_optim_file(name), parse_sharded_model_file(name)
    return optim.dp_rank if optim else model[0] if model else None


def is_checkpoint_file(name: str) -> bool:
    """True for files a save writes into a tag folder (and therefore replaces); False for what users put there."""
    return _OURS.match(name) is not None


def check_folder(call: str, argument: str, folder: object) -> Path:
    """``folder`` as a path. Raises TypeError for what is none, naming the call and its argument."""
    if not isinstance(folder, (str, os.PathLike)):
        raise TypeError(f"{call}: {argument} is {folder!r} ({type(folder).__name__}); expected a path, str or Path")
    return Path(folder)


def check_tag(tag: object, *, loading: bool = False) -> str:
    """``tag`` as text. Raises ValueError for one that would lead outside the checkpoint folder or hide in it.

    Numbers and other objects are taken as their text. Sub-folders (``run/7``) are allowed; ``.`` (the folder itself)
    only for loading.
    """
    text = str(tag)
    if loading and text == THIS_FOLDER:
        return text
    problem = _tag_problem(text)
    if problem:
        raise ValueError(
            f"checkpoint tag {text!r} {problem}; a tag is the name of a folder in the checkpoint folder, like 'step7'"
        )
    return text


def _tag_problem(text: str) -> str | None:
    parts = text.split("/")
    if not text.strip():
        return "is empty"
    if _BAD_IN_TAG.search(text):
        return "holds a backslash or a control character"
    if text.startswith("/") or re.match(r"^[A-Za-z]:", text):
        return "is an absolute path"
    if any(part in ("", ".", "..") for part in parts):
        return "holds an empty, '.' or '..' component"
    if any(part.startswith(".") for part in parts):
        return "starts with a dot"
    if any(len(part.encode()) > 200 for part in parts):
        return "is longer than a file name may be"
    if parts[0] in (LATEST, LATEST_UNIVERSAL, *RECOVERY_SCRIPTS):
        return "is the name of a file the checkpoint folder holds"
    return None


class Transit(Enum):
    """Why a folder has a hidden name."""

    SAVING = "saving"
    REPLACED = "replaced"
    DELETED = "deleted"


@dataclass(frozen=True)
class HiddenName:
    """The parts of the name of a folder in transit: last component of its tag, why, and whose."""

    name: str
    kind: Transit
    token: str

    def __str__(self) -> str:
        return f".{self.name}.{self.kind.value}-{self.token}"


def parse_hidden(folder: str) -> HiddenName | None:
    """The parts of a hidden folder name made here, else None."""
    found = _HIDDEN.match(folder)
    return HiddenName(found["name"], Transit(found["kind"]), found["token"]) if found else None


def partial_file(name: str) -> str:
    """A name nobody else uses, for the file ``name`` until it is complete.

    By chance, not by process: threads of one process write into one folder, and processes of several hosts do.
    """
    return f".{name}.{int.from_bytes(os.urandom(8), 'little') >> 1}.partial"


def is_partial_file(name: str) -> bool:
    return _PARTIAL.match(name) is not None


def clean_name(name: str) -> str:
    """A parameter name without what ``torch.compile`` puts in front of the modules it wraps."""
    return name.replace("_orig_mod.", "")
