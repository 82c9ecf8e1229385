"""Watch a run round by round

You write the loop: each turn trains a round and yields it, with its model. Here the loop watches the largest weights.
"""

import matplotlib.pyplot as plt

import fl

config = fl.Config.of(algorithm="fedmr", rounds=12, width=0.25, local_epochs=2)
watched = []
with fl.Run(config, "runs/watched") as run:
    for round in run:
        assert isinstance(round, fl.Round)
        largest = {name: p.abs().max().item() for name, p in round.model.named_parameters() if p.ndim > 1}
        watched.append(largest)
        print(f"round {round.number}: accuracy {round.row['accuracy']:.1%}")
        if round.row["accuracy"] > 0.95:
            break

figure, axis = plt.subplots(figsize=(6, 4), layout="constrained")
for name in watched[0]:
    axis.plot(range(1, len(watched) + 1), [largest[name] for largest in watched], marker="o", label=name)
axis.set(title="The largest weight of each layer", xlabel="round", ylabel="absolute value")
axis.legend()
plt.show()
