"""Make the pictures of these pages again: `python docs/pictures.py NAME...`.

Each is what the commands beside its name leave behind; they run in a folder of their own. Those of the longest runs are
drawn from stored rows (docs/stored.py, docs/fedfa_attack.py, docs/papers.py). The others take up to ten minutes of two
CPU cores, and those that train on Fashion-MNIST read $FL_DATA_ROOT.
"""

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).resolve().parent


class Picture(NamedTuple):
    """The commands that make a picture, separated by &&, and where it then lies."""

    commands: str
    file: str
    time: str = "a minute"


PAIR = "python -m fl.run --algorithm fedavg,fedmr --seeds 0,1 --eval-client-models-every 1 --name pair"
STORED = f"python {DOCS}/stored.py"
RIVALS = f"{STORED} runs/rivals fashion-mnist-rivals"
CLUSTERS = f"{STORED} runs/clusters femam/clusters femam-fashion-mnist"
ATTACK = f"python {DOCS}/fedfa_attack.py"
PAPERS = f"python {DOCS}/papers.py"
PICTURES = {
    "hero": Picture(f"python {DOCS}/hero.py hero.png", "hero.png"),
    "recombination": Picture(f"python {DOCS}/recombination.py recombination.png", "recombination.png"),
    "curves": Picture("python -m fl.run --eval-client-models-every 1 --name run", "runs/run/curves.png"),
    "comparison": Picture(PAIR, "runs/pair/comparison.png"),
    "alignment": Picture(f"python {DOCS.parent}/benchmarks/alignment.py --figure alignment.png", "alignment.png"),
    "landscape-digits": Picture(f"{PAIR} && python -m fl.landscape runs/pair", "landscape.png"),
    "inspect-resnet50": Picture(
        "python -m surgery inspect timm:resnet50 --width 0.5 --depth 2,2,4,2 --plot resnet50.png", "resnet50.png"
    ),
    "partition": Picture(
        "python -m fl.data --clients 40 --partition clusters --clusters 2,5 --cluster-classes 2,1 --plot partition.png",
        "partition.png",
    ),
    "landscape": Picture(
        "python -m benchmarks.papers fashion-mnist-rivals --algorithm fedavg,fedmr --seeds 0 --name pair && "
        "python -m fl.landscape runs/pair/fedavg-seed0 runs/pair/fedmr-seed0",
        "landscape.png",
        "ten minutes",
    ),
    "fashion-mnist-rivals": Picture(
        f"{RIVALS}/dirichlet0.5 fashion-mnist-rivals && python -m fl.compare runs/rivals", "comparison.png"
    ),
    "fashion-mnist-rivals-0.1": Picture(
        f"{RIVALS}/dirichlet0.1 fashion-mnist-rivals --alpha 0.1 && python -m fl.compare runs/rivals", "comparison.png"
    ),
    "fedmr-align": Picture(
        f"{RIVALS}/dirichlet0.1 fashion-mnist-rivals --alpha 0.1 && "
        f"{STORED} runs/aligned fashion-mnist-rivals/align fashion-mnist-rivals --alpha 0.1 --fedmr.align && "
        "python -m fl.compare runs/rivals/fedavg-seed0 runs/rivals/fedmr-seed0 runs/aligned/fedmr-seed0",
        "comparison.png",
    ),
    "femam-structure": Picture(
        f"{CLUSTERS} && {STORED} runs/levels femam/levels femam-fashion-mnist --clusters 2,3 --cluster-classes 2,2 && "
        "python -m fl.structure runs/clusters/femam-seed0 runs/levels/femam-seed0",
        "structure.png",
    ),
    "femam-clusters": Picture(f"{CLUSTERS} && python -m fl.compare runs/clusters", "comparison.png"),
    "femam-traffic": Picture(f"{CLUSTERS} && python -m fl.compare runs/clusters --against traffic", "comparison.png"),
    "fedfa-coverage": Picture(
        "python -m benchmarks.papers fedfa-fashion-mnist --algorithm fedfa --seeds 0 --rounds 1 --depth 2 "
        "--architectures.depths 1,2 --name fa",
        "runs/fa/coverage.png",
    ),
    "fedfa-attack": Picture(f"{ATTACK} share share.png", "share.png"),
    "fedfa-lambda": Picture(f"{ATTACK} lambda lambda.png", "lambda.png"),
    **{f"papers-{name}": Picture(f"{PAPERS} {name} paper.png", "paper.png") for name in ("fedmr", "femam", "fedfa")},
}


def make(name: str) -> Path:
    """Run a picture's commands, and put what they leave into docs/images."""
    picture, made = PICTURES[name], DOCS / "images" / f"{name}.png"
    paths = os.pathsep.join(filter(None, [str(DOCS.parent), os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory() as folder:
        for command in picture.commands.split(" && "):
            words = [sys.executable, *shlex.split(command)[1:]]
            subprocess.run(words, cwd=folder, env={**os.environ, "PYTHONPATH": paths}, check=True)
        shutil.copy(Path(folder, picture.file), made)
    return made


def main() -> None:
    """Make the pictures named on the command line; without names list them."""
    if unknown := set(sys.argv[1:]) - PICTURES.keys():
        sys.exit(f"unknown picture {', '.join(sorted(unknown))}: there are {', '.join(PICTURES)}")
    for name in sys.argv[1:]:
        print(f"made {make(name)}")
    if not sys.argv[1:]:
        for name, picture in PICTURES.items():
            print(f"{name:26}{picture.time:14}{picture.commands}")


if __name__ == "__main__":
    main()
