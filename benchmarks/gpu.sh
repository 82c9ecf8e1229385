#!/usr/bin/env bash
# What waits for a GPU, in two calls, for a machine that is lent for minutes:
#
#     benchmarks/gpu.sh carry      on a machine with a network: what a bare one lacks, into .gpu, to be carried there
#     benchmarks/gpu.sh first      150 seconds: the most telling tests, and rounds a second of every backend
#     benchmarks/gpu.sh rest       six minutes: all tests; backends, precisions and peers; FedMR on CIFAR-10
#
#     --device cpu [--quick] [--scale 2]    a rehearsal without a GPU; limits in seconds are multiplied by the scale
#
# The machine needs python3 with torch, torchvision, timm, scikit-learn, matplotlib, tqdm, safetensors, PyYAML, pytest,
# pytest-xdist and hypothesis; what else is imported comes from .gpu, in wheels for Python 3.12 ($PYTHON_VERSION). Git
# ignores .gpu: copy it along by its name. The project and .gpu have less than 64 MiB.
# JSON goes to $OUT, else to benchmarks/results, as soon as it is known. A step that fails does not stop the next; the
# script then ends with an error.
set -euo pipefail
out=${OUT:+$(realpath -m "$OUT")}
cd "$(dirname "$0")/.."
out=${out:-$PWD/benchmarks/results} part=${1:-} python=${PYTHON_VERSION:-3.12} # there
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-32} # queues of the device; 8 are fewer than streams
export PYTHONPATH="$PWD:$PWD/benchmarks:$PWD/tests:$PWD/.gpu/site${PYTHONPATH:+:$PYTHONPATH}"

case $part in
    carry)
        rm -rf .gpu
        python3 -m pip download --quiet --no-deps --only-binary=:all: --python-version "$python" --dest .gpu/wheels \
            tyro typeguard docstring-parser 'pfl==0.6.0' 'multiprocess<0.71' dill 'dp-accounting<0.6' prv-accountant
        python3 benchmarks/gpu.py pack
        ;;
    first | rest)
        mkdir -p "$out"
        pfl=()
        [[ -d .gpu/site ]] || python3 -m pip install --quiet --no-index --no-deps --no-compile --target .gpu/site \
            .gpu/wheels/*.whl || echo "nothing was carried here: see benchmarks/gpu.sh carry" >&2
        python3 -c "import pfl.algorithm.base, pfl.model.pytorch" 2> /dev/null && pfl=(--pfl "$(command -v python3)")
        python3 benchmarks/gpu.py "$part" --out "$out" "${pfl[@]}" "${@:2}"
        ;;
    *) sed -n '2,/^set /{/^#/!d; s/^# \?//; p}' "$0" && exit 2 ;;
esac
