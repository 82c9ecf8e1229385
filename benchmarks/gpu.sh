#!/usr/bin/env bash
# All that waits for a GPU: the tests, the engine's table, where a step's time goes, the other simulators.
#
#     benchmarks/gpu.sh [PFL_PYTHON [FLOWER_PYTHON]]
#
# The interpreters are those of benchmarks/peers.py ("" leaves one out). JSON and logs go to $OUT, else to
# benchmarks/results. A part that fails does not stop the next; the script then ends with an error.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${OUT:-benchmarks/results}
mkdir -p "$out"
peers=()
[[ -n ${1:-} ]] && peers+=(--pfl "$1")
[[ -n ${2:-} ]] && peers+=(--flower "$2")
failed=()

part() { # NAME COMMAND...
    local name=$1
    shift
    echo "== $*"
    "$@" 2>&1 | tee "$out/$name.log" || failed+=("$name")
}

nvidia-smi | tee "$out/gpu.log" || true
part gpu-tests python -m pytest -m gpu
part gpu-engine python benchmarks/engine.py --device cuda --out "$out"
part gpu-step python benchmarks/step_profile.py --device cuda --out "$out"
part gpu-peers python benchmarks/peers.py --device cuda --out "$out" "${peers[@]}"
((${#failed[@]} == 0)) || { echo "failed: ${failed[*]}" && exit 1; }
