# SPDX-License-Identifier: Apache-2.0
"""The first step in which two runs differ, and by what."""

import subprocess
import sys
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import TorchTrainer, TrainingOperator
from lockstep.cli import main
from lockstep.errors import ConfigurationError
from lockstep.trainer.logged_run import LoggedRun
from lockstep.trainer.run_bisection import ComparedRun, bisect_runs, capture_run

CONFIG = {
    "lr": 0.01,
    "momentum": 0.9,
    "init": 0,
    "spoiled": None,
    "noise": 0.3,
    "order": 0,
    "warm_from": 99,
}


class Tunable(TrainingOperator):
    """Each entry of the config changes one thing of the run."""

    def setup(self, config):
        torch.manual_seed(config["init"])
        model = nn.Sequential(
            nn.Linear(4, 16), nn.ReLU(), nn.Dropout(config["noise"]), nn.Linear(16, 1)
        )
        optimizer = torch.optim.SGD(
            model.parameters(), lr=config["lr"], momentum=config["momentum"]
        )
        self.model, self.optimizer, self.criterion, self.scheduler = self.register(
            models=model,
            optimizers=optimizer,
            criterion=nn.MSELoss(),
            schedulers=torch.optim.lr_scheduler.LambdaLR(
                optimizer, lambda step: 2.0 if step >= config["warm_from"] else 1.0
            ),
        )
        generator = torch.Generator().manual_seed(0)
        features = torch.randn(48, 4, generator=generator)
        targets = features.sum(dim=1, keepdim=True)
        if config["spoiled"] is not None:
            targets[config["spoiled"]] += 1
        order = torch.Generator().manual_seed(config["order"])
        self.register_data(
            train_loader=DataLoader(
                TensorDataset(features, targets), batch_size=4, shuffle=True, generator=order
            )
        )


class Coded(Tunable):
    """Another program: the same weights and data, another loss from step 7 on."""

    def compute_loss(self, batch, batch_info):
        loss = super().compute_loss(batch, batch_info)
        return loss * 1.001 if batch_info["global_step"] >= 6 else loss


def trained(folder, operator_cls=Tunable, *, epochs=2, seed=0, **config):
    with TorchTrainer(
        training_operator_cls=operator_cls,
        config=CONFIG | config,
        num_shards=2,
        seed=seed,
        reproducible=True,
        scheduler_step_freq="batch",
        checkpoint_dir=folder,
        checkpoint_every=4,
    ) as trainer:
        for _ in range(epochs):
            # Of the checkpoints that are due in a call the last is sure.
            trainer.train(num_steps=4)
            trainer.train()
    return ComparedRun(str(folder), captures(folder, operator_cls))


def captures(folder, operator_cls=Tunable, config=None):
    make_trainer = partial(TorchTrainer, training_operator_cls=operator_cls)
    return partial(capture_run, make_trainer, str(folder), config)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """12 steps, in two epochs."""
    return trained(tmp_path_factory.mktemp("run"))


def test_equal_runs_have_no_difference(run, tmp_path):
    report = bisect_runs(run, trained(tmp_path))
    assert report.step is None
    assert report.num_compared > 2 * 12
    assert (report.settings, report.notes) == ([], [])
    longer = bisect_runs(run, trained(tmp_path / "longer", epochs=3))
    assert (longer.step, longer.num_common) == (None, 12)


@pytest.mark.parametrize(
    ("changed", "step", "what"),
    [
        ({"lr": 0.02}, 1, "lr of group 0 of optimizer 0 (SGD)"),
        ({"momentum": 0.8}, 1, "momentum of group 0 of optimizer 0 (SGD)"),
        ({"warm_from": 5}, 6, "lr of group 0 of optimizer 0 (SGD)"),
        ({"init": 1}, 1, "the weights before it, in 0.weight"),
        ({"order": 1}, 1, "the samples of shard 0"),
        ({"seed": 1}, 1, "the samples of shard 0"),
    ],
)
def test_the_cause_is_named_at_its_step(run, tmp_path, changed, step, what):
    report = bisect_runs(run, trained(tmp_path, **changed))
    assert report.step == step, str(report)
    assert report.differences[0].what.startswith(what), str(report)
    assert any(next(iter(changed)) in name for name, _, _ in report.settings)
    assert report.notes == []


