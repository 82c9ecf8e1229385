"""The notebooks of docs/notebooks: each runs from top to bottom, and its page shows what its cells print and draw.

What they left is kept in build/notebooks until they or the packages change. As a program, `python
docs/hooks/notebooks.py` runs what has to run and says how long that took.
"""

import hashlib
import os
import shutil
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gallery

ROOT = Path(__file__).parents[2]
NOTEBOOKS, CACHE = ROOT / "docs/notebooks", ROOT / "build/notebooks"
_LIMIT = 600  # seconds of a cell


def pages(notebooks: Path = NOTEBOOKS, cache: Path = CACHE) -> tuple[dict[str, str], dict[str, Path]]:
    """Return the text of each page, and the pictures, by their names in the site.

    Raises the error of a cell that fails.
    """
    now, texts, files = gallery.state(Path(__file__)), {}, {}
    folders = {
        path: cache / f"{path.stem}-{now}-{hashlib.sha256(path.read_bytes()).hexdigest()[:16]}"
        for path in sorted(notebooks.glob("*.ipynb"))
    }
    for old in set(cache.glob("*")) - set(folders.values()):
        shutil.rmtree(old)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        missing = [pair for pair in folders.items() if not (pair[1] / "page.md").exists()]
        list(pool.map(lambda pair: _run(*pair), missing))
    for path, folder in folders.items():
        texts[f"notebooks/{path.stem}.md"] = (folder / "page.md").read_text()
        files |= {f"notebooks/{picture.name}": picture for picture in folder.glob("*.png")}
    return texts, files


def _run(path: Path, folder: Path) -> None:
    """Run a notebook as Jupyter does, and leave its page and pictures in a folder."""
    import nbformat  # these are imported here, since the other pages do not need them
    from nbclient import NotebookClient
    from nbconvert import MarkdownExporter
    from traitlets.config import Config

    notebook = nbformat.read(path, as_version=4)
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    own = {"PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as here:
        # Files in place of ports: a port that is free when it is chosen may be taken once the kernel has started.
        sockets = Config(KernelManager={"transport": "ipc", "ip": f"{here}/kernel"})
        client = NotebookClient(notebook, config=sockets, timeout=_LIMIT, resources={"metadata": {"path": here}})
        client.execute(env=os.environ | own)
    for cell in notebook.cells:
        if cell.cell_type == "code":  # without bars of progress
            cell.outputs = [one for one in cell.outputs if one.get("name") != "stderr"]
    text, resources = MarkdownExporter().from_notebook_node(notebook, {"unique_key": path.stem})
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in resources["outputs"].items():
        (folder / name).write_bytes(content)
    title, _, rest = text.strip().partition("\n")
    link = f"[This page as a Jupyter notebook]({path.name}), to run it yourself.\n"
    (folder / "page.md").write_text(f"{title}\n\n{link}{rest}\n")  # the last one: with it the folder is complete


if __name__ == "__main__":
    began = time.perf_counter()
    print(f"{len(pages()[0])} notebooks: {time.perf_counter() - began:.0f} s")
