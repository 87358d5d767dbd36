#!/usr/bin/env bash
# Runs the services of docker-compose.yml without a container engine, with the family `tiny`. Checks that a request is
# handed over and that every dashboard shows data. Linux only; needs redis-server, and prometheus for the dashboards.
# PYTHON is an interpreter with kvrelay[worker].
#
# The processes run in their own mount, network and process namespaces. Commands, paths, ports and host names are those
# of the containers; nothing on this machine changes, and nothing is left behind.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-$PWD/.venv/bin/python}
as_root=()
[ "$(id -u)" = 0 ] || as_root=(--map-root-user)
export PYTHONDONTWRITEBYTECODE=1
# However this script ends, all processes end: unshare alone would go on.
setpriv --pdeathsig KILL unshare "${as_root[@]}" --mount --net --pid --fork --kill-child --mount-proc \
    "$PYTHON" -m deploy.smoke "$@" &
wait $!
