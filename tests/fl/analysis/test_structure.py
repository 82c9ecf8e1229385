import dataclasses
import json

import numpy as np
import pytest
from refusals import fl_refused
from sklearn.metrics import adjusted_rand_score

from fl import structure
from fl.analysis.structure import FILE, Structure, agreement, describe, rand_index
from fl.base.errors import FLError
from fl.figures.clients import CLUSTERS, MOST, ONE, OWN, structure_maps

TRUTH = [[0, 0, 0, 0, 1, 1], [0, 0, 1, 1, 2, 2]]
FOUND = [[0] * 6, [3, 3, 3, -1, 0, 0], [1, 1, 0, 0, 0, 0], [-1] * 6, [0, 1, -1, -1, -1, 5]]


def make(**changes) -> Structure:
    levels = ["global", "5", "5", "5", "personal"]
    return dataclasses.replace(Structure("femam", levels, TRUTH, FOUND, 5, 3, "a title"), **changes)


def test_structure__rand_index_is_that_of_scikit_learn_over_the_clients_that_kept_a_model():
    rng = np.random.default_rng(0)
    for _ in range(20):
        found, truth = rng.integers(-1, 4, 30), rng.integers(0, 5, 30)
        kept = found >= 0
        assert rand_index(found.tolist(), truth.tolist()) == pytest.approx(
            adjusted_rand_score(truth[kept], found[kept])
        )
    assert rand_index([1, 1, 0, 0, 2, -1], [0, 0, 1, 1, 2, 2]) == 1  # another numbering, and one pruned


def test_structure__names_of_clients_are_drawn_and_read(tmp_path):
    names = ["oslo", "lima", "bern", "riga", "rome", "cairo"]
    make(names=names).save(tmp_path)
    read = Structure.read(tmp_path)
    labels = structure_maps([read]).subfigs[0].axes[0].get_yticklabels()
    assert [label.get_text() for label in labels] == read.names == names
    with fl_refused("argument"):
        make(names=names[1:])
    text = json.loads((tmp_path / FILE).read_text())
    del text["names"]  # as earlier versions wrote it
    (tmp_path / FILE).write_text(json.dumps(text))
    assert Structure.read(tmp_path).names == []


def test_structure__rand_index_is_none_where_the_truth_says_nothing():
    for found, truth in (
        ([0, 0, 1, 1], [0, 0, 0, 0]),
        ([0, 0, 1, 1], [0, 1, 2, 3]),
        ([0, 0, 1, -1], [0, 0, 0, 1]),  # the cluster of the last is not there any more
        ([0, -1, 0, 1], [0, 0, 1, 2]),  # those that are left are each alone
    ):
        assert rand_index(found, truth) is None


def test_structure__a_level_that_collapsed_is_seen():
    """One model for all, or one for each, where there are clusters to find: 0, as scikit-learn has it."""
    for found in ([0, 0, 0, 0, -1], [0, 1, 2, 3, -1]):
        assert rand_index(found, [0, 0, 1, 1, 1]) == adjusted_rand_score([0, 0, 1, 1], found[:4]) == 0
    rows = agreement(make(found=[FOUND[0], [4] * 6, [2] * 6, [-1] * 6, [*range(6)]]))
    assert [row.rand for row in rows] == [[None] * 2, [0, 0], [0, 0], [None] * 2, [None] * 2, [None, 0]]
    axis = structure_maps([make(found=[[4] * 6], levels=["5"], trained=1)]).axes[1]
    label = axis.get_xticklabels()[0].get_text()
    assert label == "level 1\n5 models\nARI 0.00\nwith level 1"
    nobody = agreement(make(found=[FOUND[0], [0, *[-1] * 5], *[[-1] * 6] * 3]))
    assert all(row.best is None for row in nobody)  # a single client with a cluster model is no clustering


