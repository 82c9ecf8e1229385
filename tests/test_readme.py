"""The README's Python runs as printed."""

import re
from pathlib import Path

import pytest

TEXT = (Path(__file__).parent.parent / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)


@pytest.mark.parametrize("code", BLOCKS, ids=[block.splitlines()[0] for block in BLOCKS])
def test_python_blocks_run(code, capsys):
    from fl.algorithms import ALGORITHMS, MIXED

    before, mixed = dict(ALGORITHMS), list(MIXED)
    scope = {}
    try:
        exec(compile(code, "README.md", "exec"), scope)
        for line in re.findall(r"print\(.*#\s*(.*)", code):
            assert line in capsys.readouterr().out
        for name in ALGORITHMS.keys() - before.keys():
            assert_sound(name)
    finally:  # a method that the README adds goes away again
        ALGORITHMS.clear()
        ALGORITHMS.update(before)
        MIXED[:] = mixed


def assert_sound(name):
    """Predictions are numbers, also of batch norm; what attackers send and defences cut reaches the global model."""
    import fl

    after = {}
    for case, settings in {
        "plain": {},
        "attacked": {"attack": fl.AttackOptions(0.5, 3.0)},
        "clipped": {"defence": fl.Defence(clip=0.5)},
        "median": {"defence": fl.Defence("median")},
    }.items():
        config = fl.Config(
            algorithm=(name,), rounds=3, model="resnet9", width=0.25, local_epochs=1, batch_size=100, participants=1.0,
            clients=4, partition="iid", **settings,
        )  # fmt: skip
        fed, algorithm = fl.build(config)
        server = algorithm.init()
        for number in (1, 2, 3):
            rng = fl.Rng(0, number)
            server, _ = algorithm.round(server, fed.sample(rng), rng)
        assert algorithm.predict(server, fed.data.test_x, None).isfinite().all()
        after[case] = server["global"]["stem.conv.weight"]
    assert len({tensor.sum().item() for tensor in after.values()}) == 4


def test_files_and_commands_that_the_readme_names_exist():
    root = Path(__file__).parent.parent
    for target in re.findall(r"\]\(((?!http)[^)]+)\)", TEXT):
        assert (root / target).exists(), target
    assert "pip install -e '.[dev]' && pytest" in TEXT.splitlines()
    assert "@@" not in TEXT  # no place left to fill in
    assert "pip install -e . && python -m fl.run" in TEXT.splitlines()


def test_files_that_other_pages_name_exist():
    root = Path(__file__).parent.parent
    for page in ("CONTRIBUTING.md", "CHANGELOG.md", "docs/gpu.md"):
        text = (root / page).read_text()
        for target in re.findall(r"\]\(((?!http)[^)]+)\)", text):
            assert ((root / page).parent / target).exists(), (page, target)
        for target in re.findall(r"`((?:fl|surgery|zoo|tests|docs|benchmarks)/[\w/.]*)`", text):
            assert "NAME" in target or (root / target).exists(), (page, target)
