#!/usr/bin/env bash
# Everything that is measured on a GPU, each with a limit of its own: what is timed alone, what shares the GPU at the same
# time, and what needs that.
#
#   bash benchmarks/gpu.sh OUT [NAME ...]        all of it, or what is named; PYTHON=... for another interpreter
#   bash benchmarks/gpu.sh --list                names, when they run, limits in seconds, commands
#
# OUT/NAME.txt has what a measurement printed, ended by a line with its exit code and seconds. One that ended well is not
# repeated: run it again for the rest. Needs models/smollm2 and models/minilm (make smollm2 minilm), and TRL for those of
# GRPO and the studies. HH=FILE is a file of HH-RLHF's dialogues, for the runs of its recipe and the rehearsal.
set -u
hh=${HH:+$(realpath -m "$HH")} here=$PWD
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
export PYTHONPATH=src:.${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 HF_HUB_DISABLE_TELEMETRY=1

# Name, when, limit in seconds, command. When: alone, one after the other; then together, all at once; then after them.
# OUT stands for the folder, HH for the file, LAUNCH for accelerate's module. Studies keep what is finished and go on
# from there. The rehearsal's parts work on run folders of their own; the rest of it puts them together.
measurements() {
  cat <<'LIST'
generation       alone    240  -m benchmarks.generation --compiled --shapes 64x128 --json OUT/generation.json
generation-more  alone    240  -m benchmarks.generation --rounds 2 --shapes 256x256 64x128-ragged --json OUT/generation-more.json
autocast         alone    180  -m benchmarks.generation --autocast --rounds 2 --shapes 64x128 --json OUT/autocast.json
ppo-step         alone    240  -m benchmarks.ppo_step --steps 6 --json OUT/ppo-step.json
grpo-step        alone    420  -m benchmarks.grpo_step --rounds 2 --steps 12 --json OUT/grpo-step.json
losses           alone    120  -m benchmarks.losses
kernels          alone    180  -m benchmarks.kernels --only micro stages
tests            together 420  -m pytest -q tests/ppo/test_graph_generation.py tests/ppo/test_policy_copy.py tests/transport/kernels tests/test_cuda.py
agreement        together 300  -m benchmarks.generation --agreement
hh               together 1200 -m wpr sweep benchmarks/hh_generation.yaml generation model.name=models/smollm2 data.source=HH output=OUT/hh
hh-fsdp2         together 600  -m LAUNCH launch --config_file configs/accelerate/fsdp2.yaml --num_processes 1 -m wpr run hh-smollm2-135m --policy rkl model.name=models/smollm2 data.source=HH output=OUT/hh-fsdp2 finished_checkpoints=none ppo.max_steps=8 sft.num_train_epochs=1 reward.num_train_epochs=1
rehearsal-hh     together 1200 -m wpr reproduce fig:motivation fig:temp tab:mt_bench fig:sens_beta fig:casestudy fig:sinkhorn_converge tab:example_hh --model models/smollm2 --scale 0.01 --data HH --runs OUT/rehearsal
rehearsal-tldr   together 1200 -m wpr reproduce tab:abl fig:penalty tab:analysis_k_2 tab:analysis_lambda tab:wallclock tab:gpu tab:example_tldr --model models/smollm2 --scale 0.01 --data HH --runs OUT/rehearsal
rehearsal-qwen   together 600  -m wpr reproduce tab:qwen --model models/smollm2 --scale 0.01 --data HH --runs OUT/rehearsal
rehearsal-apps   together 600  -m wpr reproduce tab:apps --model models/smollm2 --scale 0.01 --data HH --runs OUT/rehearsal
rehearsal-open   together 1200 -m wpr reproduce open:target-rewrite open:target-hh --model models/smollm2 --scale 0.01 --data HH --runs OUT/rehearsal
rehearsal        after    1500 -m wpr reproduce all --model models/smollm2 --scale 0.01 --data HH --runs OUT/rehearsal
smollm2          after    1500 -m benchmarks.rewriting run OUT/smollm2 --recipe benchmarks/rewriting_smollm2.yaml --seeds 3 --workers 12 --set data.source=HH
smollm2-words    after    300  -m benchmarks.rewriting words OUT/smollm2
smollm2-table    after    60   -m benchmarks.rewriting table OUT/smollm2
grpo-forms       after    1500 -m benchmarks.seeds run OUT/grpo-forms --recipe benchmarks/grpo_forms.yaml --seeds 5
grpo-forms-table after    60   -m benchmarks.seeds table OUT/grpo-forms --compare exact-reward:k3-loss exact-reward:k1-reward exact-loss:k3-loss semantic:exact-loss
rewriting        after    1500 -m benchmarks.rewriting run OUT/rewriting --seeds 5
rewriting-words  after    600  -m benchmarks.rewriting words OUT/rewriting
rewriting-table  after    60   -m benchmarks.rewriting table OUT/rewriting
LIST
}

# One measurement, if it was not made before.
measure() {
  local name=$1 limit=$2 command=$3 file=$out/$1.txt start words index
  if tail -n 1 "$file" 2>/dev/null | grep -q '^exit 0 '; then echo "$name: done before"; return; fi
  read -ra words <<<"$command"
  if [[ $command == *HH* && ! -f $hh ]]; then
    echo "$name: left out, HH=$hh is no file; set HH to a .jsonl.gz file of HH-RLHF"
    return
  fi
  for index in "${!words[@]}"; do
    case ${words[index]} in
      LAUNCH) words[index]=accelerate.commands.accelerate_cli ;;
      HH) words[index]=$hh ;;
      *=HH) words[index]=${words[index]%HH}$hh ;;
      OUT/*) words[index]=$out${words[index]#OUT} ;;
      *=OUT/*) words[index]=${words[index]%%OUT/*}$out/${words[index]#*OUT/} ;;
    esac
  done
  start=$SECONDS
  timeout "$limit" "$PYTHON" "${words[@]}" >"$file" 2>&1 </dev/null
  echo "exit $? after $((SECONDS - start)) s" >>"$file"
  echo "$name: $(tail -n 1 "$file")"
}

if [ "${1:-}" = --list ]; then measurements; exit; fi
out=${1:?a folder for what is measured: bash benchmarks/gpu.sh OUT [NAME ...]}
shift
for name in "$@"; do
  measurements | grep -q "^$name " || { echo "no measurement $name; there are: $(measurements | awk '{print $1}' | xargs)"; exit 2; }
done
out=$(cd "$here" && realpath -m "$out")
mkdir -p "$out"
while read -r name when limit command; do
  if [ $# -gt 0 ] && [[ " $* " != *" $name "* ]]; then continue; fi
  if [ "$when" = together ]; then
    measure "$name" "$limit" "$command" &
  else
    wait
    measure "$name" "$limit" "$command"
  fi
done < <(measurements)
wait
