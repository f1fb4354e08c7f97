# SPDX-License-Identifier: Apache-2.0
"""The options of ``lockstep train``. Imports no torch."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any, Final

from lockstep.audit.options import positive

if TYPE_CHECKING:
    from collections.abc import Mapping

Options = dict[str, dict[str, Any]]
"""Arguments of `TorchTrainer`, and argparse's keyword arguments for the option of each."""


def _parse_gpu(text: str) -> bool | str:
    known: dict[str, bool | str] = {"auto": "auto", "yes": True, "no": False}
    if text not in known:
        raise argparse.ArgumentTypeError(f"{text!r} is none of auto, yes, no")
    return known[text]


_COUNT: Final = {"type": positive, "metavar": "N"}

_TRAINING_OPTIONS: Final[Options] = {
    "num_workers": _COUNT,
    "num_shards": _COUNT,
    "num_cpus_per_worker": _COUNT,
    "use_gpu": {"type": _parse_gpu, "metavar": "{auto,yes,no}"},
    "sync": {"choices": ["replicate", "ddp", "fsdp", "parameter_server", "data_parallel"]},
    "precision": {"choices": ["fp32", "bf16", "fp16"]},
    "accumulate": _COUNT,
    "clip_grad_norm": {"type": float, "metavar": "NORM"},
    "scheduler_step_freq": {"choices": ["batch", "epoch", "manual"]},
    "seed": {"type": int, "metavar": "N"},
    "reproducible": {"action": "store_true", "help": "the same bits with any workers"},
}

_FAILURE_OPTIONS: Final[Options] = {
    "spare_workers": {"type": int, "metavar": "N", "help": "ready for a lost one's place"},
    "min_workers": {**_COUNT, "help": "with fewer the run ends"},
    "hang_timeout_s": {"type": float, "metavar": "SECONDS"},
    "shadow_every": {"type": positive, "metavar": "STEPS", "help": "another worker computes along"},
    "shadow_limit": {**_COUNT, "help": "so many wrong shards, and a worker is replaced"},
    "audit": {"choices": ["watch", "full", "off"]},
    "check_finite": {
        "action": "store_false",
        "help": "take steps whose gradients hold NaN or infinity",
    },
}

SAVING_OPTIONS: Final[Options] = {
    "checkpoint_dir": {"metavar": "DIR", "help": "save the run there as it goes"},
    "checkpoint_every": {"type": positive, "metavar": "STEPS"},
    "keep_checkpoints": _COUNT,
    "resume": {"choices": ["auto"], "help": "go on from the newest in the directory"},
}
"""The options that a dry run ignores, because it writes nothing."""

TRAINER_OPTIONS: Final[Options] = {**_TRAINING_OPTIONS, **_FAILURE_OPTIONS, **SAVING_OPTIONS}


def option_for(name: str) -> str:
    """The option for an argument of `TorchTrainer`."""
    return "--no-check-finite" if name == "check_finite" else f"--{name.replace('_', '-')}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "operator",
        metavar="MODULE:OPERATOR",
        help="a TrainingOperator class, e.g. package.module:Digits or path/to/file.py:Digits",
    )
    parser.add_argument("--epochs", type=positive, default=1, metavar="N", help="default 1")
    _add_config(parser.add_argument_group("the operator's config"))
    _add(parser.add_argument_group("how to train (see TorchTrainer)"), _TRAINING_OPTIONS)
    _add(parser.add_argument_group("what may go wrong (see TorchTrainer)"), _FAILURE_OPTIONS)
    output = parser.add_argument_group("what to keep")
    _add(output, SAVING_OPTIONS)
    _add_output(output)
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="start the workers, compare a step with one process (verify), say what would run"
        " where, and end",
    )


def _add(group: argparse._ArgumentGroup, options: Mapping[str, dict[str, Any]]) -> None:
    for name, how in options.items():
        # A missing option is left out of the namespace, so that the trainer's default holds.
        group.add_argument(option_for(name), dest=name, default=argparse.SUPPRESS, **how)


def add_config_options(group: argparse._ActionsContainer) -> None:
    """Add what `lockstep.cli.operator_config.load_config` reads."""
    group.add_argument("--config", metavar="FILE", help="a mapping, as .yaml, .json or .toml")
    group.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        dest="settings",
        help="one entry, over the file's; several times; inner.key=... for nested ones",
    )


def _add_config(group: argparse._ArgumentGroup) -> None:
    add_config_options(group)
    group.add_argument(
        "--batch-size", type=positive, metavar="N", help="the global batch: config[BATCH_SIZE]"
    )


def _add_output(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--save", metavar="FILE", help="save the run there at its end")
    group.add_argument(
        "--log",
        metavar="PATH",
        action="append",
        default=[],
        help="results of every epoch: FILE.csv, FILE.jsonl, or a folder for TensorBoard; several"
        " times",
    )
    group.add_argument(
        "--log-every",
        type=positive,
        metavar="STEPS",
        help="also the metrics of every so many steps, to each --log",
    )
