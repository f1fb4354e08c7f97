# SPDX-License-Identifier: Apache-2.0
"""The options of ``lockstep train``. Imports no torch."""

from __future__ import annotations

import argparse
from typing import Any, Final

from lockstep.audit.options import positive

NOT_GIVEN: Final = argparse.SUPPRESS
"""The trainer's own default holds."""

TRAINER: Final = (
    "num_workers",
    "num_shards",
    "num_cpus_per_worker",
    "use_gpu",
    "sync",
    "precision",
    "accumulate",
    "clip_grad_norm",
    "scheduler_step_freq",
    "seed",
    "reproducible",
    "check_finite",
    "spare_workers",
    "min_workers",
    "hang_timeout_s",
    "audit",
    "checkpoint_dir",
    "checkpoint_every",
    "keep_checkpoints",
    "resume",
)
"""Options that are arguments of `TorchTrainer`, under the same names."""

SAVING: Final = ("checkpoint_dir", "checkpoint_every", "keep_checkpoints", "resume")
"""Those of them that have no part in a dry run, which writes nothing."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "operator",
        metavar="MODULE:OPERATOR",
        help="a TrainingOperator class, e.g. package.module:Digits or path/to/file.py:Digits",
    )
    parser.add_argument("--epochs", type=positive, default=1, metavar="N", help="default 1")
    _add_config(parser.add_argument_group("the operator's config"))
    _add_trainer(parser.add_argument_group("how to train (see TorchTrainer)"))
    _add_safety(parser.add_argument_group("what may go wrong (see TorchTrainer)"))
    _add_output(parser.add_argument_group("what to keep"))
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="start the workers, compare a step with one process (verify), say what would run"
        " where, and end",
    )


def _add_config(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--config", metavar="FILE", help="a mapping, as .yaml, .json or .toml")
    group.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        dest="settings",
        help="one entry, over the file's; several times; inner.key=... for nested ones",
    )
    group.add_argument(
        "--batch-size", type=positive, metavar="N", help="the global batch: config[BATCH_SIZE]"
    )


def _add_trainer(group: argparse._ArgumentGroup) -> None:
    _option(group, "--num-workers", type=positive, metavar="N")
    _option(group, "--num-shards", type=positive, metavar="N")
    _option(group, "--num-cpus-per-worker", type=positive, metavar="N")
    _option(group, "--use-gpu", type=_gpu, metavar="{auto,yes,no}")
    ways = ["replicate", "ddp", "fsdp", "parameter_server", "data_parallel"]
    _option(group, "--sync", choices=ways)
    _option(group, "--precision", choices=["fp32", "bf16", "fp16"])
    _option(group, "--accumulate", type=positive, metavar="N")
    _option(group, "--clip-grad-norm", type=float, metavar="NORM")
    _option(group, "--scheduler-step-freq", choices=["batch", "epoch", "manual"])
    _option(group, "--seed", type=int, metavar="N")
    _option(group, "--reproducible", action="store_true", help="the same bits with any workers")


def _add_safety(group: argparse._ArgumentGroup) -> None:
    _option(group, "--spare-workers", type=int, metavar="N", help="ready for a lost one's place")
    _option(group, "--min-workers", type=positive, metavar="N", help="with fewer the run ends")
    _option(group, "--hang-timeout-s", type=float, metavar="SECONDS")
    _option(group, "--audit", choices=["watch", "full", "off"])
    _option(
        group,
        "--no-check-finite",
        action="store_false",
        dest="check_finite",
        help="take steps whose gradients hold NaN or infinity",
    )


def _add_output(group: argparse._ArgumentGroup) -> None:
    _option(group, "--checkpoint-dir", metavar="DIR", help="save the run there as it goes")
    _option(group, "--checkpoint-every", type=positive, metavar="STEPS")
    _option(group, "--keep-checkpoints", type=positive, metavar="N")
    _option(group, "--resume", choices=["auto"], help="go on from the newest in the directory")
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


def _option(group: argparse._ArgumentGroup, name: str, **arguments: Any) -> None:
    group.add_argument(name, default=NOT_GIVEN, **arguments)


def _gpu(text: str) -> bool | str:
    known: dict[str, bool | str] = {"auto": "auto", "yes": True, "no": False}
    if text not in known:
        raise argparse.ArgumentTypeError(f"{text!r} is none of auto, yes, no")
    return known[text]
