"""benchmarks/peers.py runs, and the plain loop trains what our engine trains."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_the_plain_loop_trains_the_same_model(tmp_path):
    command = ["benchmarks/peers.py", "--quick", "--settings", "B", "--device", "cpu", "--data-root", "none"]
    subprocess.run([sys.executable, *command, "--backend", "loop", "--out", tmp_path], cwd=ROOT, check=True)
    result = json.loads((tmp_path / "peers-cpu-quick.json").read_text())
    ours, plain = result["settings"]["B"]["rows"]
    assert (ours["side"], plain["side"]) == ("ours", "plain")
    assert plain["check"]["parameters"] < 1e-10
    assert len(plain["seconds"]) == 2
    assert plain["ratio"] > 0
