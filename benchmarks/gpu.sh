#!/usr/bin/env bash
# What waits for a GPU, in parts of less than nine minutes each, the most telling first.
#
#     benchmarks/gpu.sh [--device cpu] [--quick] PART...
#
#     tests     the tests that need a GPU
#     engine    every backend by model, cohort and batch: engine-cuda.json, by which --backend auto decides once it is
#               copied to fl/engine/
#     rounds    FedMR on CIFAR-10 with ResNet-20: every backend and precision beside a plain loop
#     step      where the time of a client's step goes
#     peers     a plain loop; pfl-research and Flower, where $PFL_PYTHON and $FLOWER_PYTHON name interpreters
#     paper     cells of the papers' tables, as far as they get; with the same $OUT it goes on with them
#     all       these, in this order
#     wheels    on a machine with a network: fetch what a bare one lacks into .gpu/wheels, to be carried there
#
# The machine needs python3 with torch, torchvision, timm, scikit-learn, matplotlib, tqdm, safetensors, PyYAML, pytest and
# hypothesis. What else the project imports (tyro, typeguard, docstring-parser) is taken from .gpu/wheels if it is not
# installed; torch-pruning and PyNaCl are not needed. Data sets lie in $FL_DATA_ROOT; times are taken on random pixels
# without them, the papers' cells need them. JSON, logs and stored runs go to $OUT, else to benchmarks/results, as soon as
# they are known. A part that fails does not stop the next; the script then ends with an error.
# `--device cpu --quick` goes through all of it in a few minutes without a GPU.
set -euo pipefail
out=${OUT:+$(realpath -m "$OUT")}
cd "$(dirname "$0")/.."
out=${out:-benchmarks/results} device=cuda quick=() parts=() failed=()
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-32} # queues of the device; 8 are fewer than streams
modules=(tyro typeguard docstring_parser)

while (($#)); do
    case $1 in
        --device) device=${2:?--device takes cuda or cpu} && shift ;;
        --quick) quick=(--quick) ;;
        wheels | tests | engine | rounds | step | peers | paper) parts+=("$1") ;;
        all) parts+=(tests engine rounds step peers paper) ;;
        *) echo "unknown part $1: there are tests, engine, rounds, step, peers, paper, all and wheels" >&2 && exit 2 ;;
    esac
    shift
done
[[ $device == cpu || $device == cuda ]] || { echo "--device $device: there are cuda and cpu" >&2 && exit 2; }
((${#parts[@]})) || { sed -n '2,/^set /{/^#/!d; s/^# \?//; p}' "$0" && exit 2; }

wheels() {
    python3 -m pip download --quiet --no-deps --dest .gpu/wheels tyro typeguard docstring-parser
    ls -1 .gpu/wheels
}

complete() { # put what is missing into .gpu/site, and both on the path
    export PYTHONPATH="$PWD:$PWD/.gpu/site${PYTHONPATH:+:$PYTHONPATH}"
    for module in "${modules[@]}"; do
        python3 -c "import $module" 2>/dev/null && continue
        python3 -m pip install --quiet --no-index --no-deps --find-links .gpu/wheels --target .gpu/site "${module//_/-}" ||
            { echo "$module is missing: run benchmarks/gpu.sh wheels where there is a network, and bring .gpu" >&2 && exit 2; }
    done
}

run() { # NAME COMMAND...: at most nine minutes, then Ctrl-C
    local name=$1
    shift
    echo "== $*"
    timeout --signal INT --kill-after 30 540 "$@" 2>&1 | tee "$out/gpu-$name.log" || failed+=("$name")
}

selected_tests() {
    local workers=(-o addopts="--import-mode=importlib --strict-markers") # the project's own want pytest-xdist
    python3 -c "import xdist" 2>/dev/null && [[ $device == cuda ]] && workers+=(-n 6)
    local chosen=(-m gpu)
    [[ $device == cpu ]] && chosen=() # the same tests, on a GPU that is pretended
    run tests python3 -m pytest -q -ra --durations=15 -p no:cacheprovider "${workers[@]}" "${chosen[@]}" tests/fl/test_gpu.py tests/zoo/test_gpu.py
}

for part in "${parts[@]}"; do
    [[ $part == wheels ]] && { wheels && continue; }
    mkdir -p "$out"
    complete
    common=(--device "$device" --out "$out" "${quick[@]}")
    case $part in
        tests) selected_tests ;;
        engine) run engine python3 benchmarks/engine.py "${common[@]}" ;;
        rounds) run rounds python3 benchmarks/rounds.py "${common[@]}" ;;
        step) run step python3 benchmarks/step_profile.py "${common[@]}" ;;
        peers)
            peers=()
            [[ -n ${PFL_PYTHON:-} ]] && peers+=(--pfl "$PFL_PYTHON")
            [[ -n ${FLOWER_PYTHON:-} ]] && peers+=(--flower "$FLOWER_PYTHON")
            run peers python3 benchmarks/peers.py "${common[@]}" "${peers[@]}"
            ;;
        paper)
            runs=${OUT:+$out/}runs/papers # what is resumed
            cells=(fedmr.table1.cifar10.resnet20-momentum0.5.dir0.5 fedmr.table1.cifar10.resnet20.dir0.5
                femam.table1.cifar100.levels3-6-11 fedfa.table1.cifar10.preresnet.noniid.both --seeds 0)
            ((${#quick[@]})) && runs+=-quick cells=(fedfa.lambda.digits.0 --algorithm fedavg --rounds 1 --store "$runs")
            run paper python3 -m benchmarks.papers "${cells[@]}" --device "$device" --minutes 8 --out "$runs"
            [[ $out == benchmarks/results ]] || cp -r benchmarks/results/papers "$out"
            ;;
    esac
done
((${#failed[@]} == 0)) || { echo "failed: ${failed[*]}" && exit 1; }
