# SPDX-License-Identifier: Apache-2.0
"""A step of a run computed again in one process, from the run's log and checkpoints alone."""

import json
import logging
import os
import runpy
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import TorchTrainer, TrainingOperator
from lockstep.cli import main
from lockstep.errors import CheckpointError, ConfigurationError
from lockstep.trainer.logged_run import LoggedRun
from lockstep.trainer.step_replay import replay_run, trainer_maker

STEPS_IN_EPOCH = 4


class Noisy(TrainingOperator):
    """Dropout, batch norm, a schedule: all that a replay has to bring back."""

    def setup(self, config):
        features = torch.randn(64, 6, generator=torch.Generator().manual_seed(0))
        model = nn.Sequential(
            nn.Linear(6, 40), nn.BatchNorm1d(40), nn.ReLU(), nn.Dropout(0.3), nn.Linear(40, 2)
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
        self.model, self.optimizer, self.criterion, self.scheduler = self.register(
            models=model,
            optimizers=optimizer,
            criterion=nn.CrossEntropyLoss(),
            schedulers=torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9),
        )
        data = TensorDataset(features, (features.sum(dim=1) > 0).long())
        self.register_data(train_loader=DataLoader(data, batch_size=4, shuffle=True))


class Corrupted(Noisy):
    """The loss of shard 2 is another one at the step that the config names."""

    def compute_loss(self, batch, batch_info):
        loss = super().compute_loss(batch, batch_info)
        self.calls = getattr(self, "calls", -1) + 1
        is_it = self.global_step + 1 == self.config["bad"] and self.calls % 4 == 2
        return loss * (1 + 1e-6) if is_it else loss


def trained(folder, operator_cls=Noisy, epochs=3, **arguments):
    arguments = {"checkpoint_every": 5, "num_shards": 4, "reproducible": True} | arguments
    config = {"lr": 0.01, "betas": (0.9, 0.99), **arguments.pop("config", {})}
    with TorchTrainer(
        training_operator_cls=operator_cls,
        config=config,
        scheduler_step_freq="batch",
        checkpoint_dir=folder,
        **arguments,
    ) as trainer:
        for _ in range(epochs):
            trainer.train()
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("run"))


def replayed(folder, step, operator_cls=Noisy, **arguments):
    make_trainer = trainer_maker(TorchTrainer, operator_cls)
    return replay_run(make_trainer, folder=folder, step=step, **arguments)


@pytest.mark.parametrize("step", range(1, 3 * STEPS_IN_EPOCH + 1))
def test_each_step_has_the_bits_of_the_log(run, step):
    report = replayed(run, step)
    assert report.same_bits, str(report)
    assert report.at == divmod(step - 1, STEPS_IN_EPOCH)
    assert report.num_computed == step - (step - 1) // 5 * 5
    assert (report.start is None) == (step <= 5)


def test_a_loss_that_differs_is_named_with_its_step_and_shard(tmp_path):
    folder = trained(tmp_path, Corrupted, config={"bad": 7})
    report = replayed(folder, 9, Corrupted, config={"lr": 0.01, "bad": -1})
    assert not report.same_bits
    first = report.differences[0]
    assert first.step == 7
    assert "shard 2" in first.what
    assert replayed(folder, 6, Corrupted, config={"lr": 0.01, "bad": -1}).same_bits


def test_a_changed_learning_rate_is_seen_at_its_step_and_in_the_weights(run):
    report = replayed(run, 2, config={"lr": 0.02})
    assert report.differences[0].what == "the learning rates"
    assert any("the weights" in each.what for each in report.differences)


class OwnLoop(Noisy):
    """No loss of a shard is known, and only few parts of its weights are not empty."""

    def setup(self, config):
        model = nn.Linear(6, 2, bias=False)
        self.model, self.optimizer = self.register(
            models=model, optimizers=Unrated(model.parameters())
        )
        data = TensorDataset(torch.randn(64, 6, generator=torch.Generator().manual_seed(0)))
        self.register_data(train_loader=DataLoader(data, batch_size=4))

    def train_batch(self, batch, batch_info):
        loss = self.model(batch[0]).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return {"train_loss": "a name, and no number", "loss": loss.item()}


