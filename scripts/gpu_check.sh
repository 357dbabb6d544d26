#!/usr/bin/env bash
# Everything that needs a GPU, in one go (under 8 minutes, no network): correctness first, then benchmarks.
# Results go to benchmarks/results/<device name>.txt, or to $OUT when that is set.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
name=$("$python" -c "import torch; print(torch.cuda.get_device_name(0).lower().replace(' ', '-') if torch.cuda.is_available() else '')")
if [ -z "$name" ]; then
    echo "gpu_check: torch sees no GPU here; nothing was run" >&2
    exit 3
fi
out=${OUT:-benchmarks/results}
mkdir -p "$out"
{
    "$python" -m deepspeed.env_report --json
    timeout 200 "$python" -m pytest -q -p no:cacheprovider -c /dev/null --rootdir . tests/device
    timeout 220 "$python" benchmarks/gpu_step.py
} 2>&1 | tee "$out/$name.txt"
exit "${PIPESTATUS[0]}"
