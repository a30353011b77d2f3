#!/usr/bin/env bash
# Everything that is measured on a GPU, each with a limit of its own: tests and models that may share the GPU; then what is
# timed, one after the other; then what may share it again, some at a time; then what needs results of these.
#
#   bash benchmarks/gpu.sh OUT [NAME ...]        all of it, or what is named; PYTHON=... for another interpreter
#   bash benchmarks/gpu.sh --list                names, when they run, limits in seconds, commands
#
# OUT/NAME.txt has what a measurement printed, ended by a line with its exit code and seconds. One that ended well is not
# repeated: run it again for the rest. The exit code is 1 if one of them did not. Needs models/smollm2 and models/minilm
# (make smollm2 minilm), and TRL for those of GRPO and the studies. HH=FILE is a file of HH-RLHF's dialogues, for the runs
# of its recipe and the rehearsal. AT_ONCE=5 says how many share the GPU; under CUDA's MPS (nvidia-cuda-mps-control -d)
# their kernels run side by side, without it they take turns.
set -u
hh=${HH:+$(realpath -m "$HH")} here=$PWD
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
[[ $PYTHON == */* ]] && PYTHON=$(cd "$here" && realpath -s "$PYTHON")
export PYTHONPATH=src:.${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 HF_HUB_DISABLE_TELEMETRY=1

# Name, when, limit in seconds, command, in order. When: shared with what stands beside it; alone; after, alone too.
# OUT stands for the folder, HH for the file, LAUNCH for accelerate's module, REHEARSE for the options of a rehearsal.
# Studies keep what is finished and go on from there; their tables are of what is finished. Parts of the rehearsal that
# run together have run folders of their own; `rehearsal-main` goes on with those of `-tldr` and `-hh`.
rehearse="--model models/smollm2 --scale 0.01 --data HH finished_checkpoints=none sft.batch_size=64 reward.batch_size=64
ppo.batch_size=64 ppo.per_device_train_batch_size=64"
measurements() {
  cat <<'LIST'
tests            shared   420  -m pytest -q tests/ppo/test_graph_generation.py tests/ppo/test_policy_copy.py tests/transport/kernels tests/test_cuda.py
agreement        shared   300  -m benchmarks.generation --agreement
hh-models        shared   600  -m wpr run benchmarks/hh_generation.yaml model.name=models/smollm2 data.source=HH output=OUT/hh
generation       alone    240  -m benchmarks.generation --compiled --shapes 64x128 --json OUT/generation.json
generation-more  alone    240  -m benchmarks.generation --rounds 2 --shapes 256x256 64x128-ragged --json OUT/generation-more.json
autocast         alone    180  -m benchmarks.generation --autocast --rounds 2 --shapes 64x128 --json OUT/autocast.json
ppo-step         alone    240  -m benchmarks.ppo_step --steps 6 --json OUT/ppo-step.json
grpo-step        alone    420  -m benchmarks.grpo_step --rounds 2 --steps 12 --json OUT/grpo-step.json
losses           alone    120  -m benchmarks.losses
kernels          alone    180  -m benchmarks.kernels --only micro stages
hh               alone    900  -m wpr sweep benchmarks/hh_generation.yaml generation model.name=models/smollm2 data.source=HH output=OUT/hh
hh-fsdp2         shared   600  -m LAUNCH launch --config_file configs/accelerate/fsdp2.yaml --num_processes 1 -m wpr run hh-smollm2-135m --policy rkl model.name=models/smollm2 data.source=HH output=OUT/hh-fsdp2 finished_checkpoints=none ppo.max_steps=4 sft.max_steps=4 reward.max_steps=4
rehearsal-beta   shared   1500 -m wpr reproduce tab:beta REHEARSE --runs OUT/rehearsal-beta
rehearsal-tldr   shared   1500 -m wpr reproduce tab:abl fig:penalty tab:analysis_k_2 tab:analysis_lambda tab:wallclock tab:example_tldr REHEARSE --runs OUT/rehearsal
rehearsal-hh     shared   1500 -m wpr reproduce fig:motivation fig:temp tab:mt_bench fig:sens_beta fig:casestudy fig:sinkhorn_converge tab:example_hh REHEARSE --runs OUT/rehearsal
rehearsal-7b     shared   1500 -m wpr reproduce tab:7b tab:embedding REHEARSE --runs OUT/rehearsal-7b
rehearsal-qwen   shared   1500 -m wpr reproduce tab:qwen REHEARSE --runs OUT/rehearsal
rehearsal-apps   shared   1500 -m wpr reproduce tab:apps REHEARSE --runs OUT/rehearsal ppo.batch_size=16 ppo.per_device_train_batch_size=16 scorer.unsafe=true
rehearsal-gpu    shared   900  -m wpr reproduce tab:gpu REHEARSE --runs OUT/rehearsal-gpu ppo.batch_size=8 ppo.per_device_train_batch_size=8
rehearsal-main   after    1500 -m wpr reproduce tab:main tab:corr_bert tab:semantic tab:ppo-hparams REHEARSE --runs OUT/rehearsal
smollm2          after    1500 -m benchmarks.rewriting run OUT/smollm2 --recipe benchmarks/rewriting_smollm2.yaml --seeds 5 --workers 12 --set data.source=HH --policies rkl semantic shuffled hellinger
smollm2-words    after    300  -m benchmarks.rewriting words OUT/smollm2
smollm2-table    after    60   -m benchmarks.rewriting table OUT/smollm2
grpo-forms       after    1500 -m benchmarks.seeds run OUT/grpo-forms --recipe benchmarks/grpo_forms.yaml --seeds 5
grpo-forms-table after    60   -m benchmarks.seeds table OUT/grpo-forms --compare exact-reward:k3-loss exact-reward:k1-reward exact-loss:k3-loss semantic:exact-loss
rewriting        after    1500 -m benchmarks.rewriting run OUT/rewriting --seeds 5
rewriting-words  after    600  -m benchmarks.rewriting words OUT/rewriting
rewriting-table  after    60   -m benchmarks.rewriting table OUT/rewriting
LIST
}

# One measurement, if it was not made before; those of words and tables are always made, of what there is by then.
measure() {
  local name=$1 limit=$2 command=$3 file=$out/$1.txt start words index process
  if [[ $name != *-words && $name != *-table ]] && tail -n 1 "$file" 2>/dev/null | grep -q '^exit 0 '; then
    echo "$name: done before"
    return
  fi
  read -d '' -ra words <<<"${command/REHEARSE/$rehearse}"
  if [[ ${words[*]} == *HH* && ! -f $hh ]]; then
    echo "$name: left out, ${hh:+HH=$hh is no file; }set HH to a .jsonl.gz file of HH-RLHF's dialogues"
    return 1
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
  timeout -k 30 "$limit" "$PYTHON" "${words[@]}" >"$file" 2>&1 </dev/null &
  process=$!
  trap 'kill $process 2>/dev/null' TERM
  wait $process
  echo "exit $? after $((SECONDS - start)) s" >>"$file"
  echo "$name: $(tail -n 1 "$file")"
  grep -q '^exit 0 ' <(tail -n 1 "$file")
}

if [ "${1:-}" = --list ]; then measurements; exit; fi
known() { measurements | awk -v name="$1" '$1 == name {found = 1} END {exit !found}'; }
out=${1:?a folder for what is measured: bash benchmarks/gpu.sh OUT [NAME ...]}
if [[ $out == -* ]] || known "$out"; then echo "$out is no folder for results, which comes first: bash benchmarks/gpu.sh OUT [NAME ...]"; exit 2; fi
shift
for name in "$@"; do
  known "$name" || { echo "no measurement $name; there are: $(measurements | awk '{print $1}' | xargs)"; exit 2; }
done
out=$(cd "$here" && realpath -m "$out")
mkdir -p "$out"
trap 'kill $(jobs -p) 2>/dev/null; wait; exit 130' INT TERM
status=0 running=0
settle() { wait -n || status=1; running=$((running - 1)); }
while read -r name when limit command; do
  if [ $# -gt 0 ] && [[ " $* " != *" $name "* ]]; then continue; fi
  while [ "$running" -gt 0 ] && { [ "$when" != shared ] || [ "$running" -ge "${AT_ONCE:-5}" ]; }; do settle; done
  # In the background even if alone, so that an interrupt is answered; threads are not more than the cores.
  if [ "$when" = shared ]; then OMP_NUM_THREADS=2 measure "$name" "$limit" "$command" & else measure "$name" "$limit" "$command" & fi
  running=$((running + 1))
  if [ "$when" != shared ]; then settle; fi
done < <(measurements)
while [ "$running" -gt 0 ]; do settle; done
exit $status
