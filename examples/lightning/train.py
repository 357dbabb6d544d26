"""Lightning's DeepSpeedStrategy: train, save, convert to one fp32 file, resume.

    python examples/lightning/train.py --stage 3 --folder out

Needs `pip install lightning`. Runs on GPUs when there are any, else on two CPU processes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.utilities.deepspeed import convert_zero_checkpoint_to_fp32_state_dict
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parent))


class Classifier(lightning.LightningModule):
    """Two layers; the optimizer is the host's own when its states are kept there."""

    def __init__(self, offload: bool) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
        self.offload = offload
        self.losses: list[float] = []

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        inputs, labels = batch
        loss = nn.functional.cross_entropy(self.net(inputs.to(self.net[0].weight.dtype)).float(), labels)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        if self.offload:
            from deepspeed.ops.adam import DeepSpeedCPUAdam

            optimizer: Any = DeepSpeedCPUAdam(self.parameters(), lr=0.01)
        else:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1), "interval": "step"}]


def trainer(options: argparse.Namespace, epochs: int) -> lightning.Trainer:
    if torch.cuda.is_available():
        hardware: dict[str, Any] = {"accelerator": "cuda", "devices": torch.cuda.device_count()}
        backend = "nccl"
    else:
        from host_accelerator import HostAccelerator

        hardware, backend = {"accelerator": HostAccelerator(), "devices": 2}, "gloo"
        os.environ["DS_ACCELERATOR"] = "cpu"
    strategy = DeepSpeedStrategy(
        stage=options.stage, offload_optimizer=options.offload, process_group_backend=backend, logging_level=30
    )
    return lightning.Trainer(
        strategy=strategy,
        max_epochs=epochs,
        precision=options.precision,
        gradient_clip_val=1.0,
        accumulate_grad_batches=2,
        default_root_dir=options.folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        **hardware,
    )


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """What is printed, on rank 0; nothing elsewhere."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, default=3, choices=(1, 2, 3))
    parser.add_argument("--offload", action="store_true", help="optimizer states in host memory")
    parser.add_argument("--precision", default="32-true", help='Lightning\'s name: "32-true", "bf16-mixed", "16-mixed"')
    parser.add_argument("--folder", default="lightning_out")
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    data = TensorDataset(torch.randn(32, 8), torch.randint(0, 2, (32,)))
    model = Classifier(options.offload)
    first = trainer(options, epochs=1)
    first.fit(model, DataLoader(data, batch_size=4))
    saved = str(Path(options.folder) / f"stage{options.stage}.ckpt")
    first.save_checkpoint(saved)

    resumed = Classifier(options.offload)
    second = trainer(options, epochs=2)
    second.fit(resumed, DataLoader(data, batch_size=4), ckpt_path=saved)
    if not second.is_global_zero:
        return {}
    whole = convert_zero_checkpoint_to_fp32_state_dict(saved, saved + ".pt")["state_dict"]
    result = {"losses": model.losses, "resumed": resumed.losses, "steps": second.global_step}
    return {**result, "shapes": {name: list(value.shape) for name, value in whole.items()}}


if __name__ == "__main__":
    found = main()
    if found:
        print(json.dumps(found))
