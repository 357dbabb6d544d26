#!/usr/bin/env bash
# An environment of its own with the release benchmarks compare against: .venv-reference/ (or the folder given); with
# "clients" as the second argument also transformers and accelerate, for benchmarks/hf_trainer.py.
set -euo pipefail
cd "$(dirname "$0")/.."
target=${1:-.venv-reference}
python3 -m venv "$target"
"$target/bin/python" -m pip install -q -c constraints.txt torch numpy setuptools wheel ninja
"$target/bin/python" -m pip install -q --no-build-isolation deepspeed==0.19.8 huggingface_hub
if [[ ${2:-} == clients ]]; then
    "$target/bin/python" -m pip install -q -c constraints.txt -c constraints-clients.txt transformers accelerate
fi
# Isolated (-I): with this folder on its path Python would find the metadata of this project first.
"$target/bin/python" -I -c "import importlib.metadata as m; print('deepspeed', m.version('deepspeed'), 'in $target')"
# Its ops are compiled here, by one process: ranks that need one at once have been seen to wait for each other's lock
# for ever, and a benchmark would count the minutes.
DS_ACCELERATOR=cpu PATH=$(dirname "$(readlink -f "$target/bin")")/bin:$PATH "$target/bin/python" -I -c '
from deepspeed.accelerator import get_accelerator
for name in ("FusedAdamBuilder", "CPUAdamBuilder", "ShareMemCommBuilder"):
    get_accelerator().create_op_builder(name).load(verbose=False)
    print("built", name)
'
