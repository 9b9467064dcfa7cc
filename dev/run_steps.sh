#!/usr/bin/env bash
# Runs make targets one after another, all of them even when one fails, and closes with a summary.
set -uo pipefail
make=${MAKE:-make}
failed=()
summary=()
for step in "$@"; do
  echo "=== $step"
  start=$SECONDS
  if "$make" --no-print-directory "$step"; then verdict=ok; else verdict=FAILED; failed+=("$step"); fi
  summary+=("$(printf '%-16s %-7s %4d s' "$step" "$verdict" $((SECONDS - start)))")
done
echo "=== summary"
printf '%s\n' "${summary[@]}"
if ((${#failed[@]})); then
  echo "failed: ${failed[*]}" >&2
  exit 1
fi
