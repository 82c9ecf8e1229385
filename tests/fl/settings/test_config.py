"""The settings of the data, and `python -m fl.data`."""

import dataclasses
import itertools
import json
import re

import numpy as np
import pytest
import torch
import yaml
from refusals import fl_refused
from selection import METHODS, some

import fl
from fl import Config, FLError
from fl.algorithms import ALGORITHMS
from fl.algorithms.fedprox import FedProxOptions
from fl.algorithms.fesem import FeSEMOptions
from fl.base.rng import Rng
from fl.base.settings import Alternative
from fl.data import Dataset, TextOptions
from fl.data.__main__ import main
from fl.partition import KINDS, deal
from fl.runs import checkpoint
from fl.runs.assembly import build, model_spec, resolve_inputs
from fl.runs.folder import restore_server
from fl.settings import Experiment, command_line
from fl.settings.training import ClientSettings, LocalSettings

CLUSTERS = {"partition": "clusters", "clusters": (2, 5), "cluster_classes": (2, 1)}


@pytest.mark.parametrize(
    "settings",
    [
        {"partition": "iid"},
        {"partition": "iid", "unequal": True},
        {"partition": "shards", "class_share": 0.3, "clients": 10},
        CLUSTERS,
        {"partition": "dirichlet", "alpha": 0.3},
    ],
)
def test_config__every_partition_reaches_the_federation(settings, capsys):
    """The same clients as `python -m fl.data` shows."""
    config, flags = Config.of(**settings, rounds=1), []
    assert Config.from_yaml(config.to_yaml()) == config
    fed, _ = fl.build(config)
    for name, value in settings.items():
        text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        flags += ["--unequal"] if value is True else [f"--{name.replace('_', '-')}", text]
    assert main([*flags, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["counts"] == [torch.bincount(fed.data.y[s.train], minlength=10).tolist() for s in fed.clients]
    assert len(shown["structure"][0]) == config.clients.number
    options = {name: value for name, value in settings.items() if name not in ("partition", "clients")}
    dealt = deal(fed.data.y, config.data.partition.name, config.clients.number, Rng(0).numpy("partition"), **options)
    assert list(map(len, dealt.parts)) == fed.clients.train.sizes.tolist()


def test_config__titles_name_the_partition():
    spreads = [Config.of(**one).data.spread() for one in (CLUSTERS, {"partition": "iid", "unequal": True}, {})]
    assert spreads == ["clusters2,5", "iid-unequal", "dirichlet0.5"]


@pytest.mark.slow
@pytest.mark.drawn
def test_config__the_command_says_and_draws_who_holds_what(tmp_path, capsys):
    path = tmp_path / "split.png"
    flags = ["--partition", "clusters", "--clusters", "2,5", "--cluster-classes", "2,1", "--plot", str(path)]
    assert main(flags) == 0
    out = capsys.readouterr().out
    assert "digits: 1,437 training and 360 test samples of 1x8x8, 10 classes" in out
    assert "classes a client  3\n" in out
    assert "true clusters     2 on level 1, 5 on level 2\n" in out
    assert "moved" not in out
    assert path.read_bytes().startswith(b"\x89PNG")
    assert main(["--clients", "50", "--alpha", "0.05"]) == 0
    assert re.search(r"samples moved     \d+, from the largest clients\n", capsys.readouterr().out)


def test_config__settings_are_nested_by_topic_and_given_by_the_names_of_flags():
    config = Config.of(lr=0.5, clients=7, model="resnet20", eval_every=3, algorithm="fedprox", alpha=0.1)
    assert (config.local.lr, config.clients.number, config.model.name, config.evaluation.every) == (
        0.5,
        7,
        "resnet20",
        3,
    )
    assert (config.method, config.data.partition.options.alpha) == (Alternative("fedprox", FedProxOptions()), 0.1)
    own = fl.Config(clients=ClientSettings(7), method=Alternative("fedprox", FedProxOptions(mu=1.0)))
    assert own == Config.of(clients=7, algorithm="fedprox", fedprox=FedProxOptions(mu=1.0))
    assert Config.of(local=LocalSettings(lr=0.5), batch_size=3).local == LocalSettings(lr=0.5, batch_size=3)


def test_replace__keeps_the_options_that_another_alternative_reads_too():
    config = Config.of(alpha=0.1, algorithm="fedprox", fedprox=FedProxOptions(mu=1.0))
    assert config.replace(partition="dirichlet_mixture").data.partition.options.alpha == 0.1
    assert config.replace(partition="iid").data.partition == Alternative("iid", KINDS["iid"].options)
    assert config.replace(algorithm="fedavg").replace(algorithm="fedprox").method.options.mu == 0.01
    assert config.replace(lr=1.0).method == config.method


def test_replace__takes_mappings_for_some_settings_of_a_group():
    config = Config.of(algorithm="femam", femam={"prox": 0.5}, attack={"share": 0.2}, text={"length": 3})
    assert (config.method.options.prox, config.data.text.length) == (0.5, 3)
    more = config.replace(femam={"window": 7}, attack={"amplify": 3.0}, architectures={"widths": (0.5,)})
    assert (more.method.options.prox, more.method.options.window) == (0.5, 7)
    assert more.extensions["attack"] == fl.AttackOptions(share=0.2, amplify=3.0)
    assert more.model.architectures.widths == (0.5,)
    for strange in ({"femam": {"speed": 1}}, {"attack": {"speed": 1}}, {"text": {"speed": 1}}):
        with fl_refused("name"):
            config.replace(**strange)
    experiment = Experiment.of(algorithms=("femam", "fedprox"), femam={"prox": 0.5}).replace(femam={"window": 7})
    assert (experiment.options["femam"].prox, experiment.options["femam"].window) == (0.5, 7)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"speed": 1}, "unknown setting speed"),
        ({"learning_rate": 1}, "did you mean lr?"),
        ({"local_epoch": 1}, "did you mean local_epochs?"),
        (
            {"partition": "iid", "alpha": 0.1},
            "--alpha is for --partition dirichlet, dirichlet_mixture or dirichlet_sizes, not for iid",
        ),
        ({"fedprox": FedProxOptions()}, "fedprox= is for algorithm='fedprox', and this run is of fedmr"),
        (
            {"algorithm": "fedprox", "fedprox": FeSEMOptions()},
            "fedprox takes FedProxOptions or a mapping of some of its settings, got FeSEMOptions",
        ),
        (
            {"privacy": FedProxOptions()},
            "privacy takes Privacy or a mapping of some of its settings, got FedProxOptions",
        ),
        ({"seeds": (0, 1)}, "fl.Experiment.of"),
        ({"chunk": 2}, "--chunk is now --max-parallel-clients"),
    ],
)
def test_of__names_what_it_does_not_know(given, said):
    with pytest.raises(FLError, match=re.escape(said)):
        Config.of(**given)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("locl: {lr: 0.9}", "unknown setting locl: did you mean local?"),
        ("privcy: {clip: 0.5}", "unknown setting privcy: did you mean privacy?"),
        ("extensions: {privacy: {clip: 0.5}}", "outside of other sections"),
        ("local: {epoch: 1}", "unknown setting local.epoch: did you mean epochs?"),
        ("local: {local_epochs: 1}", "it is local.epochs"),
        ("model: {lr: 1.0}", "it is local.lr"),
        ("data: {alpha: 1.0}", "beside the name in data.partition"),
        ("data: 3", "data is a topic"),
        ("method: fedavg", "algorithm: fedavg"),
        ("method: {name: fedavg, mu: 0.1}", "fedavg has no options"),
        ("lr: 0.1\nlocal: {lr: 0.2}", "lr is there twice"),
        ("algorithm: fedavg\nmethod: {name: fedprox}", "algorithms is there twice"),
        ("seeds: [0]\nseed: 3", "seeds is there twice"),
        ("method: {name: fedprox, mu: 0.1}\nfedprox: {mu: 0.2}", "fedprox are there twice"),
        ("", "it has no settings"),
        ("lr: [0.1", "not YAML"),
    ],
)
def test_from_yaml__names_what_is_not_as_meant(text, said):
    for kind in (Config, Experiment):
        with pytest.raises(FLError, match=re.escape(said)):
            kind.from_yaml(text)


