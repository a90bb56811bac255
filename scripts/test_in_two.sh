#!/usr/bin/env bash
# Runs the two halves of the test suite at once, since tests often wait, and shows progress all the time.
#
#   scripts/test_in_two.sh      `make test` calls it
#
# The first half prints as it runs. What the second half prints is shown behind it, as it comes.
set -uo pipefail

MAKE=${MAKE:-make}
log=$(mktemp)
"$MAKE" --no-print-directory test-apart >"$log" 2>&1 &
apart=$!
trap 'kill "$apart" 2>/dev/null; rm -f "$log"' EXIT
trap 'exit 130' INT TERM

status=0
"$MAKE" --no-print-directory test-others || status=1
printf '\nThe second half (%s):\n' "examples, the router, deploy, benchmarks and the stores"
tail -n +1 -f --pid="$apart" "$log"
wait "$apart" || status=1
exit "$status"
