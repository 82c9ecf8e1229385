"""Settings as version 0.2 wrote them, flat, give the runs that they were."""

import pytest
from refusals import fl_refused

from fl import ArchitectureOptions, AttackOptions, Config, Defence
from fl.algorithms.fedmr import FedMROptions
from fl.algorithms.fedprox import FedProxOptions
from fl.algorithms.femam import FeMAMOptions
from fl.data import TextOptions
from fl.extensions.presence import PresenceOptions
from fl.settings import Experiment
from fl.settings.stored import check_resumable

EVERY = """
samples: 0
data_root: null
download: true
pad: 0
compression: {kind: none}
pace: {spread: 0.0, speed: 1000.0, file: null, deadline: 0.0}
privacy: {clip: 0.0}
stem: default
dropout: null
exits: false
init: null
adapters: {kind: none}
last_batch: filled
loss: default
label_smoothing: 0.0
class_weights: []
lr_warmup: 0
metrics: []
best_by: auto
patience: 0
keep_best: false
log: []
checkpoint_every: 10
device: auto
data_on: auto
max_parallel_clients: 0
backend: auto
precision: float32
channels_last: false
deterministic: true
out: runs
name: null
"""
ALONE = """
attack: {share: 0.0}
defence: {rule: mean, clip: 0.0}
presence: {joining: 0.0, leaving: 0.0}
"""
DIRICHLET = """
dataset: cifar10
clients: 100
partition: dirichlet
alpha: 0.1
pool_test_set: false
min_samples: 10
algorithm: [fedmr]
model: cnn
width: [1.0]
depth: []
norm: default
participation: 0.1
rounds: 500
local_epochs: 5
batch_size: 50
optimizer: sgd
lr: 0.01
momentum: 0.9
nesterov: false
crop: 0
flip: false
weight_decay: 0.0
clip: 0.0
masked_loss: false
lr_schedule: constant
local_valid: 0.0
local_test: 0.0
seeds: [2]
eval_every: 1
eval_client_models_every: 0
fedmr: {segment_fraction: 0.0, unit: tensor, stage1_rounds: 100, secure: 0, align: false}
"""
LEVELS = """
dataset: tiny-imagenet
clients: 50
partition: clusters
clusters: [9, 15, 22]
cluster_classes: []
pool_test_set: true
min_samples: 10
algorithm: [femam]
model: resnet9
width: [1.0]
participation: 1.0
rounds: 700
local_epochs: 2
batch_size: 32
optimizer: sgd
lr: 0.01
momentum: 0.0
local_valid: 0.05
local_test: 0.1
seeds: [3]
eval_every: 10
femam:
  levels: [global, '5', personal]
  level_rounds: [400, 50]
  window: 50
  variance: 1.0
  prox: 0.02
  prox_all_levels: false
  share_gradients: true
  prune: true
  min_gain: 0.0
  combine: sum
  start: random
  clustering: nearest
  compare: all
"""
ARCHITECTURES = """
dataset: fashion-mnist
clients: 40
partition: shards
class_share: 0.2
algorithm: [fedfa]
model: preresnet18
width: [0.125]
depth: [3]
norm: static_batch
architectures:
  widths: [0.5, 1.0]
  depths: ['2', '3']
  mixed: false
  choose: zico
  weak: 0.5
participation: 0.0
participants: 8
masked_loss: true
lr_schedule: step
lr_factor: 0.1
lr_steps: [0.25, 0.5]
seeds: [0]
eval_client_models_every: 5
fedfa: {graft: true, scale: norm, quantile: 0.95}
"""
TEXT = """
dataset: wikitext-2
clients: 100
partition: contiguous
text: {tokens: word, vocabulary: 0, length: 64, template: "{prompt}\\n{answer}\\n"}
algorithm: [fedavg]
model: transformer
width: [1.0]
participation: 0.1
seeds: [0]
"""
ADAM = """
dataset: digits
clients: 20
partition: iid
unequal: true
algorithm: [fedprox]
model: cnn
width: [0.5]
participation: 0.0
participants: 5
optimizer: adamw
lr: 0.001
betas: [0.8, 0.99]
weight_decay: 0.01
crop: 4
flip: true
lr_schedule: cosine
seeds: [1]
fedprox: {mu: 0.5}
"""
ATTACK = """
presence: {joining: 0.0, leaving: 0.0}
dataset: digits
clients: 20
partition: dirichlet
alpha: 0.5
algorithm: [fedavg]
attack: {share: 0.2, amplify: 20.0, architecture: largest}
defence: {rule: trimmed, trim: 0.3, clip: 1.0}
seeds: [0]
"""
JOINING = """
attack: {share: 0.0}
dataset: femnist
clients: 30
partition: natural
algorithm: [local]
joining: 0.2
leaving: 0.1
seeds: [0]
"""


