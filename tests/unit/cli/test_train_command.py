# SPDX-License-Identifier: Apache-2.0
"""``lockstep train`` with one worker: config, errors, output, the dry run."""

import argparse
import csv
import inspect
import json
import os
import re
import resource
import subprocess
import sys
import textwrap

import pytest

from lockstep import TorchTrainer
from lockstep.cli import main
from lockstep.cli.fix_hints import with_cli_options
from lockstep.cli.operator_config import load_config, parse_value
from lockstep.cli.train_options import TRAINER_OPTIONS, add_arguments
from lockstep.errors import ConfigurationError
from lockstep.keys import BATCH_SIZE

PROGRAM = textwrap.dedent('''
    """A module as users have it."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    from lockstep import TrainingOperator
    from lockstep.errors import ConfigurationError
    from lockstep.keys import BATCH_SIZE

    class Line(TrainingOperator):
        """A straight line."""
        def setup(self, config):
            torch.manual_seed(0)
            model = nn.Linear(1, 1)
            x = torch.linspace(0, 1, 20).unsqueeze(1)
            self.register(
                models=model,
                optimizers=torch.optim.SGD(model.parameters(), lr=config["lr"]),
                criterion=nn.MSELoss(),
            )
            loader = DataLoader(TensorDataset(x, 2 * x + 1), config.get(BATCH_SIZE, 8))
            self.register_data(train_loader=loader, validation_loader=loader)

    class Wrong(Line):
        def train_batch(self, batch, batch_info):
            raise LookupError("mine")

    class NeedsBatchSize(Line):
        def setup(self, config):
            super().setup({**config, BATCH_SIZE: config[BATCH_SIZE]})

    class Unknown(Line):
        def setup(self, config):
            {"sgd": torch.optim.SGD}[config["optimizer"]]

    class Empty(Line):
        def setup(self, config):
            super().setup({**config, BATCH_SIZE: 32})
            self.register_data(train_loader=DataLoader(torch.ones(1, 2), 8, drop_last=True))

    class Misused(Line):
        def setup(self, config):
            raise ConfigurationError("this was misused")

    class NoLoss(Line):
        def compute_loss(self, batch, batch_info):
            return "a loss"

    class Several(Line):
        def setup(self, config):
            raise KeyError(["lr", "decay"])

    not_an_operator = 3
    ''')


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with the module, as the current one; imports are forgotten afterwards."""
    (tmp_path / "straight.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    path = list(sys.path)
    yield tmp_path
    sys.path[:] = path
    sys.modules.pop("straight", None)


def lockstep(*arguments):
    return main(["train", *arguments])


def test_trains_and_prints_a_line_an_epoch(here, capsys):
    (here / "config.yaml").write_text("lr: 1e-1\n")
    code = lockstep(
        "straight:Line",
        "--epochs=2",
        "--config=config.yaml",
        "--batch-size=10",
        "--save=out.pt",
        "--log=log.csv",
    )
    shown = capsys.readouterr().out.splitlines()
    assert code == 0
    assert shown[0].startswith("epoch   1  20 samples in 2 steps  train_loss ")
    assert "val_loss" in shown[1]
    assert shown[2] == "saved out.pt"
    assert (here / "out.pt").is_file()
    with (here / "log.csv").open(newline="") as file:
        assert [row["phase"] for row in csv.DictReader(file)] == ["train", "validation"] * 2


def test_a_run_whose_newest_checkpoint_ends_an_epoch_has_that_epoch(here, capsys):
    same = ("straight:Line", "--set=lr=0.1", "--batch-size=4", "--checkpoint-dir=run")
    same += ("--checkpoint-every=5", "--resume=auto")
    assert lockstep(*same, "--epochs=2") == 0
    assert "epoch   2  20 samples in 5 steps" in capsys.readouterr().out
    assert lockstep(*same, "--epochs=2") == 0
    assert capsys.readouterr().out == "the run has its 2 epochs already\n"
    assert lockstep(*same, "--epochs=3") == 0
    assert capsys.readouterr().out.startswith("epoch   3  20 samples in 5 steps")


@pytest.mark.parametrize(("full_in", "every", "code"), [(2, 3, 0), (3, 3, 1), (2, 6, 1)])
def test_a_full_disk_ends_no_run(here, capsys, full_in, every, code):
    """In one epoch of three steps no file may grow as large as a checkpoint."""
    path = here / "straight.py"
    path.write_text(f"""{path.read_text()}
