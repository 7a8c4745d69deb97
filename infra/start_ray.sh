#!/usr/bin/env bash
# Start this machine's part of a Ray cluster, with the threads and libraries that engines need.
#
#   infra/start_ray.sh head                   the first machine; prints what the others need
#   infra/start_ray.sh worker HOST:PORT       every other machine
#
# Stays in the foreground; Ctrl-C or SIGTERM ends this machine's part and all its processes.
# Whoever may run code on a Ray cluster owns its machines, so a token is required: the head makes
# ~/.ray/auth_token, which every other machine needs a copy of. RAY_AUTH_MODE=disabled leaves it out.
# RAY_PORT sets the head's port (6379). Further arguments go to `ray start`.
set -euo pipefail

role=${1:-}
port=${RAY_PORT:-6379}
export RAY_AUTH_MODE=${RAY_AUTH_MODE:-token}
fail() { echo "error: $*" >&2; exit 2; }

case $role in
  -h | --help) sed -n '2,10s/^# \{0,1\}//p' "$0"; exit 0 ;;
  head | worker) shift ;;
  *) fail "usage: infra/start_ray.sh head | worker HOST:PORT" ;;
esac

# the environment beside this checkout, or the image's own
bin=${CARRYOVER_VENV:-$(dirname "$0")/../.venv}/bin
[ -x "$bin/ray" ] || bin=$(dirname "$(command -v ray)" 2>/dev/null) || fail "run 'make setup' first"

if [ "$role" = head ]; then
  place=(--head --port "$port" --dashboard-host 127.0.0.1)
  if [ "$RAY_AUTH_MODE" = token ]; then
    "$bin/ray" get-auth-token --generate >/dev/null
    echo "every other machine needs a copy of ~/.ray/auth_token"
  fi
  here=$(hostname -i | cut -d' ' -f1):$port
  echo "other machines:   infra/start_ray.sh worker $here"
  echo "for commands:     export RAY_ADDRESS=$here RAY_AUTH_MODE=$RAY_AUTH_MODE"
else
  [ $# -gt 0 ] || fail "worker needs the head's HOST:PORT"
  place=(--address "$1")
  shift
fi
exec "$bin/python" -m carryover.guardian "$bin/ray" start --block --disable-usage-stats "${place[@]}" "$@"
