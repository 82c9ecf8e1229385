"""start.safetensors, which a run with --init keeps."""

import torch

from fl.config import Config
from fl.models.init import Start
from fl.runs.start import FILE, keep, kept


def test_the_same_weights_are_the_same_bytes_whenever_they_are_written(tmp_path):
    """A run that was killed before it kept them leaves the file that it would have left."""
    start = Start({"w": torch.arange(3.0), "b": torch.ones(2)}, "weights.safetensors", "0" * 64, ("b",))
    written = set()
    for _ in range(20):
        keep(tmp_path, start)
        written.add((tmp_path / FILE).read_bytes())
        (tmp_path / FILE).unlink()
    assert len(written) == 1
    keep(tmp_path, start)
    again = kept(tmp_path, Config(init="weights.safetensors"))
    assert again[1:] == start[1:]
    assert all(torch.equal(again.taken[name], tensor) for name, tensor in start.taken.items())
