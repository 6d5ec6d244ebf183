#!/usr/bin/env bash
# Everything that needs a CUDA card, in one go: the gpu tests, then the two benchmarks. Prints short tables; JSON goes to $OUT.
#   OUT=/tmp bash bench/gpu.sh
set -u
cd "$(dirname "$0")/.."
export OUT=${OUT:-.} PYTHONUNBUFFERED=1
python3 -c 'import torch, transformers, triton; print(torch.cuda.get_device_name(), torch.__version__, transformers.__version__, triton.__version__)'
python3 -m pytest -q -m gpu -p no:cacheprovider
timeout 240 python3 bench/entropy.py --device cuda --json "$OUT/entropy.json"
timeout 240 python3 bench/rollout.py --device cuda --json "$OUT/rollout.json"
