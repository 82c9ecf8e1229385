"""The README's Python runs as printed."""

import re
from pathlib import Path

import pytest

TEXT = (Path(__file__).parent.parent / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)


@pytest.mark.parametrize("code", BLOCKS, ids=[block.splitlines()[0] for block in BLOCKS])
def test_python_blocks_run(code, monkeypatch, capsys):
    from fl.algorithms import ALGORITHMS

    for name, factory in ALGORITHMS.items():  # so that a method that the README adds goes away again
        monkeypatch.setitem(ALGORITHMS, name, factory)
    before = set(ALGORITHMS)
    scope = {}
    exec(compile(code, "README.md", "exec"), scope)
    for line in re.findall(r"print\(.*#\s*(.*)", code):
        assert line in capsys.readouterr().out
    for name in set(ALGORITHMS) - before:
        import fl

        fed, algorithm = fl.build(fl.Config(algorithm=(name,), rounds=1, width=0.1))
        server, _ = algorithm.round(algorithm.init(), fed.sample(fl.Rng(0, 1)), fl.Rng(0, 1))
        assert algorithm.predict(server, fed.data.test_x, None).isfinite().all()
        del ALGORITHMS[name]


def test_files_and_commands_that_the_readme_names_exist():
    root = Path(__file__).parent.parent
    for target in re.findall(r"\]\(((?!http)[^)]+)\)", TEXT):
        assert (root / target).exists(), target
    assert "pip install -e '.[dev]' && pytest" in TEXT.splitlines()
    assert "@@" not in TEXT  # no place left to fill in
    assert "pip install -e . && python -m fl.run" in TEXT.splitlines()