def test_of__takes_some_settings_of_a_topic_as_a_mapping():
    assert Config.of(local={"epochs": 1}, clients={"number": 3}) == Config.of(local_epochs=1, clients=3)
    with fl_refused("name", "local.lr"):
        Config.of(data={"lr": 1.0})


@pytest.mark.parametrize(
    "given", [{"method": "fedavg"}, {"method": Alternative("fedavg", 3)}, {"method": Alternative("nope")}]
)
def test_check__refuses_choices_that_are_none(given):
    with pytest.raises(FLError):
        dataclasses.replace(Config(), **given).check()


def test_config__lists_are_taken_in_mappings_as_elsewhere():
    config = Config.of(algorithm="femam", femam={"levels": ["global", "4"]}, partition="clusters", clusters=[2, 4])
    assert (config.method.options.levels, config.data.partition.options.clusters) == (("global", "4"), (2, 4))
    assert hash(config) == hash(Config.from_yaml(config.to_yaml()))


@pytest.mark.parametrize("name", some(ALGORITHMS, METHODS))
def test_config__experiments_are_the_same_from_yaml_whatever_their_methods(name):
    for methods in {("fedavg", name), (name, "fedavg"), (name, "fedprox")}:
        if len(set(methods)) == 2:
            experiment = Experiment.of(algorithms=methods, lr=0.3, seeds=(0, 1), local={"epochs": 1}, model="lenet")
            assert Experiment.from_yaml(experiment.to_yaml()).runs() == experiment.runs()


