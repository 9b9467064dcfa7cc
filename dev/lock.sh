#!/usr/bin/env bash
# Rewrites requirements.lock: resolves requirements.in in an empty environment and pins all of it.
set -euo pipefail
cd "$(dirname "$0")"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
"${PYTHON:-python3}" -m venv "$scratch/venv"
"$scratch/venv/bin/python" -m pip install --quiet --upgrade pip
"$scratch/venv/bin/python" -m pip install --quiet -r requirements.in
{
  echo "# All that dev/requirements.in needs, pinned; written by \`make lock\`."
  "$scratch/venv/bin/python" -m pip freeze --all | grep -v '^setuptools=='
} > requirements.lock
