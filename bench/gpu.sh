#!/usr/bin/env bash
# The acceptance of a first CUDA card, in about ten minutes: everything that no CPU can show. It has not run on a card yet.
#   OUT=/tmp bash bench/gpu.sh                          # JSON goes to $OUT, tables to the terminal
#   OUT=/tmp bash bench/gpu.sh --device cpu --small     # that it runs, anywhere
# 1 the gpu tests   2 log-prob and sampling kernels against copy bandwidth   3 decode of the 1.5B shape against its roofline
# 4 a step of configs/r3_1.5b.yaml: tokens per second, peak memory against the plan; generate and vLLM beside it
set -u
cd "$(dirname "$0")/.."
export OUT=${OUT:-.} PYTHONUNBUFFERED=1
python=${PYTHON:-python3}
device=cuda entropy=(--device cuda) rollout=(--device cuda) small=()
case "$*" in
"") ;;
"--device cpu --small")
  device=cpu entropy=(--small --repeat 1) rollout=(--prompts 2 --slots 8 --max-new-tokens 8 --repeats 1) small=(--small) ;;
*) echo "found: $*, allowed: nothing, or --device cpu --small" >&2; exit 2 ;;
esac
failed=()
part() {  # part NAME SECONDS command...
  echo "== $1"
  timeout "$2" "${@:3}" || failed+=("$1 (exit code $?)")
}
versions='import torch, transformers as t; print(torch.__version__, t.__version__, torch.cuda.is_available() and torch.cuda.get_device_name())'
$python -c "$versions"
part tests 150 $python -m pytest -q -m gpu -p no:cacheprovider
part kernels 120 $python bench/entropy.py "${entropy[@]}" --json "$OUT/entropy.json"
part decode 120 $python bench/rollout.py "${rollout[@]}" --json "$OUT/rollout.json"
part step 240 $python bench/step.py --config configs/r3_1.5b.yaml --device $device "${small[@]}" --json "$OUT/step.json"
[ ${#failed[@]} -eq 0 ] && echo "all parts ended well" && exit 0
printf 'failed: %s\n' "${failed[@]}" >&2
exit 1
