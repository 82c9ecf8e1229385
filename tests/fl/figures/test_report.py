"""The page about runs: it holds what is compared and printed, and nothing that has to be loaded."""

import re
import shlex
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from torch import nn

from fl import compare, simulate
from fl.analysis.background import progress, write_command
from fl.analysis.groups import find_runs, group, make_table
from fl.base.errors import FLError
from fl.base.rng import Rng
from fl.data import Dataset
from fl.figures.report import report
from fl.partition import counts
from fl.runs.metrics import Metrics
from fl.settings import Config, Experiment
from fl.settings.command_line import parse

pytestmark = pytest.mark.drawn


class Page(HTMLParser):
    """The tables of a page as rows of text, each beside the attributes of its cells; its texts; what it refers to."""

    def __init__(self, text):
        super().__init__()
        self.tables, self.texts, self.links, self.open = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.links += [value for name, value in attributes.items() if name in ("src", "href", "xlink:href", "xmlns")]
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        if tag not in ("meta", "path", "use", "br", "rect", "stop", "image"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if self.open and self.open[-1] == tag:
            self.open.pop()

    def handle_endtag(self, tag):
        if tag in self.open:
            while self.open.pop() != tag:
                pass

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th"):
            self.tables[-1][-1][-1] += data.replace("\xa0", " ")
        elif self.open and self.open[-1] not in ("script", "style"):
            self.texts.append(data)


def leave(folder, accuracies, **settings):
    """What a run with these accuracies leaves."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(Config.of(**settings).to_yaml())
    metrics = Metrics(folder / "metrics.csv")
    for number, accuracy in enumerate(accuracies, 1):
        scores = {} if accuracy is None else {"accuracy": accuracy, "f1": accuracy, "loss": 1 / accuracy}
        metrics.add({"round": number, "seconds": 2.0, "train_loss": 1.0, **scores})
    return folder


def made(folder, **arguments):
    runs = find_runs([folder])
    text = report([folder], runs, **arguments)
    return text, Page(text), runs


def test_report__a_page_has_the_numbers_of_the_table_and_of_the_curves(tmp_path):
    rng = np.random.default_rng(0)
    accuracies = {(name, seed): rng.random(4) for name in ("fedavg", "fedmr") for seed in (0, 1, 2)}
    for (name, seed), values in accuracies.items():
        leave(tmp_path / f"{name}-{seed}", values, algorithm=name, seed=seed, rounds=4)
    text, page, runs = made(tmp_path)
    expected = [re.split(" {2,}", line) for line in make_table(group(runs)).splitlines()]
    assert page.tables[0] == expected
    shown_on_a_phone = re.findall('data-head="(.*?)"', text)
    assert shown_on_a_phone[: len(expected[0])] == expected[0]
    curves = page.tables[1]
    assert curves[0] == ["round", "fedavg %", "fedmr %"]
    for place, row in enumerate(curves[1:]):
        shown = [str(place + 1)]
        for name in ("fedavg", "fedmr"):
            values = [100 * accuracies[name, seed][place] for seed in range(3)]
            shown.append(f"{np.mean(values):.2f} ± {np.std(values, ddof=1):.2f}")
        assert row == shown
    assert f"{curves[-1][2]} · round 4" in page.texts  # below the picture, before anybody points at it


def test_report__a_page_refers_to_nothing_outside(tmp_path):
    leave(tmp_path / "a", [0.1, 0.5], algorithm="fedavg", rounds=2)
    text, page, _ = made(tmp_path)
    assert "//" not in text.replace("</", "")
    assert all(link.startswith("#") for link in page.links)
    assert not re.search(r"@import|url\((?!#)|<link|<iframe|fetch\(", text)
    assert "1 run" in page.texts
    assert "http-equiv" not in text


def test_report__names_and_labels_are_escaped(tmp_path):
    evil = '<script>alert("&")</script>'
    leave(tmp_path / "<b>&amp;" / "a", [0.5], algorithm="fedavg", rounds=1, dataset=f"folder:{evil}", partition="iid")
    leave(tmp_path / "<b>&amp;" / "b", [0.5], algorithm="fedavg", rounds=1, dataset="digits", partition="iid")
    text, page, _ = made(tmp_path)
    assert evil not in text
    assert "<b>" not in text
    assert text.count("<script>") == 1
    assert any(evil in cell for rows in page.tables for row in rows for cell in row)


def test_report__settings_that_differ_are_beside_each_other(tmp_path):
    for at, lr in enumerate((0.1, 0.05)):
        leave(tmp_path / str(at), [0.5], algorithm="fedavg", rounds=1, lr=lr, clients=10)
    _, page, _ = made(tmp_path)
    differ, alike = (
        next(one for one in page.tables if one[0][:2] == ["setting", name]) for name in ("fedavg lr=0.1", "value")
    )
    assert differ == [["setting", "fedavg lr=0.1", "fedavg lr=0.05"], ["lr", "0.1", "0.05"]]
    assert ["clients", "10"] in alike
    assert "lr" not in [name for name, _ in alike]


def test_report__the_partition_is_the_runs_own(tmp_path):
    config = Config.of(algorithm="fedavg", rounds=1, seed=3, clients=6)
    leave(tmp_path / "a", [0.5], algorithm="fedavg", rounds=1, seed=3, clients=6)
    dataset = config.load()
    expected = counts(config.data.deal(dataset, 6, Rng(3).numpy("partition")), dataset.y, dataset.classes)
    _, page, _ = made(tmp_path)
    head, *rows = page.tables[-1]
    assert head == ["client", *map(str, range(10)), "all"]
    assert [[int(cell or 0) for cell in row[1:-1]] for row in rows] == expected.tolist()
    assert [int(row[-1]) for row in rows] == expected.sum(1).tolist()
    assert len({hash(tuple(row)) for row in rows}) == 6


def test_report__the_partition_of_data_that_were_given_from_python_is_that_of_the_run(tmp_path):
    x, y = torch.randn(90, 4, generator=torch.Generator().manual_seed(0)), torch.arange(90) % 3
    given = Dataset.from_arrays(x, y, x, y, names=["a", "b", "c"])
    few = Config.of(algorithm="fedavg", clients=4, participants=2, rounds=1, partition="iid")
    simulate(few, tmp_path / "run", dataset=given, model=nn.Linear(4, 3))
    _, page, _ = made(tmp_path)
    head, *rows = page.tables[-1]
    expected = counts(few.data.deal(given, 4, Rng(0).numpy("partition")), given.y, 3)
    assert head == ["client", "a", "b", "c", "all"]
    assert [[int(cell or 0) for cell in row[1:-1]] for row in rows] == expected.tolist()


def test_report__a_damaged_partition_is_named(tmp_path):
    leave(tmp_path / "a", [0.5], algorithm="fedavg", dataset="given", rounds=1)
    (tmp_path / "a" / "partition.json").write_text('{"cli')
    _, page, _ = made(tmp_path)
    assert any("partition.json" in text for text in page.texts)


def test_report__settings_of_one_method_alone_are_shown_where_they_are_not_the_defaults(tmp_path):
    for at, options in enumerate(({"algorithm": "fedavg"}, {"algorithm": "fedprox", "fedprox": {"mu": 0.5}})):
        leave(tmp_path / str(at), [0.5], rounds=1, **options)
    leave(tmp_path / "2", [0.5], rounds=1, algorithm="fedmr")
    _, page, _ = made(tmp_path)
    differ = next(one for one in page.tables if one[0][:2] == ["setting", "fedavg"])
    assert [row[0] for row in differ[1:]] == ["fedprox.mu"]


def test_report__data_that_are_not_there_are_named(tmp_path):
    leave(tmp_path / "a", [0.5], algorithm="fedavg", rounds=1, dataset=f"folder:{tmp_path}/gone", partition="iid")
    _, page, _ = made(tmp_path)
    assert any("gone" in text and "x.npy" in text for text in page.texts)


def test_report__the_command_trains_the_same(tmp_path):
    config = Config.of(algorithm="fedprox", fedprox={"mu": 0.5}, lr=0.05, partition="shards", width=0.5, rounds=7)
    for seed in (4, 5):
        leave(tmp_path / str(seed), [0.5], **{"algorithm": "fedprox", "fedprox": {"mu": 0.5}, "lr": 0.05},
              partition="shards", width=0.5, rounds=7, seed=seed)  # fmt: skip
    words = shlex.split(write_command(find_runs([tmp_path])))
    assert words[:3] == ["python", "-m", "fl.run"]
    assert parse(words[3:]).experiment.runs() == [config.replace(seed=seed) for seed in (4, 5)]


def test_report__runs_of_own_data_have_python_that_makes_their_settings(tmp_path):
    config = Config.of(algorithm="fedavg", dataset="given", rounds=3, partition="iid")
    leave(tmp_path / "a", [0.5], algorithm="fedavg", dataset="given", rounds=3, partition="iid")
    text = write_command(find_runs([tmp_path]))
    import fl

    settings = eval(text.splitlines()[0].removeprefix("config = "), {"fl": fl})
    assert settings == config
    assert "dataset=..." in text
    assert "model=..." not in text


def test_report__runs_that_go_on_are_shown_and_the_page_reloads_itself(tmp_path):
    (tmp_path / "config.yaml").write_text(Experiment.of(algorithms=("fedavg", "fedmr", "fedprox"), rounds=4).to_yaml())
    leave(tmp_path / "fedavg-seed0", [0.1, 0.5, 0.6, 0.7], algorithm="fedavg", rounds=4)
    leave(tmp_path / "fedmr-seed0", [0.1, 0.5], algorithm="fedmr", rounds=4)
    leave(tmp_path / "fedprox-seed0", [None], algorithm="fedprox", rounds=4)
    runs = find_runs([tmp_path], quiet=True)
    assert [progress(run) for run in runs] == ["finished", "round 2 of 4"]
    text = report([tmp_path], runs, every=30)
    assert '<meta http-equiv="refresh" content="30">' in text
    states = {row[0].rpartition("/")[2]: row[-1] for one in Page(text).tables for row in one if len(row) == 4}
    assert states["fedprox-seed0"] == "not evaluated yet"
    assert states["fedmr-seed0"] == "round 2 of 4"
    with pytest.raises(FLError):
        find_runs([tmp_path / "fedprox-seed0"], quiet=True)


def test_report__a_page_is_written_until_all_runs_have_ended(tmp_path, monkeypatch, capsys):
    run, out, slept = leave(tmp_path / "a", [0.1, 0.5], algorithm="fedavg", rounds=3), tmp_path / "page.html", []

    def sleep(seconds):
        slept.append(seconds)
        assert 'content="5"' in out.read_text()
        if len(slept) == 2:
            Metrics(run / "metrics.csv", find_runs([run])[0].rows).add(
                {"round": 3, "seconds": 2.0, "train_loss": 1.0, "accuracy": 0.75, "f1": 0.75, "loss": 1.0}
            )

    monkeypatch.setattr("time.sleep", sleep)
    assert compare.main([str(run), "--html", str(out), "--every", "5"]) == 0
    assert slept == [5, 5]
    assert "http-equiv" not in out.read_text()
    assert "75.00" in out.read_text()
    assert "75.00" in capsys.readouterr().out
    assert not (tmp_path / "comparison.png").exists()


def test_report__curves_against_traffic_and_a_target_are_on_the_page(tmp_path):
    folder = leave(tmp_path / "a", [0.1, 0.5], algorithm="fedavg", rounds=2)
    text, page, _ = made(folder, against="seconds", target=0.4)
    places = [float(place) for place in re.findall(r'data-at="([^"]+)"', text)]
    assert places[:2] == [2, 4]  # of two seconds a round
    costs = page.tables[1]
    assert costs[0][:3] == ["method", "seeds", "rounds"]
    assert costs[1][:3] == ["fedavg", "1", "2"]


@pytest.mark.parametrize(
    "words", [["--html", "page.png"], ["--html", "there.html"], ["--every", "5"], ["--html", "a.html", "--every", "0"]]
)
def test_report__pages_that_cannot_be_written_are_refused(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    leave(tmp_path / "a", [0.5], algorithm="fedavg", rounds=1)
    (tmp_path / "there.html").write_text("mine")
    assert compare.main(["a", *words]) == 2
    assert (tmp_path / "there.html").read_text() == "mine"
    assert capsys.readouterr().err.startswith("error")
    assert not (tmp_path / "comparison.png").exists()