class TwoOptimizers(TrainingOperator):
    """Of one class, which differ in their learning rates."""

    def setup(self, config):
        torch.manual_seed(0)
        models = [nn.Linear(4, 2), nn.Linear(2, 1)]
        optimizers = [
            torch.optim.SGD(models[0].parameters(), lr=config["lr"]),
            torch.optim.SGD(models[1].parameters(), lr=0.01),
        ]
        self.models, self.optimizers = self.register(models=models, optimizers=optimizers)
        features = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
        self.register_data(train_loader=DataLoader(TensorDataset(features), 4))

    def train_batch(self, batch, batch_info):
        loss = self.models[1](self.models[0](batch[0])).square().mean()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
        return {"train_loss": loss.item()}


def test_two_optimizers_of_one_class_are_told_apart(tmp_path):
    runs = []
    for lr in (0.01, 0.02):
        folder = tmp_path / str(lr)
        with TorchTrainer(
            training_operator_cls=TwoOptimizers, config={"lr": lr}, checkpoint_dir=folder
        ) as trainer:
            trainer.train()
        runs.append(ComparedRun(str(folder), captures(folder, TwoOptimizers)))
    (difference,) = bisect_runs(*runs).differences
    assert difference.what == "lr of group 0 of optimizer 0 (SGD)"


def test_a_sample_with_other_content_is_found_where_it_is_read(run, tmp_path):
    report = bisect_runs(run, trained(tmp_path, spoiled=29))
    (difference,) = report.differences
    assert difference.what.startswith("the content of dataset[29], in shard")
    assert "dataset[29], in shard" in str(report)
    before = LoggedRun.read(tmp_path).steps[report.step].line["shards"]
    assert report.step <= 6, "in the first of two epochs"
    assert before != LoggedRun.read(run.folder).steps[report.step].line["shards"]


def test_another_program_is_told_from_its_results(run, tmp_path):
    report = bisect_runs(run, trained(tmp_path, Coded))
    assert report.step == 7
    assert report.differences[0].what.startswith("the bits of the loss of shard")
    assert ("operator", "Coded") in [(name, other[-5:]) for name, _, other in report.settings]


def test_where_a_run_cannot_be_computed_again_the_logs_alone_tell(run, tmp_path):
    def capture(steps):
        raise ConfigurationError("no such module", fix="--operator")

    other = ComparedRun(trained(tmp_path, warm_from=5).folder, capture)
    report = bisect_runs(run, other)
    assert report.step == 6
    assert report.differences[0].what == "the learning rates"
    assert report.notes == ["B was not computed again: no such module; --operator"]


def test_a_run_that_went_on_from_another_differs_where_it_does(run, tmp_path):
    """Its log begins with step 9, and the checkpoint in front of that is in the other directory."""
    with TorchTrainer(
        training_operator_cls=Tunable,
        config=CONFIG | {"warm_from": 10},
        num_shards=2,
        reproducible=True,
        scheduler_step_freq="batch",
        checkpoint_dir=tmp_path,
        resume=f"{run.folder}/step-0000000008.ckpt",
    ) as trainer:
        trainer.train(num_steps=4)
    report = bisect_runs(run, ComparedRun(str(tmp_path), captures(tmp_path)))
    assert (report.step, report.num_common) == (11, 4), str(report)
    assert report.differences[0].what == "the learning rates"
    assert "no checkpoint is left in front of this step" in report.notes[0]


