"""Whether a change of the code changed results: short runs of every method, bit for bit.

    python benchmarks/golden.py write FILE    # at the version before
    python benchmarks/golden.py check FILE    # at the version after, on the same machine with the same packages

Each case is a command line of `fl.run`. Compared are every tensor of its checkpoint (by content, so names may change),
the trained model, and all columns of metrics.csv but the time. A case that a version refuses is recorded as refused.
"""

import contextlib
import csv
import hashlib
import io
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

METHODS = [
    *("fedavg", "fedprox", "fedgen", "clusamp", "fedexp", "fedasam", "fedmut", "fedmr", "indep"),
    *("local", "fedavg_plus", "pfedme", "fedrep", "ditto", "fesem", "fesem_plus", "femam"),
    *("fedfa", "heterofl", "fedrolex", "nefl", "flexifed"),
]
SHORT = "--rounds 3 --clients 6 --participants 3 --local-epochs 1 --samples 300 --min-samples 5 --device cpu"
RESNET = f"{SHORT} --model resnet20 --width 0.25 --rounds 2 --samples 120"
PARTS = f"{RESNET} --architectures.widths 0.5,1 --norm static_batch"
TEXT = (
    "--algorithm fedmr --dataset shakespeare --model transformer --partition natural --rounds 2 --clients 6 "
    "--participants 2 --local-epochs 1 --text.length 64 --min-samples 5 --width 0.25 --device cpu"
)

CASES = [
    *(f"--algorithm {name} --backend {backend} {SHORT}" for name in METHODS for backend in ("loop", "vmap", "workers")),
    *(f"--algorithm {name} --backend loop {RESNET}" for name in METHODS),
    *(f"--algorithm {name} --backend loop {PARTS}" for name in ("fedfa", "heterofl", "nefl")),
    f"--algorithm fedmr --fedmr.secure 2 {SHORT}",
    f"--algorithm fedmr --fedmr.stage1-rounds 1 --fedmr.segment-fraction 0.5 --fedmr.unit tensor {SHORT}",
    f"--algorithm fedavg --attack.share 0.4 --attack.amplify 3 --defence.rule median {SHORT}",
    f"--algorithm fedavg --attack.share 0.4 --defence.rule trimmed --defence.trim 0.3 {SHORT}",
    f"--algorithm fedavg --optimizer adam --lr 0.001 --crop 1 --flip --lr-schedule cosine {SHORT}",
    TEXT,
    f"--algorithm femam --partition clusters --clusters 2,3 --local-test 0.2 {SHORT}",
    f"--algorithm ditto --partition iid --presence.joining 0.2 --presence.leaving 0.2 --local-valid 0.1 {SHORT}",
    f"--algorithm fedavg --last-batch partial --batch-size 16 --clip 1 --masked-loss {SHORT}",
    f"--algorithm fedavg --keep-best --precision bf16 {SHORT}",
]
MORE = [  # features that wrap methods, alone and together
    *(
        f"--algorithm {name} --backend loop {SHORT}"
        for name in (
            *("fedavgm", "fedadam", "fedadagrad", "fedyogi", "scaffold", "feddyn", "fednova", "moon", "fedbn"),
            *("apfl", "perfedavg", "fedproto", "fltrust"),
        )
    ),
    *(
        f"--algorithm {name} {flags} --local-valid 0.1 {SHORT}"
        for name in ("fedavg", "fedmr", "ditto", "fednova", "apfl", "femam", "fedadam")
        for flags in (
            "--attack.share 0.4 --attack.amplify 20",
            "--attack.share 0.4 --attack.amplify 20 --defence.rule median --defence.clip 1",
            "--pace.spread 1 --pace.speed 200 --pace.deadline 0.15",
            "--pace.spread 1 --pace.speed 200 --pace.deadline 0.15 --pace.late drop",
            "--pace.spread 1 --pace.speed 200 --pace.deadline 0.15 --attack.share 0.4 --defence.clip 1",
            "--compression.kind topk --compression.share 0.1",
            "--compression.kind topk --compression.share 0.1 --compression.feedback",
            "--compression.kind quantise --compression.bits 4",
            "--compression.kind quantise --compression.bits 4 --compression.feedback --attack.share 0.4",
            "--privacy.clip 0.5 --privacy.noise 0",
            "--presence.joining 0.2 --presence.leaving 0.2",
            "--lr 1000",
        )
    ),
    *(
        f"--algorithm {name} --local-valid 0.1 {flags} {PARTS}"
        for name in ("fedfa", "heterofl", "flexifed")
        for flags in (
            "--attack.share 0.4 --attack.amplify 20 --attack.architecture largest",
            "--attack.share 0.4 --defence.rule trimmed --masked-loss",
            "--pace.spread 1 --pace.speed 200 --pace.deadline 0.15",
            "--compression.kind quantise --compression.bits 4",
        )
    ),
    f"--algorithm fedavg --privacy.clip 0.5 --privacy.noise 0.5 --privacy.epsilon 100 --privacy.delta 0.01 {SHORT}",
    f"--algorithm fedavg --privacy.clip 0.5 --privacy.noise 1 --privacy.quantile 0.5 --privacy.delta 0.01 {SHORT}",
    f"--algorithm fedavg --privacy.clip 0.5 --privacy.noise 0 --compression.kind topk --compression.feedback {SHORT}",
    f"--algorithm fedavg --privacy.clip 0.5 --privacy.noise 0 --attack.share 0.4 --pace.deadline 0.2 {SHORT}",
    f"--algorithm fedmr --fedmr.secure 2 --attack.share 0.4 --defence.rule median --defence.clip 1 {SHORT}",
    f"--algorithm fedmr --fedmr.align 1 --attack.share 0.4 --compression.kind topk {SHORT}",
    f"--algorithm fedavg --defence.rule multikrum {SHORT} --clients 8 --participants 6 --local-test 0.2",
]
RANKS = [f"--algorithm {name} --backend loop {SHORT}" for name in ("fedavg", "fedmr", "femam", "clusamp", "pfedme")]