@pytest.mark.parametrize("algorithm", [{"name": "fedprox"}, ALGORITHMS["fedavg"], ["fedavg"], None, "fedvag"])
def test_check__refuses_what_is_no_name_of_a_method(algorithm):
    with fl_refused("name", "--algorithm"):
        Config.of(algorithm=algorithm).check()
    with fl_refused("name", "--algorithm"):
        Experiment.of(algorithms=(algorithm,)).check()


@pytest.mark.parametrize("given", [{"momentum": 0.1, "optimizer": "adam"}, {"text": TextOptions(length=3)}])
def test_check__refuses_what_nothing_reads(given):
    with fl_refused("argument"):
        Config.of(**given).check()
    with fl_refused("argument"):
        fl.build(Config.of(**given))
    assert Config.of(**given).as_read() == Config.of(**{n: one for n, one in given.items() if n == "optimizer"})


def test_check__refuses_a_topic_that_is_none():
    with fl_refused("argument", "ClientSettings"):
        dataclasses.replace(Config(), clients=3).check()


def test_config__a_setting_of_another_type_is_no_setting():
    assert Config.from_yaml("model: {dropout: 0}").model.dropout == 0
    with fl_refused("argument", "'abc'"):
        Config.from_yaml("model: {dropout: abc}")


def test_config__numbers_of_numpy_become_pythons():
    group = FedProxOptions(mu=np.float64(0.5))
    given = {"lr": np.float32(0.5), "clients": np.int64(4), "width": np.float64(0.5), "seed": np.int64(3)}
    found = Config.of(algorithm="fedprox", fedprox=group, **given)
    plain = Config.of(algorithm="fedprox", fedprox=FedProxOptions(mu=0.5), lr=0.5, clients=4, width=0.5, seed=3)
    assert found == plain
    assert found.to_yaml() == plain.to_yaml()
    assert type(group.mu) is np.float64  # what was given is not changed


