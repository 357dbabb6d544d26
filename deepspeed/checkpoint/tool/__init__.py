"""The commands of ``python -m deepspeed.checkpoint``, one file each."""