def outcome(folder: Path) -> dict[str, str]:
    """Hashes of what a run left."""
    from safetensors.torch import load_file

    import fl

    def digest(tensor) -> str:
        data = tensor.contiguous().flatten().view(-1).numpy().tobytes() if tensor.numel() else b""
        return hashlib.sha256(f"{tensor.dtype}{tuple(tensor.shape)}".encode() + data).hexdigest()[:16]

    kept = load_file(folder / "checkpoint.safetensors")  # the best model's lie there, too, and are another round's
    tensors = sorted(digest(tensor) for name, tensor in kept.items() if not name.startswith("best/"))
    with open(folder / "metrics.csv", newline="") as file:
        rows = [{**row, "bytes_ranks": ""} for row in csv.DictReader(file)]  # a column that older versions left empty
    rows = [sorted((k, v) for k, v in row.items() if "second" not in k) for row in rows]
    found = {
        "checkpoint": hashlib.sha256("".join(tensors).encode()).hexdigest()[:16],
        "tensors": str(len(tensors)),
        "metrics": hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16],
    }
    with contextlib.suppress(fl.FLError):  # some methods have no one model
        model = fl.load_model(folder)
        found["model"] = hashlib.sha256("".join(map(digest, model.state_dict().values())).encode()).hexdigest()[:16]
    return found


def run(case: str, ranks: int = 1) -> dict[str, str]:
    """Return the outcome of a command line, or why it was refused."""
    from fl.run import main

    with tempfile.TemporaryDirectory() as folder:
        words = [*shlex.split(case), "--eval-client-models-every", "1", "--out", folder, "--name", "run"]
        if ranks > 1:
            command = ["torchrun", "--standalone", f"--nproc-per-node={ranks}", "-m", "fl.run", *words]
            ended = subprocess.run(command, capture_output=True, text=True)
            code, said = ended.returncode, ended.stderr
        else:
            out, err = io.StringIO(), io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                try:
                    code = main(words)
                except SystemExit as stop:
                    code = stop.code
            said = err.getvalue()
        if code:
            return {"refused": " ".join(said.split())[-200:]}
        return outcome(Path(folder) / "run")


def main() -> int:
    """Write or check."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch

    torch.set_num_threads(1)
    how, path = sys.argv[1], Path(sys.argv[2])
    cases = [*((case, 1) for case in CASES + MORE), *((case, 2) for case in RANKS)]
    stored = json.loads(path.read_text()) if path.exists() else {}
    wrong = 0
    for case, ranks in cases:
        key = f"{ranks}: {case}"
        same = key if how == "write" else f"1: {case}"  # several ranks give what one process gives
        if how == "write" and key in stored:
            continue
        found = run(case, ranks)
        if how == "write":
            stored[key] = found
            path.write_text(json.dumps(stored, indent=1))
            print(key, found.get("refused", "stored"), flush=True)
        elif {k: v for k, v in found.items() if k != "refused"} != {
            k: v for k, v in stored.get(same, {}).items() if k != "refused"
        }:
            wrong += 1
            print("DIFFERS", key, stored.get(same), found, flush=True)
    print(f"{len(cases)} cases, {wrong} differ" if how == "check" else f"{len(cases)} cases stored")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
