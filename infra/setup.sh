#!/usr/bin/env bash
# Make .venv with everything the platform needs. Safe to run again: it does nothing when nothing
# changed. `infra/setup.sh gpu` installs the CUDA build of vLLM instead of the CPU build.
set -euo pipefail
cd "$(dirname "$0")/.."

flavour=${1:-cpu}
case $flavour in
  cpu | gpu) ;;
  *) echo "usage: infra/setup.sh [cpu|gpu]" >&2; exit 2 ;;
esac
venv=${CARRYOVER_VENV:-.venv}
say() { printf '==> %s\n' "$*"; }

find_python() {
  local candidate
  for candidate in ${PYTHON:-} python3.11 python3.12 python3; do
    if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "error: needs Python 3.11 or 3.12 on PATH; install one, or name it: PYTHON=/path/to/python make setup" >&2
  exit 2
}

stamp=$venv/.carryover-setup
wanted="$flavour $(cat pyproject.toml infra/setup.sh | sha256sum | cut -d' ' -f1)"
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
  say "environment is up to date ($venv, $flavour)"
  exit 0
fi

[ -x "$venv/bin/python" ] || { say "creating $venv"; "$(find_python)" -m venv "$venv"; }
python=$venv/bin/python
pip() { "$python" -m pip --disable-pip-version-check "$@"; }
torch_version=$("$python" - <<'PY'
import re, tomllib
with open("pyproject.toml", "rb") as file:
    names = tomllib.load(file)["project"]["dependencies"]
print(next(re.fullmatch(r"torch==(\S+)", name).group(1) for name in names if name.startswith("torch==")))
PY
)

say "updating pip"
pip install --quiet --upgrade pip

# tcmalloc and ninja make the CPU engine faster; neither is required.
if [ "$flavour" = cpu ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null \
    && ! ldconfig -p 2>/dev/null | grep -q libtcmalloc_minimal; then
  say "installing tcmalloc (optional)"
  { apt-get update -qq && apt-get install -y -qq --no-install-recommends libtcmalloc-minimal4; } \
    >/dev/null 2>&1 || say "tcmalloc is not available here; going on without it"
fi

if [ "$flavour" = cpu ] && ! "$python" -c 'import torch' 2>/dev/null; then
  if pip download --quiet --no-deps --dest "$(mktemp -d)" "torch==$torch_version+cpu" 2>/dev/null; then
    say "installing torch $torch_version+cpu from pip's own configuration"
    pip install --quiet "torch==$torch_version+cpu"
  else
    # pip offers no CPU wheel: uv knows the index on which PyTorch publishes it.
    say "installing torch $torch_version from PyTorch's CPU wheel index"
    pip install --quiet uv
    "$python" -m uv pip install --quiet --python "$python" --torch-backend cpu "torch==$torch_version"
  fi
fi

say "installing the platform and its dependencies (about 4.5 GB; minutes)"
pip install --quiet --editable ".[$flavour,dev]"

# Nothing here is multimodal. The torchvision family comes along as a dependency of vLLM, and where
# its build does not match torch's it breaks the import of every transformers model.
pip uninstall --quiet --yes torchvision torchaudio torchcodec 2>/dev/null || true
"$python" -c 'from transformers import LlamaForCausalLM, Qwen3ForCausalLM' \
  || { echo "error: transformers cannot import Llama and Qwen3; remove $venv and run again" >&2; exit 1; }
if [ "$flavour" = cpu ] && [ ! -e "$venv/lib/libiomp5.so" ]; then
  say "warning: no libiomp5.so in $venv/lib; speculative decoding on CPU will be slow"
fi

echo "$wanted" > "$stamp"
say "ready: $venv/bin/platform --help"
