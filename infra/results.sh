#!/usr/bin/env bash
# Train and measure everything that the results page is made from, on one target.
#
#   infra/results.sh laboratory|embedded train             data, target, drafters: hours
#   infra/results.sh laboratory|embedded measure PROMPTS   benches and diagnoses, alone on the machine
#
# PROMPTS is what `platform bench` takes: prompts that nothing was trained on. Run it again after an
# interruption: every step goes on where it was, and what is finished is reused. Results lie in
# runs/results/TARGET, from where jobs/configs/results.yaml names them.
#
# REGIMES, SEEDS   what to train; default: "dflash markov", "1 2 3"
# NUM_PROMPTS      that the target writes for training; default: 2400, embedded 9600
# NUM_TASKS        of the kinds that benches measure, for the embedded target; default: 6000
# NUM_EVAL         prompts of PROMPTS to measure on; default: 96
# CONTEXT          tokens that a prompt and its answer may have; default: 2048, laboratory 1024,
#                  which are all positions that it has: PROMPTS beyond it are refused
# PORT             of the endpoint while it is measured; default: 8765
# ABLATION         what else is carried, and how it is marked, as CARRIED/MARK: a training of each for
#                  the last of REGIMES and the first of SEEDS; default for the laboratory: all kinds
# EXTRA            options for every training, such as "--set max_steps=20"
set -euo pipefail
cd "$(dirname "$0")/.."

usage() { sed -n "2,/^set/s/^# \{0,1\}//p" infra/results.sh; exit "$1"; }
case ${1:-} in laboratory | embedded) subject=$1 ;; -h | --help) usage 0 ;; *) usage 2 >&2 ;; esac
case ${2:-} in train) ;; measure) prompts=${3:?"give the prompts to measure on"} ;; *) usage 2 >&2 ;; esac

read -ra regimes <<<"${REGIMES:-dflash markov}"
read -ra seeds <<<"${SEEDS:-1 2 3}"
read -ra extra <<<"${EXTRA:-}"
variants=
[ "$subject" = embedded ] ||
  variants="hidden_states/none hidden_states/projector target_tokens/embedding draft_tokens/embedding"
read -ra ablation <<<"${ABLATION-$variants}"
ablated=${regimes[-1]}
num_eval=${NUM_EVAL:-96}

# Cores that multiply in bfloat16 train and write text in it, 1.6 times as fast; benches stay at
# the engines' default.
train_fast=() write_fast=()
if grep -qw -e avx512_bf16 -e amx_bf16 /proc/cpuinfo; then
  train_fast=(--set precision=bfloat16) write_fast=(--set engine.dtype=bfloat16)
fi
platform=${CARRYOVER_VENV:-.venv}/bin/platform
config=jobs/configs/$subject.yaml results=runs/results/$subject
if [ "$subject" = embedded ]; then
  target=embedded num_prompts=${NUM_PROMPTS:-9600} context=${CONTEXT:-2048}
else
  target=runs/targets/laboratory/best num_prompts=${NUM_PROMPTS:-2400} context=${CONTEXT:-1024}
fi

step() { printf '\n==> %s\n' "$*"; "$@"; }

data() {
  local sources=(--prompts runs/data/prompts)
  step "$platform" data synthesize -n "$num_prompts" ${write_fast[@]+"${write_fast[@]}"}
  if [ "$subject" = embedded ]; then
    step "$platform" data synthesize -c jobs/configs/prompts_embedded_tasks.yaml \
      -n "${NUM_TASKS:-6000}" ${write_fast[@]+"${write_fast[@]}"}
    sources=(--prompts runs/data/task-prompts "${sources[@]}")
  fi
  step "$platform" data regenerate "${sources[@]}" ${write_fast[@]+"${write_fast[@]}"} \
    --set max_new_tokens=192
  responses=runs/data/responses
  if [ "$subject" = laboratory ]; then
    step "$platform" train target -c jobs/configs/laboratory_target.yaml -d "$responses" \
      ${extra[@]+"${extra[@]}"}
    responses=runs/laboratory/responses
    step "$platform" data regenerate --target "$target" --prompts runs/data/prompts \
      --out "$responses"
  fi
}

# What a variant's training is called.
variant_name() { printf '%s-%s-%s' "$subject" "$ablated" "$(tr '/_' '--' <<<"$1")"; }

continuation() {
  local kind=$1 regime=$2 seed=$3 name=$4
  shift 4
  step "$platform" train "$kind" -c "$config" -d "$responses" --name "$name" \
    --from "runs/train/$subject-$regime/best" --set "seed=$seed" --skip-verify \
    ${train_fast[@]+"${train_fast[@]}"} "$@" ${extra[@]+"${extra[@]}"}
}