def test_a_program_that_was_changed_since_is_said(run, tmp_path):
    other = trained(tmp_path, Coded)
    report = bisect_runs(run, ComparedRun(other.folder, captures(other.folder)))
    assert report.step == 7
    assert any("has not the bits of its log" in note for note in report.notes)


class Rounded(Tunable):
    """The same run with other bits, as of another number of workers."""

    def compute_loss(self, batch, batch_info):
        return super().compute_loss(batch, batch_info) * (1 + 1e-6)


@pytest.mark.parametrize(
    ("operator_cls", "config", "step", "what"),
    [
        (Tunable, {"warm_from": 6}, 7, "lr of group 0 of optimizer 0 (SGD)"),
        (Coded, {}, 7, "the bits of the loss of shard"),
    ],
)
def test_weights_that_are_not_the_runs_are_no_difference_of_the_runs(
    run, tmp_path, operator_cls, config, step, what
):
    other = trained(tmp_path, operator_cls, **config)
    report = bisect_runs(run, ComparedRun(other.folder, captures(other.folder, Rounded)))
    assert report.step == step, str(report)
    assert report.differences[0].what.startswith(what), str(report)
    assert any("B has not the bits of its log" in note for note in report.notes)


@pytest.mark.slow
def test_from_the_command_line(run, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "")  # and put back, whatever the command adds
    other = trained(tmp_path, momentum=0.8)
    name = f"{__file__}:Tunable"
    assert main(["bisect", run.folder, run.folder, "--operator", name]) == 0
    assert "no difference in 12 steps" in capsys.readouterr().out
    assert main(["bisect", run.folder, other.folder, "--operator", name]) == 65
    said = capsys.readouterr().out
    assert "they differ from step 1 on" in said
    assert "momentum of group 0 of optimizer 0 (SGD): 0.9 in A, 0.8 in B" in said
    assert "config momentum: 0.9 in A, 0.8 in B" in said
    assert main(["bisect", run.folder, str(tmp_path / "none"), "--operator", name]) == 2


PROGRAM = """
import torch
from lockstep import TorchTrainer, TrainingOperator

class Line(TrainingOperator):
    def setup(self, config):
        model = torch.nn.Linear(2, 1)
        self.register(
            models=model,
            optimizers=torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=DECAY),
            criterion=torch.nn.MSELoss(),
        )
        x = torch.randn(16, 2, generator=torch.Generator().manual_seed(0))
        data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
        self.register_data(train_loader=torch.utils.data.DataLoader(data, batch_size=4))

if __name__ == "__main__":
    with TorchTrainer(training_operator_cls=Line, checkpoint_dir="run") as trainer:
        trainer.train()
"""


@pytest.mark.slow
def test_two_checkouts_of_one_program(tmp_path):
    """Their modules have one name, and one folder's name begins with the other's."""
    for folder, decay in (("line", "0.0"), ("line-new", "0.1")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "line.py").write_text(PROGRAM.replace("DECAY", decay))
        subprocess.run([sys.executable, "line.py"], cwd=tmp_path / folder, check=True)
    command = [sys.executable, "-m", "lockstep.cli", "bisect", "line/run", "line-new/run"]
    done = subprocess.run(command, cwd=tmp_path, text=True, capture_output=True, check=False)
    assert done.returncode == 65, done.stderr
    assert "they differ from step 1 on" in done.stdout
    assert "weight_decay of group 0 of optimizer 0 (SGD): 0.0 in A, 0.1 in B" in done.stdout
    assert "note" not in done.stdout


@pytest.mark.parametrize("run", ["checkpoint.pt", "no/such/folder"])
@pytest.mark.parametrize("command", ["replay", "bisect"])
def test_what_is_no_folder_of_a_run_is_told(tmp_path, capsys, command, run):
    (tmp_path / "checkpoint.pt").touch()
    path = str(tmp_path / run)
    options = ["--step=3"] if command == "replay" else [path]
    assert main([command, path, *options]) == 2
    said = capsys.readouterr().err
    assert "this directory has no log of a run" in said
    assert path in said