@pytest.mark.parametrize(
    ("text", "config"),
    [
        (ALONE + DIRICHLET, Config.of(
            dataset="cifar10", clients=100, alpha=0.1, participation=0.1, rounds=500, batch_size=50, lr=0.01, seed=2,
            fedmr=FedMROptions(unit="tensor", stage1_rounds=100),
        )),
        (ALONE + LEVELS, Config.of(
            algorithm="femam", dataset="tiny-imagenet", clients=50, partition="clusters", clusters=(9, 15, 22),
            pool_test_set=True, model="resnet9", participation=1.0, rounds=700, local_epochs=2, batch_size=32, lr=0.01,
            momentum=0.0, local_valid=0.05, local_test=0.1, seed=3, eval_every=10,
            femam=FeMAMOptions(("global", "5", "personal"), (400, 50), window=50, share_gradients=True),
        )),
        (ALONE + ARCHITECTURES, Config.of(
            algorithm="fedfa", dataset="fashion-mnist", clients=40, partition="shards", class_share=0.2, participants=8,
            model="preresnet18", width=0.125, depth=3, norm="static_batch", masked_loss=True, lr_schedule="step",
            lr_steps=(0.25, 0.5), eval_client_models_every=5,
            architectures=ArchitectureOptions((0.5, 1.0), ("2", "3")),
        )),
        (ALONE + TEXT, Config.of(
            algorithm="fedavg", dataset="wikitext-2", text=TextOptions(vocabulary=0), clients=100, model="transformer",
            partition="contiguous", participation=0.1,
        )),
        (ALONE + ADAM, Config.of(
            algorithm="fedprox", partition="iid", unequal=True, width=0.5, optimizer="adamw", lr=0.001,
            betas=(0.8, 0.99), weight_decay=0.01, crop=4, flip=True, lr_schedule="cosine", seed=1,
            fedprox=FedProxOptions(mu=0.5),
        )),
        (ATTACK, Config.of(
            algorithm="fedavg", attack=AttackOptions(0.2, 20.0, "largest"),
            defence=Defence("trimmed", trim=0.3, clip=1.0),
        )),
        (JOINING, Config.of(
            algorithm="local", dataset="femnist", clients=30, partition="natural", presence=PresenceOptions(0.2, 0.1),
        )),
    ],
    ids=["dirichlet", "levels", "architectures", "text", "adam", "attack", "joining"],
)  # fmt: skip
def test_stored__a_run_keeps_its_settings(text, config):
    read = Config.from_yaml(EVERY + text)
    assert read == config
    assert Config.from_yaml(read.to_yaml()) == config
    assert Experiment.from_yaml(EVERY + text).runs() == [config]


def test_stored__several_methods_and_seeds_are_an_experiment():
    text = ALONE + DIRICHLET.replace("[fedmr]", "[fedavg, fedmr, fedprox]").replace("[2]", "[0, 1]")
    text += "fedprox: {mu: 0.5}\n"
    read = Experiment.from_yaml(EVERY + text)
    assert (read.algorithms, read.seeds) == (("fedavg", "fedmr", "fedprox"), (0, 1))
    alone = ALONE + DIRICHLET.replace("[2]", "[0]")
    assert read.runs()[2] == Config.from_yaml(EVERY + alone)
    assert [one.method.options.mu for one in read.runs()[4:]] == [0.5, 0.5]
    assert {one.local.batch_size for one in read.runs()} == {50}
    with fl_refused("argument", "fl.Experiment"):
        Config.from_yaml(EVERY + text)


def test_stored__such_a_run_does_not_go_on():
    with fl_refused("folder"):
        check_resumable(EVERY + ALONE + DIRICHLET)
    check_resumable(Config().to_yaml())


def test_stored__a_run_with_an_extension_that_is_not_here_does_not_go_on():
    with fl_refused("missing", "of_a_stranger"):
        check_resumable(Config().to_yaml() + "of_a_stranger: {share: 0.5}\n")


def test_stored__adapters_are_also_read_within_the_topic_of_models():
    config = Config.of(adapters={"kind": "lora", "rank": 3}, width=0.5)
    assert Config.from_yaml("model: {width: [0.5], adapters: {kind: lora, rank: 3}}") == config
    with fl_refused("argument"):
        Config.from_yaml("model: {adapters: {kind: lora}}\nadapters: {kind: lora}")
