#!/usr/bin/env bash
# usage: overlay.sh VENV ENGINE TOOLS_PYTHON PROJECT[:SOURCE]...
# Makes VENV: an environment that sees the cached engine environment, test helpers, and this tree's
# packages. The cached environment itself is never written to, so that checkouts can share it.
set -euo pipefail
venv=$1 engine=$2 tools=$3
shift 3
here=$(cd "$(dirname "$0")" && pwd)

base=$("$tools" "$here/engine_env.py" "$engine")
site_of() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

rm -rf "$venv"
"$base/bin/python" -m venv --without-pip "$venv"
site_of "$base" > "$(site_of "$venv")/_engine.pth"
"$tools" -m pip --disable-pip-version-check --python "$venv/bin/python" install --quiet --no-deps \
  -r "$here/requirements-engine.lock"
PATH=$(dirname "$tools"):$PATH "$tools" "$here/link.py" "$(site_of "$venv")" "$@"
