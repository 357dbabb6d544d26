"""Section `checkpoint`: how checkpoints are written, checked and kept."""

from typing import Annotated

from pydantic import Field

from deepspeed.runtime.config_types import Flag, Integer, Size, upper_word
from deepspeed.runtime.config_utils import DeepSpeedConfigModel


class CheckpointWriterConfig(DeepSpeedConfigModel):
    """`checkpoint.writer`: the fast and the decoupled writer."""

    keeps_unknown_keys = True

    type: Annotated[str, upper_word("MOCK", "PYTHON", "FAST")] = "FAST"
    """File writer: FAST writes large files past the page cache, one buffer filling while others are written; PYTHON is
    plain file I/O; MOCK writes nothing. Example: "PYTHON"."""

    io_buffer_size: Annotated[Size, Field(gt=0)] = 67_108_864
    """Bytes of the write buffer, all parts together. Example: 134217728."""

    io_buffer_double: Flag = True
    """Fill one half of the buffer while the other is written. Example: false."""

    show_statistics: Flag = False
    """Log bytes, seconds and speed of every save. Example: true."""

    data_parallel: Annotated[str, upper_word("REPLICA", "SOCKET", "MACHINE")] | None = None
    """Ranks that share the writing of one file. Example: "REPLICA"."""

    decoupled: Flag = False
    """Write beside training: saving returns after a copy into a kept host buffer. Example: true."""

    io_multiplier: Annotated[Integer, Field(gt=0)] = 1
    """Buffers per rank (times two with `io_buffer_double`), each written by a thread of its own. Example: 2."""


class CheckpointParallelWriteConfig(DeepSpeedConfigModel):
    """`checkpoint.parallel_write`: who writes which file."""

    keeps_unknown_keys = True

    pipeline_stage: Flag = False
    """[with PipelineModule] Data-parallel ranks of a stage share the writing of its layer files. Example: true."""


class CheckpointConfig(DeepSpeedConfigModel):
    """`checkpoint`: saving and loading."""

    keeps_unknown_keys = True

    tag_validation: Annotated[str, upper_word("IGNORE", "WARN", "FAIL")] = "WARN"
    """What to do when ranks save under different tags. Example: "Fail"."""

    load_universal: Flag = False
    """Read the checkpoint from a universal folder. Example: true."""

    use_node_local_storage: Flag = False
    """Every node writes to and reads from its own disk. Example: true."""

    parallel_write: CheckpointParallelWriteConfig = Field(default_factory=CheckpointParallelWriteConfig)
    """Who writes which file. Example: {"pipeline_stage": true}."""

    checkpoint_serialization: Flag = True
    """Use torch's zip file format. Example: false."""

    writer: CheckpointWriterConfig | None = None
    """How files are written; absent: FAST with a small buffer, complete when saving returns.
    Example: {"decoupled": true}."""

    keep_last: Annotated[Integer, Field(ge=1)] | None = None
    """Keep only this many newest checkpoints in a folder, deleting older ones once a newer one is complete;
    absent = keep all. Example: 3."""

    load_rng_state: Flag = True
    """Loading a checkpoint also restores the random states of Python, numpy and torch on every rank, so that dropout
    and shuffling go on as in an unbroken run; false leaves them alone. Example: false."""
