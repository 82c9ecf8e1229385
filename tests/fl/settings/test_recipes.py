"""Recipes can be run and say how, and what they say of themselves is shown."""

import re
import shlex

import pytest
from refusals import fl_refused

from benchmarks.papers import find
from fl import run as cli
from fl.settings import Config, Experiment
from fl.settings.recipes import RECIPES, describe, overview


@pytest.mark.parametrize("name", RECIPES)
def test_recipes__every_recipe_can_be_run_and_says_how(name):
    experiment, text = RECIPES[name](), describe(RECIPES[name])
    experiment.check()
    assert Experiment.from_yaml(experiment.to_yaml()).runs() == [one.as_read() for one in experiment.runs()]
    assert max(map(len, text.splitlines())) <= 120
    commands = re.findall(r"^ *python -m fl\.run (\S+)(.*)$", text, re.MULTILINE)
    assert commands[0] == (name, "")
    for recipe, flags in commands[1:]:
        assert recipe == name
        cli.parse([recipe, *shlex.split(flags)]).experiment.check()


def test_recipes__help_lists_the_recipes_and_describes_one(capsys):
    assert overview().keys() == RECIPES.keys()
    for argv in (["--help"], ["femam", "--help"]):
        with pytest.raises(SystemExit, match="0"):
            cli.main(argv)
        printed = " ".join(capsys.readouterr().out.split())
        assert ("climbs a stair" in printed) == ("femam" in argv)
        assert all(line in printed for line in overview().values()) == ("femam" not in argv)


def test_recipes__of_ones_own_are_taken_in_their_place():
    def mine():
        """Mine, without flags."""
        return Experiment.of(rounds=7)

    found = cli.parse(["mine", "--lr", "0.5"], {"mine": mine}).one_run()
    assert found == Config.of(rounds=7, lr=0.5)
    with fl_refused("name", "'digits'"):
        cli.parse(["digits"], {"mine": mine})


def test_recipes__cifar10_has_the_settings_of_the_runs_whose_accuracy_it_names():
    cell = find("fedmr.table1.cifar10.lenet.dir0.5")
    for method in ("fedavg", "fedmr"):
        run = cell.arm(method).experiment.replace(seeds=0).to_yaml()
        assert RECIPES["cifar10"]().replace(algorithms=method).to_yaml() == run


@pytest.mark.parametrize("name", RECIPES)
def test_recipes__settings_print_as_what_makes_them(name):
    experiment = RECIPES[name]()
    assert eval(repr(experiment)) == experiment
    for config in experiment.runs()[:2]:
        assert eval(repr(config)) == config
