#!/usr/bin/env bash
# Runs a command, and ends with 75 in place of 3 where its last line says that a host of the run was
# lost ("again": true): what may be started again as it is, told apart from what would fail again.
#
#   bash launch/host_lost.sh python3 -m kernjax.record --coordinator_address=auto ...
set -euo pipefail

said=$(mktemp)
exec 3> >(tee "$said")
tee=$!
# In the background, so that signals reach this shell, a container's first process, and are passed on.
"$@" >&3 3>&- &
child=$!
exec 3>&-
trap 'kill -TERM "$child"' TERM INT
code=0
wait "$child" || code=$?
while kill -0 "$child" 2>/dev/null; do # a signal ended `wait`, not the command
    code=0
    wait "$child" || code=$?
done
wait "$tee" || true
if [[ $code == 3 ]] && tail -n 1 "$said" | grep -q '"again": true'; then
    code=75
fi
rm -f "$said"
exit "$code"
