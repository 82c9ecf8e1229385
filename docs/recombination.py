"""Draw recombination with the library itself: `python docs/recombination.py FILE`.

Five models of a ResNet-20 whose tensors hold nothing but their model's number are shuffled for real; the colour of
a cell is the number found there.
"""

import sys

import torch
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

import surgery
import zoo

K, SEED = 5, 8


def main(file: str) -> None:
    model = zoo.create("resnet20", width=0.25)
    numbers = [{name: torch.full(t.shape, k) for name, t in surgery.state(model).items()} for k in range(K)]
    models = surgery.stack(numbers)
    blocks = surgery.layers(model, unit="block")

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    panels = [("trained models", None), ("every block on its own", 0.0), ("segments of a third", 1 / 3)]
    for axis, (title, fraction) in zip(figure.subplots(1, 3, sharey=True), panels):
        result = models
        if fraction is not None:
            parts = surgery.segments(blocks, fraction=fraction)
            shuffles = surgery.permutations(len(parts), K, generator=torch.Generator().manual_seed(SEED))
            result = surgery.shuffle(models, segments=parts, permutations=shuffles)
        cells = torch.stack([result[block.tensors[0]].flatten(1)[:, 0] for block in blocks])
        colors = ListedColormap(["#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee"])
        axis.pcolormesh(cells, cmap=colors, edgecolors="white", linewidth=2, vmin=0, vmax=K - 1)
        axis.invert_yaxis()
        axis.set_title(title, fontsize=11)
        axis.set_xticks([k + 0.5 for k in range(K)], [f"model {k + 1}" for k in range(K)], fontsize=8)
        axis.set_yticks([i + 0.5 for i in range(len(blocks))], [block.name for block in blocks], fontsize=8)
        axis.tick_params(length=0)
        axis.spines[:].set_visible(False)
    figure.savefig(file, dpi=130)


if __name__ == "__main__":
    main(sys.argv[1])
