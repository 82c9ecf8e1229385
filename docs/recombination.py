"""Draw recombination with the library itself: `python docs/recombination.py FILE`.

Five models of a ResNet-20 whose tensors hold nothing but their model's number are shuffled for real; number and colour
of a cell are what is found there.
"""

import sys

import numpy as np
import torch
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

import surgery
import zoo

K, SEED = 5, 8
COLORS = ["#0072b2", "#e69f00", "#00785a", "#cc79a7", "#a5d2ff"]  # after Okabe and Ito, with different brightness
INK = ["white", "black", "white", "black", "black"]


def main(file: str) -> None:
    model = zoo.create("resnet20", width=0.25)
    numbers = [{name: torch.full(t.shape, k) for name, t in surgery.state(model).items()} for k in range(K)]
    models = surgery.stack(numbers)
    blocks = surgery.layers(model, unit="block")

    figure = Figure(figsize=(10, 4.6), layout="constrained")
    panels = [("trained models", None), ("every block on its own", 0.0), ("segments of a third", 1 / 3)]
    for axis, (title, fraction) in zip(figure.subplots(1, 3, sharey=True), panels):
        result = models
        if fraction is not None:
            parts = surgery.segments(blocks, fraction=fraction)
            shuffles = surgery.permutations(len(parts), K, generator=torch.Generator().manual_seed(SEED))
            result = surgery.shuffle(models, segments=parts, permutations=shuffles)
        cells = torch.stack([result[block.tensors[0]].flatten(1)[:, 0] for block in blocks])
        colors = ListedColormap(COLORS)
        axis.pcolormesh(cells, cmap=colors, edgecolors="white", linewidth=2, vmin=0, vmax=K - 1)
        for (row, column), number in np.ndenumerate(cells.numpy()):
            axis.text(
                column + 0.5, row + 0.5, int(number) + 1, ha="center", va="center", fontsize=9, color=INK[int(number)]
            )
        axis.invert_yaxis()
        axis.set_title(title, fontsize=11)
        axis.set_xticks([k + 0.5 for k in range(K)], [f"model {k + 1}" for k in range(K)], fontsize=9)
        axis.set_yticks([i + 0.5 for i in range(len(blocks))], [block.name for block in blocks], fontsize=9)
        axis.tick_params(length=0)
        axis.spines[:].set_visible(False)
    figure.legend(
        handles=[Patch(color=color, label=f"trained model {k + 1}") for k, color in enumerate(COLORS)],
        loc="outside lower center",
        ncols=K,
        frameon=False,
        fontsize=10,
        title="number and colour of a cell: the trained model that the block comes from",
    )
    figure.savefig(file, dpi=150)


if __name__ == "__main__":
    main(sys.argv[1])