import resource
class Full(Line):
    def train_epoch(self, iterator, info):
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        room = 1000 if info["epoch_idx"] == {full_in - 1} else hard
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
        return super().train_epoch(iterator, info)
""")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        ended = lockstep(
            *("straight:Full", "--set=lr=0.1", "--checkpoint-dir=run"),
            *("--epochs=3", f"--checkpoint-every={every}"),
        )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    shown = capsys.readouterr()
    assert re.findall(r"^epoch +(\d)", shown.out, re.MULTILINE) == ["1", "2", "3"]
    assert "could not be written" in shown.err
    assert ended == code


def test_a_dry_run_says_what_would_run_and_writes_nothing(here, capsys):
    code = lockstep(
        "straight.py:Line", "--set=lr=0.1", "--checkpoint-dir=runs", "--epochs=3", "--dry-run"
    )
    shown = capsys.readouterr().out
    assert code == 0
    assert "operator          straight:Line\n" in shown
    assert "train             3 steps an epoch" in shown
    assert f"process {os.getpid()}, cpu, shard 0 of 1" in shown
    assert "checkpoint dir    runs" in shown
    assert "1 worker against one process: equal" in shown
    assert shown.endswith("nothing was trained or saved\n")
    assert not (here / "runs").exists()


@pytest.mark.parametrize(
    ("operator", "said"),
    [
        ("straight", "MODULE:OPERATOR"),
        ("straigth:Line", "there is no module straigth"),
        ("missing.py:Line", "there is no such file"),
        ("straight:Lime", "did you mean straight:Line?"),
        ("straight:Lime", "one of Empty, Line, Misused, NeedsBatchSize, NoLoss, Several, "),
        ("straight:not_an_operator", "not_an_operator is no TrainingOperator"),
        (".straight:Line", "MODULE:OPERATOR"),
    ],
)
def test_an_operator_that_is_not_there(here, capsys, operator, said):
    assert lockstep(operator) == 2
    assert said in capsys.readouterr().err


def test_a_part_of_a_package_is_named_with_it(here, capsys):
    (here / "package").mkdir()
    (here / "package" / "partial_line.py").write_text("from .other import Line")
    (here / "package" / "other.py").write_text(PROGRAM)
    assert lockstep("package/partial_line.py:Line") == 2
    assert "package.module:Operator" in capsys.readouterr().err
    assert lockstep("package.partial_line:Line", "--set=lr=0.1") == 0


@pytest.mark.parametrize("name", ["straight.py", "operator.py", "sys.py"])
def test_a_file_is_not_taken_for_another_module_of_its_name(here, capsys, name):
    for folder in ("first", "second"):
        (here / folder).mkdir()
        (here / folder / name).write_text(PROGRAM)
    sys.path[:0] = [str(here / "first"), str(here / "second")]
    assert lockstep(f"second/{name}:Line", "--set=lr=0.1") == 2
    said = capsys.readouterr().err
    assert "is hidden by another module of its name" in said
    assert f"expected {here.resolve()}/second/{name}\n" in said
    if name == "straight.py":
        assert f"{here}/first/{name}" in said
        sys.modules.pop("straight")
        assert lockstep(f"first/{name}:Line", "--set=lr=0.1") == 0


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("c.yaml", "- 1\n", "holds no mapping"),
        ("c.yaml", "a: [\n", "is not YAML"),
        ("c.json", "{", "is not JSON"),
        ("c.toml", "a = ", "is not TOML"),
        ("c.ini", "", "of no known kind"),
        ("c.yml", None, "cannot be read"),
        ("c.json", "\u00ff", "not text in UTF-8"),
    ],
)
def test_a_config_that_is_none(here, capsys, name, text, said):
    if text is not None:
        (here / name).write_text(text, encoding="latin-1")
    assert lockstep("straight:Line", f"--config={name}") == 2
    assert said in capsys.readouterr().err


def test_errors_of_the_trainer_and_of_the_user(here, capsys):
    assert lockstep("straight:Line", "--set=lr=0.1", "--num-workers=2", "--num-shards=1") == 2
    assert "num_shards cannot be 1" in capsys.readouterr().err
    with pytest.raises(LookupError, match="mine"):
        lockstep("straight:Wrong", "--set=lr=0.1")
    with pytest.raises(KeyError) as caught:
        lockstep("straight:Line")
    assert "--set lr=..." in "\n".join(caught.value.__notes__)
    with pytest.raises(KeyError) as caught:
        lockstep("straight:NeedsBatchSize", "--set=lr=0.1")
    assert "--batch-size 64" in "\n".join(caught.value.__notes__)
    for operator in ("Unknown", "Several"):
        with pytest.raises(KeyError) as caught:
            lockstep(f"straight:{operator}", "--set=optimizer=adam")
        assert "the config has no" not in "\n".join(caught.value.__notes__)
    with pytest.raises(SystemExit) as wrong:
        lockstep("straight:Line", "--epochs=1e3")
    assert wrong.value.code == 2
    assert "'1e3' is not a whole number" in capsys.readouterr().err


@pytest.mark.parametrize("operator", ["Empty", "Misused", "NoLoss"])
def test_a_fault_of_the_operators_own_is_no_wrong_usage(here, capsys, operator):
    assert lockstep(f"straight:{operator}", "--set=lr=0.1") == 1
    assert "[LS0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "code", "said"),
    [
        ("--save=folder", 2, "name a file in it"),
        ("--save=/", 2, "name a file in it"),
        ("--save=straight.py/run.pt", 2, "is a file, and no directory"),
        pytest.param(f"--save={300 * 'a'}", 2, "File name too long", id="long-name"),
        pytest.param(f"--save={300 * 'a'}/run.pt", 2, "File name too long", id="long-folder"),
        ("--log=straight.py/run.csv", 2, "the log file cannot be written"),
        ("--log=straight.py/run.jsonl", 2, "the log file cannot be written"),
    ],
)
def test_what_cannot_be_written_is_known_before_training(here, capsys, option, code, said):
    (here / "folder").mkdir()
    assert lockstep("straight:Line", "--set=lr=0.1", option) == code
    printed = capsys.readouterr()
    assert said in printed.err
    assert ("epoch   1" in printed.out) == (code == 0)


def test_the_config_of_file_and_settings(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("lr: 1e-3\nsteps: 10\nname: 1e\nmodel: {width: 8}\n")
    config = load_config(str(path), ["lr=2e-2", "model.depth=3", "new.a.b=[1, 2]"], batch_size=64)
    assert config == {
        "lr": 0.02,
        "steps": 10,
        "name": "1e",
        "model": {"width": 8, "depth": 3},
        "new": {"a": {"b": [1, 2]}},
        BATCH_SIZE: 64,
    }
    assert load_config(str(path), [])["lr"] == 0.001
    toml = tmp_path / "c.toml"
    toml.write_text("lr = 0.5\n[model]\nwidth = 2\n")
    assert load_config(str(toml), []) == {"lr": 0.5, "model": {"width": 2}}
    for text, value in {"true": True, "True": True, "None": None, "adam": "adam", "": ""}.items():
        assert parse_value(text) == value
    for text in (".5", "5.", "-5.", "+1", "+1.5", "+0", "1.e+3", "1e-3", "3"):
        (tmp_path / "number.yaml").write_text(f"value: {text}\n")
        from_file = load_config(str(tmp_path / "number.yaml"), [])["value"]
        assert (parse_value(text), type(parse_value(text))) == (from_file, type(from_file))
    assert (parse_value("-.5"), parse_value("-.5E-3")) == (-0.5, -0.0005)
    for text in (".", "+", "1.2.3", "007", "e5", "+a", "1 2"):
        assert parse_value(text) == text
    for entry in ("lr", "=1", "a..b=1"):
        with pytest.raises(ConfigurationError, match=r"--set lr=0\.1"):
            load_config(None, [entry])
    with pytest.raises(ConfigurationError, match="lr is no mapping"):
        load_config(str(path), ["lr.x=1"])


def test_completion_scripts(tmp_path):
    made = subprocess.run(
        [sys.executable, "-m", "lockstep.cli", "completion", "bash"],
        capture_output=True,
        text=True,
        check=True,
    )
    script = tmp_path / "lockstep.bash"
    script.write_text(made.stdout)
    asked = (
        f"source {script}; COMP_WORDS=(lockstep train --num-w); COMP_CWORD=2;"
        " _shtab_lockstep; echo ${COMPREPLY[@]}"
    )
    done = subprocess.run(["bash", "-c", asked], capture_output=True, text=True)
    assert done.stdout.split() == ["--num-workers"], json.dumps(done.stderr)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_two_workers_import_the_operator_from_its_file(here, tmp_path):
    # From another folder: neither the script's nor the current one is where the module is.
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    command = [sys.executable, "-m", "lockstep.cli", "train", str(here / "straight.py") + ":Line"]
    done = subprocess.run(
        [*command, "--num-workers=2", "--set=lr=0.1", "--batch-size=5", "--dry-run"],
        cwd=elsewhere,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "shard 0 of 2" in done.stdout
    assert "shard 1 of 2" in done.stdout
    assert "2 workers against one process: equal" in done.stdout


@pytest.mark.parametrize(
    ("error", "typed"),
    [
        (
            ConfigurationError("no", fix='TorchTrainer(..., checkpoint_dir="checkpoints")'),
            "--checkpoint-dir checkpoints",
        ),
        (ConfigurationError("no", fix='TorchTrainer(..., scheduler_step_freq="epoch")'), None),
        (ConfigurationError("no", fix="num_workers=1, or num_shards=2"), "--num-workers 1, or"),
        (ConfigurationError("no", fix="use_gpu=False, fewer workers"), "--use-gpu no, fewer"),
        (ConfigurationError("no", fix="TorchTrainer(check_finite=False) steps"), None),
        (ConfigurationError("no", fix="a smaller min_workers, spare_workers"), "--min-workers"),
        (ConfigurationError("no", fix="leave out sync, or reproducible=True"), "--reproducible"),
        (ConfigurationError("no", fix="build a new trainer and load the last checkpoint"), None),
        (ConfigurationError("no", fix="config={BATCH_SIZE: 64}"), "--batch-size 64"),
        (ConfigurationError("no", fix="resume=None"), "no --resume"),
    ],
)
def test_what_an_error_tells_to_type_is_an_option(error, typed):
    said = with_cli_options(error)
    assert typed is None or typed in said
    assert "TorchTrainer" not in said
    for name in TRAINER_OPTIONS:
        assert f"{name}=" not in said
    # What is told to be typed can be parsed.
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    known = parser._option_string_actions
    for option in re.findall(r"--[a-z][a-z-]*", said):
        assert option in known


def test_every_argument_of_the_trainer_has_its_option():
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    destinations = {action.dest for action in parser._actions}
    assert set(TRAINER_OPTIONS) <= destinations
    assert set(TRAINER_OPTIONS) <= set(inspect.signature(TorchTrainer).parameters)
    read = parser.parse_args(["m:O", "--no-check-finite", "--spare-workers=1", "--audit=off"])
    assert (read.check_finite, read.spare_workers, read.audit) == (False, 1, "off")
    assert not hasattr(parser.parse_args(["m:O"]), "check_finite")


def test_an_error_of_the_trainer_names_options(here, capsys):
    arguments = ("straight:Line", "--set=lr=0.1", "--num-workers=2", "--num-shards=1")
    assert lockstep(*arguments) == 2
    said = capsys.readouterr().err
    assert "--num-shards 2" in said or "--num-workers 1" in said
    assert "num_shards=" not in said.partition("fix")[2]


def test_steps_are_logged(here):
    code = lockstep("straight:Line", "--set=lr=0.1", "--log=log.csv", "--log-every=2")
    assert code == 0
    with (here / "log.csv").open(newline="") as file:
        rows = [(row["phase"], row["step"]) for row in csv.DictReader(file)]
    assert rows == [("step", "2"), ("train", "3"), ("validation", "3")]