def test_structure__agreement_of_levels_and_of_whole_pathways():
    one, two, three, four, five, pathway = agreement(make())
    assert [row.level for row in (one, two, five, pathway)] == ["global", "5", "personal", "pathway"]
    assert [row.models for row in (one, two, three, four, five)] == [1, 2, 2, 0, 3]
    assert [row.kept for row in (one, two, three, four, five)] == [1, 5 / 6, 1, 0, 0.5]
    assert one.rand == four.rand == five.rand == [None, None]
    assert one.best is None
    assert two.rand == [1, pytest.approx(adjusted_rand_score([0, 0, 1, 2, 2], [3, 3, 3, 0, 0]))]
    assert two.best == 1
    assert three.best == three.rand[1] == pytest.approx(adjusted_rand_score(TRUTH[1], FOUND[2]))
    # (3, 1) (3, 1) (3, 0) (-1, 0) (0, 0) (0, 0): global and personal do not count, pruned is a place of its own
    assert (pathway.models, pathway.kept) == (4, 1)
    assert pathway.rand == [None, pytest.approx(adjusted_rand_score(TRUTH[1], [0, 0, 1, 2, 3, 3]))]
    pruned = make(found=[FOUND[0], [-1, 0, 0, 0, 1, 1], *[[-1] * 6] * 3])
    assert agreement(pruned)[-1].kept == 5 / 6
    coarse_last = agreement(make(truth=TRUTH[::-1]))[-1]
    assert coarse_last.rand == pathway.rand[::-1]  # the finest is the one with most clusters, wherever it stands
    untrained = agreement(make(trained=2))
    assert [row.level for row in untrained] == ["global", "5", "pathway"]
    assert untrained[-1].models == 2  # 3 and 0; who has none has no pathway, and does not count
    assert untrained[-1].kept == 5 / 6
    assert untrained[-1].rand == [None, untrained[1].rand[1]]
    assert [row.level for row in agreement(make(trained=1))] == ["global"]
    head, names, *lines = describe(make()).splitlines()
    assert head == "femam, seed 3: 5 of 5 levels trained, 6 clients"
    assert names.split()[-10:] == ["ARI,", "2", "true", "groups", "ARI,", "3", "true", "groups", "best", "ARI"]
    assert lines[1].split() == ["2:", "5", "models", "2", "83%", "1.00", "0.55", "1.00"]
    assert len(set(map(len, [names, *lines]))) == 1


@pytest.mark.parametrize(
    "changes",
    [{"found": FOUND[:4]}, {"found": [[0] * 5, *FOUND[1:]]}, {"truth": [[0] * 7]}, {"truth": []}, {"truth": [1, 2]},
     {"trained": 6}, {"more": 1}],
)  # fmt: skip
def test_structure__damaged_files_are_refused(tmp_path, changes):
    make(trained=4).save(tmp_path)
    assert Structure.read(tmp_path) == make(trained=4)
    path = tmp_path / FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with fl_refused("file"):
        Structure.read(tmp_path)
    for text in (b"", b'{"algorithm": "femam"', b"[1, 2]", b"{}", b"\xff\xfe\x00"):
        path.write_bytes(text)
        with fl_refused("file"):
            Structure.read(tmp_path)


def panels(figure):
    """The cells [clients, levels] and black lines {(level, row)} of each panel."""
    result = []
    for axis in figure.axes:
        (image,) = axis.images
        lines = set()
        for collection in axis.collections:
            for (x0, y0), (x1, y1) in collection.get_segments():
                if y0 == y1:
                    assert x1 - x0 == 1
                    lines.add((int((x0 + x1) / 2), float(y0)))
        result.append((image.get_array().filled(-1), lines))
    return result


def test_structure__the_map_has_the_right_cells_and_boundaries():
    figure = structure_maps([make()])
    (truth, truth_lines), (found, lines) = panels(figure)
    assert truth.T.tolist() == TRUTH
    assert truth_lines == {(0, 3.5), (1, 1.5), (1, 3.5)}
    expected = [[ONE] * 6, [0, 0, 0, -1, 1, 1], [0, 0, 1, 1, 1, 1], [-1] * 6, [OWN, OWN, -1, -1, -1, OWN]]
    assert found.T.tolist() == expected  # models in order of appearance
    assert lines == {(2, 1.5)}  # on level 2 a pruned client lies between; each client has its own on the last
    left, right = figure.axes
    assert left.yaxis_inverted()
    assert left.get_ylim() == right.get_ylim() == (5.5, -0.5)
    labels = [text.get_text() for text in right.get_xticklabels()]
    assert labels[0] == "level 1\none for all"
    assert labels[1] == "level 2\n5 models\n83% of clients\nARI 1.00\nwith level 1"
    assert labels[2] == f"level 3\n5 models\nARI {adjusted_rand_score(TRUTH[1], FOUND[2]):.2f}\nwith level 2"
    assert labels[4] == "level 5\none each"
    assert [text.get_text() for text in left.get_xticklabels()] == ["level 1\n2 clusters", "level 2\n3 clusters"]


