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
folder, *names = sys.argv[1:]
for name in names:
    importlib.import_module(name)
    found[name] = sorted({module.partition(".")[0] for module in {*sys.modules} - before})
print(json.dumps(found))
assert sys.modules["fl.run"].main(["--rounds", "1", "--local-epochs", "1", "--samples", "200", "--out", folder]) == 0
print(*sorted({"sklearn", "scipy", "pandas", "sympy", "torch._dynamo", "torch._inductor"}.intersection(sys.modules)))
"""


def test_imports__packages_and_the_default_run_load_what_they_always_need_alone(tmp_path):
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), *ABSENT]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    loaded = json.loads(printed[0])
    assert {name: sorted(ABSENT[name].intersection(loaded[name])) for name in ABSENT} == {name: [] for name in ABSENT}
    assert printed[-1] == ""  # neither scikit-learn nor the modules of torch.compile