def test_config__an_experiment_serves_several_methods():
    experiment = Experiment.of(algorithms=("fedavg", "fedprox"), fedprox=FedProxOptions(mu=1.0), seeds=range(2))
    runs = experiment.runs()
    assert [(run.method.name, run.seed) for run in runs] == [
        ("fedavg", 0),
        ("fedavg", 1),
        ("fedprox", 0),
        ("fedprox", 1),
    ]
    assert (runs[0].method.options, runs[2].method.options.mu) == (None, 1.0)
    assert Experiment.from_yaml(experiment.to_yaml()).runs() == runs
    experiment.replace(algorithms="fedavg").check()
    with fl_refused("argument", "fl.Experiment"):
        Config.from_yaml(experiment.to_yaml())
    with fl_refused("argument", "algorithms="):
        experiment.replace(algorithm="fedavg")


def test_config__settings_on_disk_are_those_that_the_run_reads():
    written = yaml.safe_load(Config.of(algorithm="fedavg", optimizer="adam", lr=0.001, alpha=0.1).to_yaml())
    assert written["method"] == {"name": "fedavg"}
    assert written["data"]["partition"] == {"name": "dirichlet", "alpha": 0.1}
    assert {"betas", "lr"} <= written["local"].keys()
    assert not {"momentum", "lr_steps"} & written["local"].keys()
    assert not {"architectures", "text", "attack"} & {name for topic in written.values() if isinstance(topic, dict)
                                                      for name in (*topic, *written)}  # fmt: skip
    assert yaml.safe_load(Config.of(algorithm="fedprox").to_yaml())["method"] == {"name": "fedprox", "mu": 0.01}


@pytest.mark.parametrize("section", ["fedprox: {renamed: 1}", "fedprox: {mu: text}"])
def test_config__a_section_of_a_method_that_is_not_run_is_ignored_with_a_line(section, caplog):
    assert Config.from_yaml(f"algorithm: fedavg\n{section}") == Config.of(algorithm="fedavg")
    (said,) = caplog.messages
    assert said.startswith("warning: section fedprox is ignored")
    with fl_refused("name", "fedprox.renamed"):
        Config.from_yaml("algorithm: fedprox\nfedprox: {renamed: 1}")


def test_config__a_run_whose_method_is_gone_is_read(tmp_path, caplog):
    (tmp_path / "config.yaml").write_text("method: {name: fedgone, beta: 0.9}\nlocal: {lr: 0.5}")
    assert Config.read(tmp_path).local.lr == 0.5
    assert "fedgone" in caplog.messages[0]
    with fl_refused("name", "--algorithm"):
        Config.read(tmp_path).check()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sample-privacy", {"clip": 0.0}),
        ("attack.kind", "shuffle"),
        ("activation-checkpointing", False),
        ("jobs", 1),
        ("secure-aggregation", 0.0),
        ("focal-gamma", 2.0),
        ("architectures.deviation", "signed"),
    ],
)
def test_config__settings_that_are_gone_are_read_from_a_folder_and_refused_elsewhere(name, value, tmp_path):
    config, file = Config.of(algorithm="fedavg"), tmp_path / "config.yaml"
    values, (group, _, setting) = yaml.safe_load(config.to_yaml()), name.replace("-", "_").rpartition(".")
    (values.setdefault(group, {}) if group else values)[setting] = value
    file.write_text(yaml.safe_dump(values))
    assert Config.read(tmp_path) == config
    values.setdefault("local", {})["focal_gamma"] = 2.0  # and within a topic
    (tmp_path / "other").mkdir()
    (tmp_path / "other/config.yaml").write_text(yaml.safe_dump(values))
    assert Config.read(tmp_path / "other") == config
    for refuse in (
        lambda: Config.read(tmp_path, resume=True),
        lambda: fl.simulate(config, tmp_path, resume=True),
        lambda: command_line.parse(["--resume", str(tmp_path)]),
        lambda: command_line.parse(["--config", str(file)]),
        lambda: command_line.parse([f"--{name}", "1"]),
    ):
        with pytest.raises(FLError, match=f"--{name} is gone"):
            refuse()