def test_structure__colours_differ_within_a_level_and_white_is_for_none():
    clients = 25
    one = make(levels=["25"], truth=[[0] * clients], found=[[*range(clients)]], trained=1)
    truth, found = structure_maps([one]).axes
    shown = found.images[0].to_rgba(found.images[0].get_array())[:, 0]
    assert len({tuple(color) for color in shown.tolist()}) == clients == len(CLUSTERS)
    assert not any((color[:3] > 0.97).all() for color in shown)
    assert truth.images[0].get_array().tolist() == [[ONE]] * clients
    each = structure_maps([dataclasses.replace(one, truth=[[*range(clients)]], found=[[-1] * clients])])
    assert each.axes[0].images[0].get_array().tolist() == [[OWN]] * clients
    assert panels(each)[0][1] == set()
    assert (each.axes[1].images[0].to_rgba(each.axes[1].images[0].get_array())[..., 3] == 0).all()  # blank
    found = structure_maps([make(trained=2)]).axes[1]
    assert found.images[0].get_array()[:, 2:].mask.all()
    assert [patch.get_x() for patch in found.patches if patch.get_hatch()] == [1.5, 2.5, 3.5]


def test_structure__several_runs_are_rows_and_not_too_many():
    fesem = Structure("fesem", ["2"], [[0, 0, 1, 1]], [[1, 1, 0, 1]], 1, 7, "other")
    figure = structure_maps([make(), make(seed=4, title="b"), fesem])
    titles = [axis.get_title() for axis in figure.axes]
    assert titles == ["truth", "femam, seed 3", "truth", "femam, seed 4", "truth", "fesem, seed 7"]
    assert [row.get_suptitle() for row in figure.subfigs] == ["a title", "b", "other"]
    assert panels(figure)[5][0].T.tolist() == [[0, 0, 1, 0]]
    index = adjusted_rand_score([0, 0, 1, 1], [1, 1, 0, 1])
    assert (
        figure.axes[5].get_xticklabels()[0].get_text() == f"level 1\n2 models\nARI {index:.2f}"
    )  # one level of truth has no name
    with pytest.raises(FLError, match=f"{MOST + 1} runs are too many .* at most {MOST}"):
        structure_maps([make()] * (MOST + 1))


@pytest.fixture
def runs(tmp_path):
    """A folder with two runs that leave a structure, and one that does not."""
    for seed in (0, 1):
        folder = tmp_path / "runs" / f"femam-seed{seed}"
        folder.mkdir(parents=True)
        make(seed=seed, title=folder.name).save(folder)
    (tmp_path / "runs" / "fedavg-seed0").mkdir()
    return tmp_path / "runs"


@pytest.mark.slow
@pytest.mark.drawn
def test_structure__the_command_draws_and_prints(runs, tmp_path, capsys, monkeypatch):
    out = tmp_path / "map.png"
    twice = [str(runs), str(runs / "fedavg-seed0" / ".." / "femam-seed1"), "--out", str(out)]
    assert structure.main(twice) == 0
    assert out.read_bytes().startswith(b"\x89PNG")
    text = capsys.readouterr().out
    assert text.count("levels trained") == 2  # a folder given twice is one run
    assert f"{runs / 'femam-seed0'}\nfemam, seed 0" in text
    assert text.endswith(f"\nfigure: {out}\n")
    assert structure.main([str(runs), "--out", str(tmp_path / "map.svg"), "--json"]) == 0
    tables = json.loads(capsys.readouterr().out)
    assert list(tables) == [str(runs / f"femam-seed{seed}") for seed in (0, 1)]
    level = tables[str(runs / "femam-seed0")][1]
    assert level == {"level": "5", "models": 2, "kept": 5 / 6, "rand": [1.0, pytest.approx(6 / 11)], "best": 1.0}
    assert "<svg" in (tmp_path / "map.svg").read_text()
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    assert structure.main([str(runs), "--json"]) == 0  # whose figure nobody asked for
    assert json.loads(capsys.readouterr().out) == tables
    assert sorted(tmp_path.iterdir()) == before


def test_structure__the_command_refuses_what_it_cannot_draw(runs, tmp_path, capsys):
    (tmp_path / "taken.png").touch()
    for folders, out, message in (
        ([runs], "taken.png", "exists already: choose another --out"),
        ([runs], "map.xyz", "not written as 'xyz'"),
        ([runs], "map", "does not say what the figure is written as"),
        ([], "map.png", "at least one run folder"),
        ([runs / "nowhere"], "taken.png", "does not exist"),
        ([runs, runs / "fedavg-seed0"], "map.png", "such as femam and fesem"),
    ):
        assert structure.main([*map(str, folders), "--out", str(tmp_path / out)]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    assert not (tmp_path / "map.png").exists()
