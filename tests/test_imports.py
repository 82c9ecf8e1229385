"""What importing the packages loads. `python -m benchmarks.imports` measures how long it takes."""

import json
import subprocess
import sys

SELDOM = {
    "scipy", "sklearn", "joblib", "pandas", "pyarrow", "narwhals", "matplotlib", "PIL", "triton", "rich",
    "torchvision", "timm", "torch_pruning", "transformers", "peft", "datasets", "flwr", "grpc", "nacl", "wandb",
    "tensorboard",
}  # fmt: skip
"""Packages that take long to import and that few calls need: these import them where they use them."""
OF_OTHERS = {"safetensors", "tyro", "docstring_parser", "tqdm", "yaml", "einops", "zoo", "fl"}
"""Modules that other packages need, and surgery does not."""
ABSENT = {
    "surgery": SELDOM | OF_OTHERS,
    "zoo": SELDOM | {"safetensors", "tyro", "tqdm", "fl"},
    "fl": SELDOM,
    "fl.run": SELDOM,
}
"""Modules that are imported one after the other in one process, and what must not be loaded afterwards."""
PROGRAM = """
import importlib, json, sys
import torch

before, found = {*sys.modules}, {}
for name in sys.argv[1:]:
    importlib.import_module(name)
    found[name] = sorted({module.partition(".")[0] for module in {*sys.modules} - before})
print(json.dumps(found))
"""


def test_packages_load_what_they_always_need_alone():
    printed = subprocess.run(
        [sys.executable, "-c", PROGRAM, *ABSENT], check=True, capture_output=True, text=True
    ).stdout
    loaded = json.loads(printed)
    assert {name: sorted(ABSENT[name].intersection(loaded[name])) for name in ABSENT} == {name: [] for name in ABSENT}


DEFAULT_RUN = """
import sys
from fl.run import main

assert main(["--rounds", "1", "--local-epochs", "1", "--samples", "200", "--out", sys.argv[1]]) == 0
print(*sorted({"sklearn", "scipy", "pandas", "sympy", "torch._dynamo", "torch._inductor"}.intersection(sys.modules)))
"""


def test_the_default_run_loads_neither_scikit_learn_nor_the_modules_of_torch_compile(tmp_path):
    command = [sys.executable, "-c", DEFAULT_RUN, str(tmp_path)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert printed.splitlines()[-1] == ""