def test_config__what_a_file_sets_and_nothing_reads_is_said(tmp_path, caplog):
    file = tmp_path / "mine.yaml"
    file.write_text("optimizer: adam\nmomentum: 0.5\nfedprox: {mu: 1}")
    assert command_line.parse(["--config", str(file)]).one_run() == Config.of(optimizer="adam")
    assert [[word in said for word in ("momentum", "fedprox")] for said in caplog.messages] == [[1, 0], [0, 1]]
    config = command_line.parse(["--config", str(file), "--algorithm", "fedprox", "--optimizer", "sgd"]).one_run()
    assert (config.method.options.mu, config.local.momentum) == (1, 0.5)


def test_config__a_folder_of_settings_that_meant_another_model_is_not_resumed(tmp_path):
    config = Config.of(model="transformer", dataset="pydoc", partition="iid", width=0.125, depth=1, rounds=1, clients=2)
    _, algorithm = build(config.replace(participants=2))
    spec = model_spec(config, config.load())
    checkpoint.save(tmp_path, algorithm.init(), 1, dataclasses.replace(spec, dropout=0.0), {})
    with fl_refused("folder", "0.0", "0.2"):
        restore_server(config, tmp_path, algorithm, spec)


@pytest.mark.parametrize(
    ("given", "clients", "participants", "least"),
    [
        ({}, 20, 5, 10),
        ({"clients": 3}, 3, 3, 10),
        ({"clients": 1}, 1, 1, 10),
        ({"participants": 30}, 30, 30, 10),
        ({"clients": 3, "participation": 0.5}, 3, 5, 10),
        ({"samples": 100}, 20, 5, 5),
        ({"samples": 12, "clients": 3}, 3, 3, 4),
        ({"samples": 100, "clients": 3}, 3, 3, 10),
    ],
)
def test_config__defaults_follow_what_was_set(given, clients, participants, least):
    """From Python, from YAML, which records what is taken, and on the command line; also what is set later."""
    expected = (clients, participants, least)
    flags = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    text = "\n".join(f"{name}: {value}" for name, value in given.items())
    made = (Config.of(**given), Config().replace(**given), Config.from_yaml(text or "{}"))
    for config in (*made, command_line.parse(flags).one_run()):
        config.check()
        assert (config.clients.number, config.clients.participants, config.data.min_samples) == expected
        assert Config.from_yaml(config.to_yaml()) == config
    assert Config.of(clients=2).replace(clients=40).clients.participants == 5
    assert ("participants" in config.values()["clients"]) == ("participation" not in given)


@pytest.mark.parametrize(
    ("given", "read", "value"),
    [
        ({"algorithm": "fesem"}, lambda config: config.method.options.clusters, 3),
        ({"algorithm": "fesem_plus"}, lambda config: config.method.options.clusters, 3),
        ({"algorithm": "femam"}, lambda config: config.method.options.levels, ("global", "3", "3", "3", "personal")),
        ({"partition": "clusters"}, lambda config: config.data.partition.options.clusters, (3,)),
    ],
)
def test_config__groups_of_clients_that_nobody_set_are_no_more_than_clients(given, read, value):
    flags = [word for name, one in given.items() for word in (f"--{name}", one)]
    for config in (Config.of(**given, clients=3), command_line.parse([*flags, "--clients", "3"]).one_run()):
        config.check()
        assert read(config) == value
        assert Config.from_yaml(config.to_yaml()) == config
        assert read(config.replace(clients=30)) == read(Config.of(**given))
    build(Config.of(**given, clients=3, samples=200))


def test_config__groups_of_clients_that_were_set_are_not_changed():
    assert Config.of(algorithm="fesem", clients=3, fesem=FeSEMOptions(clusters=5)).method.options.clusters == 5
    assert Config.of(partition="clusters", clients=3, clusters=(5,)).data.partition.options.clusters == (5,)
    text = "clients: 3\nalgorithm: [fesem]\nfesem: {clusters: 5}"
    assert Config.from_yaml(text).method.options.clusters == 5


