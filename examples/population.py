# SPDX-License-Identifier: Apache-2.0
"""Find a learning rate while training: four trials of two workers each, on one machine.

    python examples/population.py

Population based training lets all trials train for a while, and then the worse half go on from
the weights of the better half, with another learning rate. Needs `lockstep-train[tune]`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from small_digits import SmallDigits

import ray
from lockstep import TorchTrainer
from lockstep.keys import BATCH_SIZE
from ray import tune

RATES = [1e-4, 1e-3, 1e-2, 1e-1]


def tune_step(trainer, info):
    """One iteration of a trial: an epoch, and the learning rate that the workers really use."""
    trained = trainer.train()
    rates = trainer.apply_all_operators(learning_rate)
    return {**trainer.validate(), "epoch": trained["epoch"], "rate_in_use": rates[0]}


def learning_rate(operator):
    return operator.optimizer.param_groups[0]["lr"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=6)
    parser.add_argument("--storage", type=Path, default=Path("out/tune"))
    arguments = parser.parse_args()

    # Four trials of two workers and a driver: Ray counts CPUs, it does not need to have them.
    ray.init("local", num_cpus=12, include_dashboard=False, logging_level="ERROR")
    trainable = TorchTrainer.as_trainable(
        training_operator_cls=SmallDigits,
        num_workers=2,
        config={BATCH_SIZE: 64},
        override_tune_step=tune_step,
    )
    scheduler = tune.schedulers.PopulationBasedTraining(
        time_attr="training_iteration",  # by default it is seconds
        perturbation_interval=3,
        quantile_fraction=0.5,
        resample_probability=0.0,
        hyperparam_mutations={"lr": RATES},
        synch=True,
    )
    found = tune.Tuner(
        trainable,
        param_space={"lr": tune.grid_search(RATES)},
        tune_config=tune.TuneConfig(metric="val_accuracy", mode="max", scheduler=scheduler),
        run_config=tune.RunConfig(
            stop={"training_iteration": arguments.iterations},
            storage_path=str(arguments.storage.resolve()),
            verbose=0,
        ),
    ).fit()
    if found.num_errors:
        raise SystemExit(found.errors[0])
    print("learning rate: asked for  in use    validation accuracy  epochs")
    for result in found:
        metrics = result.metrics
        print(
            f"{result.config['lr']:24g}  {metrics['rate_in_use']:6g}"
            f"  {metrics['val_accuracy']:21.2%}  {metrics['epoch']:6}"
        )
    best = found.get_best_result()
    print(f"the best: lr={best.config['lr']:g}, {best.metrics['val_accuracy']:.2%}")


if __name__ == "__main__":
    main()
