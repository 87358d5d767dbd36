#!/usr/bin/env bash
# Runs the services of docker-compose.yml without a container engine, over the models of family `tiny`, and sees that a
# turn is handed over, and that every dashboard has something to show. Linux only; needs redis-server, and prometheus
# for the dashboards. PYTHON names an interpreter that has kvrelay[worker].
#
# The processes get a mount, a network and a process namespace of their own, so that the commands, paths, ports and host
# names are those of the containers, nothing of this machine is touched, and nothing is left behind.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-$PWD/.venv/bin/python}
as_root=()
[ "$(id -u)" = 0 ] || as_root=(--map-root-user)
export PYTHONDONTWRITEBYTECODE=1
# Who ends this script, in whatever way, ends all of them: unshare by itself would go on.
setpriv --pdeathsig KILL unshare "${as_root[@]}" --mount --net --pid --fork --kill-child --mount-proc \
    "$PYTHON" -m deploy.smoke "$@" &
wait $!