def test_config__defaults_follow_data_that_were_given():
    x, y = np.eye(30, dtype="float32"), np.arange(30) % 3
    data = Dataset.from_arrays(x, y, x[:6], y[:6], owners=np.arange(30) % 4)
    config = resolve_inputs(Config(), data, None)
    assert (config.clients.number, config.data.min_samples) == (20, 1)
    config = resolve_inputs(Config.of(partition="natural", min_samples=2), data, None)
    assert (config.clients.number, config.clients.participants) == (4, 4)
    assert len(config.data.deal(data, config.clients.number, np.random.default_rng(0)).parts) == 4
    set_clients = Config.of(partition="natural", clients=5, min_samples=2)
    assert resolve_inputs(set_clients, data, None).clients.number == 5


@pytest.mark.parametrize("given", [{"clients": 3, "participants": 5}, {"clients": 20, "participants": 21}])
def test_config__what_was_set_is_not_changed(given):
    with fl_refused("argument", "--participants", "--clients"):
        Config.of(**given).check()
    with fl_refused("argument", "--participants", "--clients"):
        Config.from_yaml("\n".join(f"{k}: {v}" for k, v in given.items())).check()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("rounds: 1\nrounds: 9", "'rounds' is there twice"),
        ("fedmr:\n  unit: tensor\n  unit: block", "'unit' is there twice"),
        ("rounds: 1:30", "rounds cannot be '1:30'"),
        ("lr: 1:30.5", "lr cannot be '1:30.5'"),
        ("clients: 010", "clients cannot be '010'"),
        ("flip: yes", "flip cannot be 'yes'"),
        ("seeds: [1, 0o17]", "seeds cannot be"),
        ("rounds: " + 5000 * "9", "a number of 5,000 digits"),
        ("fedprox: {mu: " + 5000 * "9" + "}", "a number of 5,000 digits"),
        ("seeds: " + "[" * 50 + "1" + "]" * 50, "seeds cannot be"),
        ("name: " + "a " * 5000 + "\nrounds: x", "rounds cannot be 'x'"),
    ],
)
def test_config__a_file_of_settings_that_reads_as_something_else_is_refused_in_a_short_line(text, why, tmp_path):
    (tmp_path / "config.yaml").write_text(text)
    for read in (Experiment.from_file, lambda path: Config.read(path.parent)):
        with pytest.raises(FLError) as error:
            read(tmp_path / "config.yaml")
        assert why in str(error.value)
        assert "config.yaml" in str(error.value)
        assert len(str(error.value)) < 400 + len(str(tmp_path))


def test_config__an_alias_bomb_is_named_in_a_short_line():
    rows = [
        "&a [1, 1]",
        *(f"&{b} [*{a}, *{a}]" for a, b in itertools.pairwise("abcdefghijklmnopqrstuvwxyzABCDEFGHIJK")),
    ]
    with fl_refused("argument", "[1, 1]") as error:
        Config.from_yaml(f"seeds: [{', '.join(rows)}]")
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize(
    ("share", "clients", "expected"), [(0.29, 100, 29), (0.07, 100, 7), (0.58, 50, 29), (0.01, 20, 1)]
)
def test_config__a_share_of_the_clients_is_rounded_to_the_nearest_and_at_least_one(share, clients, expected):
    assert Config.of(clients=clients, participation=share).clients.cohort() == expected


@pytest.mark.parametrize(
    ("text", "flags", "expected"),
    [("participation: 0.5", ["--participants", "3"], 3), ("participants: 3", ["--participation", "0.5"], 10)],
)
def test_config__a_flag_overrides_a_file_that_has_the_other_way_to_choose_participants(tmp_path, text, flags, expected):
    (tmp_path / "some.yaml").write_text(text)
    config = command_line.parse(["--config", str(tmp_path / "some.yaml"), *flags]).one_run()
    config.check()
    assert config.clients.cohort() == expected


def test_config__a_power_of_ten_without_a_point_is_a_number_where_one_is_asked_for():
    config = Config.from_yaml("local: {lr: 1e-3}\nmodel: {name: 1e5}\nmethod: {name: fedmr, segment_fraction: 5e-1}")
    assert (config.local.lr, config.model.name, config.method.options.segment_fraction) == (0.001, "1e5", 0.5)