drafters() {
  local regime seed kind name variant
  for regime in "${regimes[@]}"; do
    name=$subject-$regime
    step "$platform" train baseline -c "$config" -d "$responses" --name "$name" \
      --set "regime=$regime" ${train_fast[@]+"${train_fast[@]}"} ${extra[@]+"${extra[@]}"}
    for seed in "${seeds[@]}"; do
      for kind in carryover control; do
        continuation "$kind" "$regime" "$seed" "$name-$kind-$seed"
      done
    done
  done
  for variant in ${ablation[@]+"${ablation[@]}"}; do
    continuation carryover "$ablated" "${seeds[0]}" "$(variant_name "$variant")" \
      --set "carried.carried=${variant%/*}" --set "carried.mark=${variant#*/}"
  done
}

# A bench begins, goes on where it was, or is left as it is.
bench() {
  local out=$1 mode=$2
  shift 2
  if [ -e "$out/finished" ]; then
    echo "==> $out is finished"
    return
  elif [ -e "$out/bench.yaml" ]; then
    step "$platform" bench "$mode" --resume "$out"
  else
    step "$platform" bench "$mode" --out "$out" -p "$prompts" -n "$num_eval" "$@"
  fi
  touch "$out/finished"
}

offline() {
  local regime=$1 name=$subject-$1 seed kind
  local arms=(--arm autoregressive --arm "$regime=runs/train/$name/best")
  for seed in "${seeds[@]}"; do
    for kind in control carryover; do
      arms+=(--arm "$regime-$kind-$seed=runs/train/$name-$kind-$seed/last")
    done
  done
  bench "$results/offline-$regime" offline --target "$target" "${arms[@]}" \
    --temperature 0 --temperature 1 --max-tokens 128 --set "engine.max_model_len=$context"
}

online() {
  local regime=$1 name=$subject-$1 seed=${seeds[0]} port=${PORT:-8765} url server
  local log=$results/serve-$1.log
  url=http://127.0.0.1:$port
  local arms="[{name: autoregressive}, {name: $regime, drafter: runs/train/$name/best}"
  arms+=", {name: $regime-control-$seed, drafter: runs/train/$name-control-$seed/last}"
  arms+=", {name: $regime-carryover-$seed, drafter: runs/train/$name-carryover-$seed/last}"
  # once more, to see what equal arms differ by
  arms+=", {name: $regime-again, drafter: runs/train/$name/best}]"
  [ ! -e "$results/online-$regime/finished" ] || return 0
  rm -f "$log"  # or an earlier server's would say that this one is ready
  # not through step, so that its id is the server's; a job in the background ignores SIGINT
  "$platform" serve -c serve_apps/configs/embedded.yaml --set "name=$name" \
    --set "target=$target" --set "arms=$arms" --set "http.port=$port" \
    --set engine.max_num_seqs=32 --set "engine.max_model_len=$context" >"$log" 2>&1 &
  server=$!
  # shellcheck disable=SC2064 # the id of this server
  trap "kill $server 2>/dev/null; wait $server 2>/dev/null" EXIT
  # the endpoint answers before its arms do
  until grep -qs "^ready" "$log"; do
    kill -0 "$server" 2>/dev/null || { tail -n 20 "$log" >&2; exit 1; }
    sleep 2
  done
  bench "$results/online-$regime" online --url "$url" --temperature 0 --max-tokens 128 \
    --concurrency 1 --concurrency 2 --concurrency 4 --concurrency 8 --concurrency 16 \
    --concurrency 32
  kill "$server"
  wait "$server" || true
  trap - EXIT
}

# What there is to carry, and whether it is read, on answers to the prompts of the benches.
diagnose() {
  local regime=$1 name=$subject-$1 seed variant answers=$results/responses
  local done=$results/diagnosed-$1
  [ ! -e "$done" ] || return 0
  # files of prompts hold set after set
  step "$platform" data regenerate --target "$target" --out "$answers" \
    --set "prompts=[{path: $prompts, limit: $num_eval, shuffle_seed: 0}]" \
    --set temperatures=[0.0] --set max_new_tokens=128
  step "$platform" checkpoint headroom "runs/train/$name/best" -d "$answers" --name "$name-headroom"
  for seed in "${seeds[@]}"; do
    step "$platform" checkpoint replay "runs/train/$name-carryover-$seed/last" -d "$answers" \
      --baseline "runs/train/$name/best" --name "$name-carryover-$seed-replay"
  done
  for variant in ${ablation[@]+"${ablation[@]}"}; do
    [ "$regime" = "$ablated" ] || continue
    step "$platform" checkpoint replay "runs/train/$(variant_name "$variant")/last" -d "$answers" \
      --baseline "runs/train/$name/best" --name "$(variant_name "$variant")-replay"
  done
  touch "$done"
}

if [ "$2" = train ]; then
  data
  drafters
else
  mkdir -p "$results"
  for regime in "${regimes[@]}"; do
    offline "$regime"
    online "$regime"
    diagnose "$regime"
  done
  echo "next:  name $results in jobs/configs/results.yaml, and: platform results"
fi
