#!/usr/bin/env bash
# Start an MLflow tracking server for a team; runs go to it with MLFLOW_TRACKING_URI=http://HOST:PORT.
#
# MLFLOW_BACKEND_STORE_URI       where runs go; default: sqlite:///mlflow.db in the working folder.
#                                For more than a few people: postgresql://user:password@host/mlflow
# MLFLOW_ARTIFACTS_DESTINATION   where files go; default: mlartifacts; s3://bucket/folder works too
# MLFLOW_HOST, MLFLOW_PORT       default: 127.0.0.1, 5000
# MLFLOW_SERVER_ALLOWED_HOSTS    names under which clients may reach it, where not on loopback
#
# Arguments go to `mlflow server`. One person on one machine needs no server: `platform ui`.
set -euo pipefail

case ${1:-} in
  -h | --help) sed -n '2,11s/^# \{0,1\}//p' "$0"; exit 0 ;;
esac
export MLFLOW_BACKEND_STORE_URI=${MLFLOW_BACKEND_STORE_URI:-sqlite:///mlflow.db}
export MLFLOW_ARTIFACTS_DESTINATION=${MLFLOW_ARTIFACTS_DESTINATION:-$PWD/mlartifacts}
export MLFLOW_DISABLE_TELEMETRY=${MLFLOW_DISABLE_TELEMETRY:-true}
export MLFLOW_SERVER_ENABLE_JOB_EXECUTION=${MLFLOW_SERVER_ENABLE_JOB_EXECUTION:-false}

bin=${CARRYOVER_VENV:-$(dirname "$0")/../.venv}/bin
[ -x "$bin/mlflow" ] || bin=$(dirname "$(command -v mlflow || echo "error: run 'make setup' first" >&2)")
[ -x "$bin/mlflow" ] || exit 2
exec "$bin/python" -m carryover.guardian "$bin/mlflow" server \
  --host "${MLFLOW_HOST:-127.0.0.1}" --port "${MLFLOW_PORT:-5000}" --workers "${MLFLOW_WORKERS:-1}" "$@"
