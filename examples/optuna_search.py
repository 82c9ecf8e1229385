"""A search with Optuna that stops trials by their validation loss: `python examples/optuna_search.py`."""

import optuna

import fl

BASE = {"algorithm": "fedavg", "rounds": 10, "local_epochs": 1, "local_valid": 0.2}
DATA = fl.Config().load()


def objective(trial: optuna.Trial) -> float:
    lr = trial.suggest_float("lr", 1e-3, 0.3, log=True)
    width = trial.suggest_categorical("width", [0.25, 0.5, 1.0])
    config = fl.Config.of(**BASE, lr=lr, width=width)
    for round in fl.Run(config, f"runs/optuna/trial{trial.number}", dataset=DATA):
        trial.report(round.row["local_valid_loss"], round.number)
        if trial.should_prune():
            raise optuna.TrialPruned  # its checkpoint is written: the run could go on
    return round.row["local_valid_loss"]


study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0), pruner=optuna.pruners.MedianPruner(3, 2))
study.optimize(objective, n_trials=10)
print(study.best_params, fl.results(f"runs/optuna/trial{study.best_trial.number}"), sep="\n")
