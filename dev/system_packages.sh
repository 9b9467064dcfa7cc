#!/usr/bin/env bash
# Installs the system libraries that are missing when run as root on Debian or Ubuntu, names them
# otherwise. Presence is told by header, library or command, so that other distributions work too.
set -euo pipefail
cd "$(dirname "$0")"

present() {
  local kind=${1%%:*} what=${1#*:}
  case $kind in
    command) command -v "$what" >/dev/null ;;
    header) echo "#include <$what>" | g++ -std=c++17 -x c++ -E - >/dev/null 2>&1 ;;
    library) { ldconfig -p || /sbin/ldconfig -p; } 2>/dev/null | grep -q "$what" ;;
    *) echo "system-packages.txt: unknown test $1" >&2; exit 2 ;;
  esac
}

missing=()
while IFS=$'\t' read -r package test; do
  [[ $package == \#* || -z $package ]] && continue
  present "$test" || missing+=("$package")
done < system-packages.txt

((${#missing[@]} == 0)) && exit 0
if [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
  echo "installing system packages: ${missing[*]}"
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq
  apt-get install -y -qq --no-install-recommends "${missing[@]}"
else
  echo "missing system packages (Debian/Ubuntu names): ${missing[*]}" >&2
  echo "install them, for example: sudo apt-get install ${missing[*]}" >&2
  exit 1
fi
