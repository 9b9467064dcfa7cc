#!/usr/bin/env bash
# Runs the native tests of the ASan+UBSan and of the TSan build side by side: they mostly wait. A failed
# one's output is printed whole.
#
# Left out: under TSan the controls that race on purpose (they show that their tests can fail), and the storms
# of processes, of which it sees one process at a time and `make chaos` does more; the slot model, which has
# one thread; the layout slab, which is younger than these builds and has not been through them yet.
set -uo pipefail
cd "$(dirname "$0")/.."
filter=${GTEST_FILTER:--SlotModel.*:*Slab*}
unset GTEST_FILTER
export ASAN_OPTIONS=detect_stack_use_after_return=1 UBSAN_OPTIONS=print_stacktrace=1
export TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1

run() {
  local name=$1 only=$2 log=build/$1-tests.log
  if "build/$name/native/ucm_tests" --gtest_brief=1 --gtest_filter="$only" >"$log" 2>&1; then
    echo "$name: $(grep -E '^\[  PASSED' "$log")"
  else
    echo "$name: FAILED"
    cat "$log"
    return 1
  fi
}

run asan "$filter" &
asan=$!
if [[ $filter == -* ]]; then filter=$filter:*TheControl*:PosixProcesses.*; fi
run tsan "$filter"
tsan=$?
wait "$asan" && exit "$tsan"
exit 1
