"""Rules about the source itself."""

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
ALLOWED = {"surgery": set(), "zoo": set(), "fl": {"surgery", "zoo"}}


def test_packages_import_in_one_direction():
    for package, allowed in ALLOWED.items():
        forbidden = set(ALLOWED) - {package} - allowed
        files = list((ROOT / package).rglob("*.py"))
        assert files
        for file in files:
            for node in ast.walk(ast.parse(file.read_text())):
                names = []
                if isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom):
                    assert node.level == 0, f"{file}:{node.lineno} imports relatively"
                    names = [node.module]
                for name in names:
                    assert name.split(".")[0] not in forbidden, f"{file}:{node.lineno} imports {name}"
