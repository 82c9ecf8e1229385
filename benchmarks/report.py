"""Where the programs of this folder leave what they have measured."""

import json
from pathlib import Path


def write(result: dict, folder: Path, name: str) -> None:
    """Write folder/name.json, and say so."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote {path}")
