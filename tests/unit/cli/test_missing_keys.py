# SPDX-License-Identifier: Apache-2.0
"""What a `KeyError` within `setup` is said to be: a key that the config lacks, or nothing."""

import os
from types import SimpleNamespace

import pytest

from lockstep import TrainingOperator
from lockstep.cli.missing_keys import note_missing_key
from lockstep.keys import BATCH_SIZE
from lockstep.worker.call_outcome import failed_outcome

CONFIG = {"model": {"width": 8}, "name": "resnet", "number": 3}
NETWORKS = {"vgg": 1}


def part_of(config):
    return config["depth"]


class Lines:
    """Bodies of `setup`."""

    def top(self, config):
        return config["lr"]

    def of_another_name(self, settings):
        return [
            settings["name"],
            settings["lr"],
        ]

    def of_self(self, config):
        return self.config["lr"]

    def nested(self, config):
        return config["model"]["depth"]

    def missing_part(self, config):
        return config["optimizer"]["lr"]

    def batch_size(self, config):
        return config[BATCH_SIZE]

    def in_a_function(self, config):
        return part_of(config["model"])

    def of_a_model(self, config):
        return SimpleNamespace(config={}).config["depth"]

    def of_a_part(self, config):
        model = SimpleNamespace(config=config["model"])
        return model.config["depth"]

    def aliased(self, config):
        model = config["model"]
        return model["depth"]

    def of_another_dict(self, config):
        return NETWORKS[config["name"]]

    def of_the_environment(self, config):
        return os.environ["LOCKSTEP_NO_SUCH_VARIABLE"], config["name"]

    def by_hand(self, config):
        raise KeyError(["lr"])

    def without_a_key(self, config):
        raise KeyError


@pytest.mark.parametrize("is_remote", [False, True], ids=["here", "of a worker"])
@pytest.mark.parametrize(
    ("line", "said"),
    [
        (Lines.top, "the config has no 'lr': --set lr=..., or --config FILE"),
        (Lines.of_another_name, "the config has no 'lr': --set lr=..., or --config FILE"),
        (Lines.of_self, "the config has no 'lr': --set lr=..., or --config FILE"),
        (Lines.nested, "the config has no 'model.depth': --set model.depth=..., or"),
        (Lines.missing_part, "the config has no 'optimizer': --set optimizer=..., or"),
        (Lines.batch_size, f"the config has no {BATCH_SIZE!r}: --batch-size 64, or"),
        (Lines.in_a_function, "if it is the operator's config without 'depth': --set depth=..."),
        (Lines.of_a_model, None),
        (Lines.of_a_part, None),
        (Lines.aliased, None),
        (Lines.of_another_dict, None),
        (Lines.of_the_environment, None),
        (Lines.by_hand, None),
        (Lines.without_a_key, None),
    ],
)
def test_a_key_that_the_config_lacks(line, said, is_remote):
    operator = type("Operator", (TrainingOperator,), {"setup": line})
    line.__code__ = line.__code__.replace(co_name="setup")  # as a traceback names it
    with pytest.raises(KeyError) as caught:
        line(SimpleNamespace(config=CONFIG), CONFIG)
    error = failed_outcome(1, caught.value).exception() if is_remote else caught.value
    before = len(getattr(error, "__notes__", []))
    note_missing_key(error, operator, CONFIG)
    notes = getattr(error, "__notes__", [])[before:]
    assert len(notes) == (said is not None)
    assert said is None or notes[0].startswith(said)
