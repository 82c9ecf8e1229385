"""A fleet of widths and depths

FedFA's clients hold models of different widths and depths. The picture shows how many hold each part of the full one.
"""

import matplotlib.pyplot as plt

import fl

mix = fl.ArchitectureOptions(widths=(0.25, 0.5, 1.0), depths=("2", "3"), choose="cycle")
config = fl.Config.of(algorithm="fedfa", model="preresnet20", width=0.25, rounds=1, local_epochs=1, architectures=mix)
fed, _ = fl.build(config)
print("the first three clients:", [(fed.fleet[k].spec.width, fed.fleet[k].spec.depth) for k in range(3)])
fl.simulate(config, "runs/fleet")
picture = plt.imread("runs/fleet/coverage.png")
plt.figure(figsize=(8, 8 * len(picture) / len(picture[0])))
plt.axes((0, 0, 1, 1)).imshow(picture)
plt.axis("off")
plt.show()