class Unrated(torch.optim.Optimizer):
    """Its groups have no learning rate."""

    def __init__(self, params):
        super().__init__(params, {"size": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                param -= group["size"] * param.grad


def test_what_was_not_compared_is_not_called_the_same(tmp_path):
    folder = trained(tmp_path, OwnLoop, epochs=2, reproducible=False, checkpoint_every=12)
    with pytest.raises(ConfigurationError, match="no such shard"):
        replayed(folder, 8, OwnLoop, shard=4)
    compared = replayed(folder, 5, OwnLoop)
    assert compared.same_bits
    assert compared.num_compared == 5
    # 48 bytes are parts 0 to 5; step 64 would take part 0.
    assert replayed(folder, 8, OwnLoop).same_bits is None
    assert replayed(folder, 5, OwnLoop, shard=0).same_bits is None
    lines = (folder / "run.jsonl").read_text().splitlines()
    bare = [
        json.dumps({**json.loads(line), **({"w": []} if "step" in line[:7] else {})})
        for line in lines
    ]
    (folder / "run.jsonl").write_text("\n".join(bare) + "\n")
    report = replayed(folder, 8, OwnLoop)
    assert report.same_bits is None
    assert report.num_means > 0
    assert "bits are not known" in str(report)


class ByHand(OwnLoop):
    """Steps with the gradients of four batches; each second window begins in another epoch."""

    def setup(self, config):
        model = nn.Linear(6, 40)
        self.model, self.optimizer = self.register(
            models=model, optimizers=torch.optim.SGD(model.parameters(), lr=0.1)
        )
        data = TensorDataset(torch.randn(40, 6, generator=torch.Generator().manual_seed(0)))
        self.register_data(train_loader=DataLoader(data, batch_size=1))

    def train_batch(self, batch, batch_info):
        number = batch_info["global_step"]
        if number % 4 == 0:
            self.optimizer.zero_grad()
        loss = self.model(batch[0]).square().mean()
        (loss / 4).backward()
        if number % 4 == 3:
            self.optimizer.step()
        return {"train_loss": loss.item()}


def test_a_window_by_hand_is_computed_to_its_end(tmp_path):
    folder = trained(tmp_path, ByHand, epochs=2, reproducible=False, checkpoint_every=100)
    report = replayed(folder, 6, ByHand)
    assert report.same_bits
    assert report.num_compared == 8  # and not the four of the first window
    report = replayed(folder, 10, ByHand)
    assert report.same_bits is None
    assert "step 10 left gradients that no optimizer used" in str(report)


class ManyShards(Noisy):
    def setup(self, config):
        model = nn.Linear(6, 2)
        self.register(
            models=model,
            optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
            criterion=nn.MSELoss(),
            schedulers=None,
        )
        features = torch.randn(34, 6, generator=torch.Generator().manual_seed(0))
        data = TensorDataset(features, features[:, :2])
        self.register_data(train_loader=DataLoader(data, batch_size=1))


def test_a_shard_whose_losses_the_log_has_not_is_not_called_the_same(tmp_path):
    folder = trained(tmp_path, ManyShards, epochs=1, num_shards=17)
    assert replayed(folder, 2, ManyShards, shard=15).same_bits
    report = replayed(folder, 2, ManyShards, shard=16)
    assert report.same_bits is None
    assert "no hash of the loss of shard 16" in str(report)


def test_a_key_of_the_config_that_is_no_literal_has_to_be_given(tmp_path):
    folder = trained(tmp_path, epochs=1, config={"dtype": torch.float32})
    with pytest.raises(ConfigurationError, match="no dtype"):
        replayed(folder, 2)
    assert replayed(folder, 2, config={"dtype": torch.float32}).same_bits


class InDDP(TrainingOperator):
    def setup(self, config):
        model = nn.Linear(6, 2)
        self.model, self.optimizer, self.criterion = self.register(
            models=model,
            optimizers=torch.optim.SGD(model.parameters(), lr=config["lr"]),
            criterion=nn.CrossEntropyLoss(),
            ddp_args={"gradient_as_bucket_view": True},
        )
        self.register_data(train_loader=DataLoader(labelled(), batch_size=4))


def test_arguments_of_ddp_are_none_of_one_process(tmp_path):
    folder = trained(tmp_path, InDDP, epochs=1, sync="ddp", reproducible=False)
    assert replayed(folder, 3, InDDP).same_bits


def labelled():
    features = torch.randn(64, 6, generator=torch.Generator().manual_seed(0))
    return TensorDataset(features, (features.sum(dim=1) > 0).long())


def test_a_model_of_ones_own_stays_where_the_run_is(tmp_path):
    weights = []
    for name in ("replayed", "left alone"):
        model = nn.Linear(6, 2)
        nn.init.constant_(model.weight, 0.1)
        nn.init.constant_(model.bias, 0)
        operator_cls = TrainingOperator.from_model(
            model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            criterion=nn.CrossEntropyLoss(),
            train_loader=DataLoader(labelled(), batch_size=4),
        )
        with TorchTrainer(
            training_operator_cls=operator_cls, checkpoint_dir=tmp_path / name, checkpoint_every=2
        ) as trainer:
            for num_steps in (3, 2):  # of the checkpoints that are due in a call the last is sure
                trainer.train(num_steps)
            if name == "replayed":
                assert trainer.replay(4).same_bits
                with pytest.raises(CheckpointError, match="the first weights are gone"):
                    trainer.replay(1)
            trainer.train(num_steps=5)
        weights.append(model.weight.detach())
    assert weights[0].equal(weights[1])


class Nested(Noisy):
    def setup(self, config):
        super().setup({"lr": config["model"]["lr"] * config["model"]["scale"]})


def test_a_setting_within_a_mapping_leaves_the_rest_of_it(tmp_path):
    folder = trained(tmp_path, Nested, epochs=1, config={"model": {"lr": 0.01, "scale": 2}})
    assert replayed(folder, 2, Nested, config={"model": {"lr": 0.01}}).same_bits
    report = replayed(folder, 2, Nested, config={"model": {"lr": 0.02}})
    assert report.differences[0].what == "the learning rates"


def test_what_a_replay_will_need_is_said_before_the_run(tmp_path, caplog):
    class InNoFile(Noisy):
        pass

    with caplog.at_level(logging.INFO, "lockstep.run_log"):
        trained(tmp_path / "one", epochs=1)
        assert "a replay" not in caplog.text
        trained(tmp_path / "two", InNoFile, epochs=1, config={"dtype": torch.float32})
    assert "needs --operator FILE:CLASS" in caplog.text
    assert "needs --set for dtype" in caplog.text


def test_what_a_program_has_changed_in_between_is_said(tmp_path):
    with TorchTrainer(
        training_operator_cls=Noisy,
        config={"lr": 0.01},
        checkpoint_dir=tmp_path,
        scheduler_step_freq="batch",
    ) as trainer:
        trainer.train(num_steps=2)
        trainer.apply_all_operators(_halve)
        trainer.train(num_steps=2)
    assert replayed(tmp_path, 2).same_bits
    report = replayed(tmp_path, 3)
    assert not report.same_bits
    assert any("apply_all_operators" in reason for reason in report.reasons)


def _halve(operator):
    with torch.no_grad():
        for parameter in operator.model.parameters():
            parameter.mul_(0.5)


def test_steps_behind_a_state_of_another_run_are_computed_with_its_seed_and_its_shards(tmp_path):
    other = trained(tmp_path / "other", epochs=2, seed=7)
    folder = tmp_path / "run"
    with TorchTrainer(
        training_operator_cls=Noisy,
        config={"lr": 0.01},
        checkpoint_dir=folder,
        checkpoint_every=3,
        scheduler_step_freq="batch",
        reproducible=True,
    ) as trainer:
        trainer.load(other / "step-0000000005.ckpt")
        for num_steps in (2, 3):
            trainer.train(num_steps)
        assert trainer.replay(8).same_bits
    assert replayed(folder, 8, shard=3).same_bits
    assert LoggedRun.read(folder).program_of(8)["arguments"]["seed"] == 7
    with pytest.raises(CheckpointError, match="no checkpoint is left") as caught:
        replayed(folder, 6)
    assert "went on from step 5 of another one" in str(caught.value)


def test_a_log_that_a_kill_has_torn_is_read_and_gone_on_with(tmp_path):
    folder = trained(tmp_path / "torn", epochs=2)
    log = folder / "run.jsonl"
    whole = log.read_bytes()
    ends = [i for i, byte in enumerate(whole) if byte == ord("\n")]
    log.write_bytes(whole[: ends[-1] - 20])  # the last step's line
    with pytest.raises(ConfigurationError, match="does not know this step"):
        replayed(folder, 8)
    assert replayed(folder, 7).same_bits
    trained(folder, epochs=2, resume="auto")  # from step 5
    assert [each["from"] for each in LoggedRun.read(folder).programs] == [0, 5]
    assert [replayed(folder, step).same_bits for step in (5, 6, 8, 12)] == [True] * 4
    # Steps of one program stand around a step.
    assert LoggedRun.read(folder).steps_around(7, 3) == range(6, 11)
    assert LoggedRun.read(folder).steps_around(5, 3) == range(2, 6)


def test_steps_of_an_abandoned_continuation_are_not_the_runs(tmp_path):
    folder = trained(tmp_path, epochs=2, checkpoint_every=5)
    assert 7 in LoggedRun.read(folder).steps
    (folder / "step-0000000008.ckpt").unlink(missing_ok=True)
    with TorchTrainer(
        training_operator_cls=Noisy,
        config={"lr": 0.01},
        checkpoint_dir=folder,
        resume="auto",
        scheduler_step_freq="batch",
        reproducible=True,
    ) as trainer:
        trainer.train(num_steps=1)
    assert sorted(LoggedRun.read(folder).steps) == [1, 2, 3, 4, 5, 6]


def test_a_line_stays_below_200_bytes_beside_a_rate_that_changes(run):
    lines = [
        line for line in (run / "run.jsonl").read_bytes().splitlines() if b'"step"' in line[:7]
    ]
    plain = [line for line in lines if len(json.loads(line)["w"]) == 1]
    assert len(plain) > 5
    assert max(map(len, plain)) <= 200


def test_a_directory_without_a_log_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="no log"):
        replayed(tmp_path, 1)


PROGRAM = """
import sys, torch
from lockstep import TorchTrainer, TrainingOperator

class Line(TrainingOperator):
    def setup(self, config):
        model = torch.nn.Linear(2, 1)
        self.model, self.optimizer, self.criterion = self.register(
            models=model,
            optimizers=torch.optim.SGD(model.parameters(), lr=config["lr"]),
            criterion=torch.nn.MSELoss(),
        )
        x = torch.randn(16, 2, generator=torch.Generator().manual_seed(0))
        data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
        self.register_data(train_loader=torch.utils.data.DataLoader(data, batch_size=4))

    def compute_loss(self, batch, batch_info):
        x, y = batch
        return self.criterion(self.model(x), y)

if __name__ == "__main__":
    with TorchTrainer(
        training_operator_cls=Line, config={"lr": 0.1}, checkpoint_dir="run", checkpoint_every=2
    ) as trainer:
        trainer.train()
"""


@pytest.mark.slow
def test_from_the_command_line(tmp_path):
    """Thirteen processes, each of which imports torch."""
    (tmp_path / "line.py").write_text(PROGRAM)
    in_folder = {"cwd": tmp_path, "text": True, "capture_output": True, "check": False}
    subprocess.run([sys.executable, "line.py"], **in_folder)

    def replay(*words, typed=""):
        command = [sys.executable, "-m", "lockstep.cli", "replay", "run", *words]
        return subprocess.run(command, **in_folder, input=typed)

    same = replay("--step", "4")
    assert (same.returncode, same.stderr) == (0, "")
    assert "step-0000000002.ckpt: 2 steps" in same.stdout
    assert "same bits" in same.stdout
    assert replay("--step", "1", "--set", "lr=0.2").returncode == 65
    assert replay("--step", "9").returncode == 2
    assert replay("--step", "3", "--pdb", typed="quit\n").returncode == 130
    stopped = replay("--step", "3", "--pdb", typed="n\np batch_info['global_step']\nc\n")
    assert "x, y = batch" in stopped.stdout
    assert "(Pdb) 2\n" in stopped.stdout
    assert (stopped.returncode, "same bits" in stopped.stdout) == (0, True)
    around = replay("--step", "3", "--around", "1", "--html", "around.html")
    assert around.returncode == 0, around.stderr
    assert "samples of step 3, each by itself" in around.stdout
    assert "<h2>The samples of step 3" in (tmp_path / "around.html").read_text()
    for wrong in (["--html", "none/around.html"], ["--pdb", "--around", "2"], ["--html", "."]):
        assert replay("--step", "3", *wrong).returncode == 2
    line = 1 + PROGRAM.splitlines().index("        return self.criterion(self.model(x), y)")
    stopped = replay("--step", "3", "--breakpoint", f"line.py:{line}", typed="p x.shape\nc\n")
    assert "torch.Size([4, 2])" in stopped.stdout
    assert stopped.returncode == 0
    (tmp_path / "line.py").rename(tmp_path / "moved.py")
    gone = replay("--step", "4")
    assert gone.returncode == 2
    assert "--operator path/to/file.py:Operator" in gone.stderr
    assert replay("--step", "4", "--operator", "moved.py:Line").returncode == 0


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The current folder, whose modules can be imported; the path is put back afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_a_program_that_was_run_as_a_module_is_imported_from_its_package(here, capsys):
    (here / "in_package").mkdir()
    (here / "in_package" / "sizes.py").write_text("RATE = 0.1")
    program = PROGRAM.replace('{"lr": 0.1}', '{"lr": RATE}')
    (here / "in_package" / "line.py").write_text(f"from .sizes import RATE\n{program}")
    runpy.run_module("in_package.line", run_name="__main__", alter_sys=True)
    assert LoggedRun.read("run").programs[0]["operator"] == "in_package.line:Line"
    assert main(["replay", "run", "--step", "3"]) == 0
    assert "same bits" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("hook", "code", "said"),
    [
        ("prepare", 0, "same bits"),
        ("lambda: prepare()", 65, "note: the run had an initialization_hook that is not called"),
    ],
)
def test_the_hook_of_a_run_is_called_before_its_replay(here, capsys, hook, code, said):
    program = PROGRAM.replace("class", "SCALE = []\ndef prepare(): SCALE.append(2.0)\n\nclass", 1)
    program = program.replace("return self.", "return (SCALE or [1.0])[0] * self.")
    program = program.replace("checkpoint_dir", f"initialization_hook={hook}, checkpoint_dir")
    (here / f"hooked_{code}.py").write_text(program)
    runpy.run_path(f"hooked_{code}.py", run_name="__main__")
    assert main(["replay", "run", "--step", "3"]) == code
    assert said in capsys.readouterr().out


def test_loaders_that_each_worker_read_alone_need_as_many_workers(tmp_path):
    folder = trained(tmp_path, epochs=1, num_shards=1, add_dist_sampler=False)
    log = folder / "run.jsonl"
    log.write_text(log.read_text().replace('"num_shards":1', '"num_shards":2'))
    with pytest.raises(ConfigurationError, match=r"lockstep replay --workers 2`"):
        replayed(folder, 2)


@pytest.mark.slow
def test_a_program_that_trains_when_it_is_imported_is_refused(tmp_path):
    (tmp_path / "line.py").write_text(PROGRAM.replace('if __name__ == "__main__":', "if True:"))
    here = {"cwd": tmp_path, "text": True, "capture_output": True, "check": False}
    for each in (["line.py"], ["-m", "lockstep.cli", "replay", "run", "--step", "2"]):
        ended = subprocess.run([sys.executable, *each], **here)
    assert (ended.returncode, "trains as soon as it is imported" in ended.stderr) == (2, True)
