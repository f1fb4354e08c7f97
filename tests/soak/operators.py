# SPDX-License-Identifier: Apache-2.0
"""Programs for the trainer: one operator, in one process by hand and on real workers as threads.

The truth is written here: whole batches, torch's backward, nothing of lockstep's loops.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from textwrap import indent
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from harness import random_state_by_turns
from lockstep import TrainingOperator
from lockstep.keys import BATCH_SIZE, WEIGHT
from lockstep.operator import Options, RankContext
from lockstep.worker import LoopRequest, Rendezvous, Worker, WorkerSpec
from soak import text
from soak.judging import Trace
from soak.spec import Spec
from soak.worlds import World, server_for, side_by_side

LOOPS = ("default", "plain", "driven", "epoch", "joint")
"""Who runs backward: the default loop, `train_batch` in two ways, `train_epoch`; a joint loss."""

EPOCHS = 2

_here = threading.local()

_BATCH = {
    "plain": "value.backward()",
    "driven": "self.backward(value)",
    "epoch": "value.backward()",
}

_HEAD = """class Program(TrainingOperator):
    joint_loss = {joint}

    def setup(self, config):
        {names}, = build()
{setup}
        self.register_data(train_loader=loader(config))

    def loss(self, output, y, w):
        return {loss}

    def compute_loss(self, batch, batch_info):
        x, y, w = batch
{compute}
"""

_STEP = """
    def {signature}:
{loop}{each}x, y, w = batch
{each}ps, optimizer, model = self.ps, self.optimizer, self.model
{each}{clearing}
{each}value = self.loss(self.model(x), y, w)
{each}{backward}
{after}{each}self.optimizer.step()
        return {{"train_loss": value.item()}}
"""


def program(spec: Spec) -> str:
    """The text of the operator, with ``build`` and what it is made of."""
    above = text.program(spec).split("def train(world, modules):")[0]
    loop = spec.options["loop"]
    names = ["model", *(["criterion"] if spec.loss == "learned" else [])]
    made = ", ".join(names)
    setup = [f"ps = [p for module in [{made}] for p in module.parameters()]"]
    setup.append(f"optimizer = {text.OPTIMIZERS[spec.optimizer]}")
    setup += [text.piece(text.SETUP, each) for each in spec.setup if each["when"] == "before"]
    setup.append(f"models, optimizer = self.register(models=[{made}], optimizers=optimizer)")
    setup.append("self.ps, self.optimizer, model = ps, optimizer, models[0]")
    setup += [text.piece(text.SETUP, each) for each in spec.setup if each["when"] == "after"]
    setup += [f"self.{name} = models[{place}]" for place, name in enumerate(names)]
    each = text.LOSSES[spec.loss].replace("criterion", "self.criterion")
    mean = f"({each} * w).sum() / w.sum().clamp(min=1)"
    head = _HEAD.format(
        joint=loop == "joint",
        names=made,
        setup=indent("\n".join(setup), " " * 8),
        loss=mean if spec.way == "tokens" else f"({each}).mean()",
        compute=indent(_compute(spec), " " * 8),
    )
    return above + head + (_own_step(spec, loop) if loop in _BATCH else "")


def _compute(spec: Spec) -> str:
    if spec.options["loop"] == "joint":
        return (
            "output, y, w = gather(self.model(x)), gather(y), gather(w)\n"
            "return self.loss(output - output.mean(0), y, w)"
        )
    value = "self.loss(self.model(x), y, w)"
    weight = f"{value}, {{WEIGHT: w.sum().item()}}"
    return f"return {weight if spec.way == 'tokens' else value}"


def _own_step(spec: Spec, loop: str) -> str:
    is_epoch = loop == "epoch"
    each = " " * (12 if is_epoch else 8)
    pieces = [text.piece(text.AFTER, piece) for piece in spec.steps[0].after]
    method = "train_epoch(self, iterator" if is_epoch else "train_batch(self, batch"
    return _STEP.format(
        signature=f"{method}, info)",
        loop="        for batch in iterator:\n" if is_epoch else "",
        each=each,
        clearing=text.CLEARINGS[spec.clearing] or "pass",
        backward=_BATCH[loop],
        after="".join(indent(piece, each) + "\n" for piece in pieces),
    )


# ---------------------------------------------------------------------- running


def columns(spec: Spec) -> list[torch.Tensor]:
    """All rows of the program."""
    rows = spec.options["rows"]
    x, y, w = World(spec.seed, ((rows,),), "equal").look()
    w[:: spec.options["batch"]] += 1  # not all rows of a global batch count for nothing
    return [x, y, w]


def _operator(spec: Spec, source: str, names: dict[str, Any], gather: Callable[..., Any]) -> type:
    def loader(config: Any) -> DataLoader[Any]:
        return DataLoader(TensorDataset(*columns(spec)), config[BATCH_SIZE])

    found = {
        **names, "TrainingOperator": TrainingOperator, "WEIGHT": WEIGHT, "loader": loader,
        "gather": gather,
    }  # fmt: skip
    exec(compile(source, "<program>", "exec"), found)
    build = found["build"]
    # Modules come out of torch's one generator: the threads' are made before they start.
    found["build"] = lambda: getattr(_here, "modules", None) or build()
    operator = found["Program"]
    operator.made_by = staticmethod(build)
    return operator


def _watched(operator: TrainingOperator, modules: list[Any]) -> World:
    world = World(0, ((1,),), "equal")
    world.modules = modules
    for optimizer in operator._lockstep.registered.optimizers:
        world.watch(optimizer)
    return world


def one_process(
    spec: Spec, source: str, names: dict[str, Any], begin: Callable[[list[Any]], list[Any]]
) -> Trace:
    """The truth, where `begin` makes the modules of those that were built."""
    made = _operator(spec, source, names, lambda tensor: tensor)
    torch.manual_seed(spec.seed)
    _here.modules = begin(made.made_by())
    alone = RankContext(options=Options(wrap_ddp=False))
    operator = made({BATCH_SIZE: spec.options["batch"]}, alone)
    operator.setup(operator.config)
    world = _watched(operator, _here.modules)
    whole, size = columns(spec), spec.options["batch"]
    starts = range(0, spec.options["rows"], size)
    batches = [[column[start : start + size] for column in whole] for start in starts]
    for _ in range(EPOCHS):
        if spec.options["loop"] == "epoch":
            operator.train_epoch(iter(batches), {})
        elif spec.options["loop"] in _BATCH:
            for batch in batches:
                operator.train_batch(batch, {})
        else:
            _epoch(spec, operator, batches)
    return Trace(world.seen, [], world.weights())


def _epoch(spec: Spec, operator: Any, batches: list[Any]) -> None:
    every, clip = spec.options["accumulate"], spec.options["clip"]
    parameters = list(operator._lockstep.registered.parameters())
    for start in range(0, len(batches), every):
        window = batches[start : start + every]
        counts = [b[2].sum().item() if spec.way == "tokens" else len(b[0]) for b in window]
        operator.optimizer.zero_grad()
        losses = []
        for batch, count in zip(window, counts, strict=True):
            found = operator.compute_loss(batch, {})
            value = found[0] if isinstance(found, tuple) else found
            losses.append(value * (count / sum(counts)))
        sum(losses[1:], start=losses[0]).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(parameters, clip)
        operator.optimizer.step()


def _worker_spec(spec: Spec, made: type) -> WorkerSpec:
    given = {
        "bucket_cap_mb": 1e-4 if spec.seed % 2 else 25,
        "accumulate": spec.options["accumulate"],
    }
    given |= {"clip_grad_norm": spec.options["clip"], "reproducible": spec.options["reproducible"]}
    is_one = spec.sync == "data_parallel"
    if is_one:
        given["replicas"] = spec.workers
    processes = 1 if is_one else spec.workers
    return WorkerSpec(
        made,
        {BATCH_SIZE: spec.options["batch"]},
        processes,
        num_shards=processes + spec.options["more_shards"],
        seed=0,
        options=Options(sync=spec.sync, **given),
    )


def on_ranks(spec: Spec, source: str, names: dict[str, Any], patience_s: float) -> list[Trace]:
    """Real workers."""
    made = _operator(spec, source, names, lockstep.gather)
    worker_spec = _worker_spec(spec, made)
    size, store = worker_spec.num_workers, dist.HashStore()
    modules = []
    for _ in range(size):
        torch.manual_seed(spec.seed)
        modules.append(made.made_by())
    with server_for(spec.sync, size) as address:

        def one(rank: int) -> Trace:
            _here.modules = modules[rank]
            worker = Worker(worker_spec, rank, rank)
            if size > 1:
                limit = timedelta(seconds=patience_s)
                worker._group = dist.ProcessGroupGloo(store, rank, size, limit)
            if address is not None:
                worker._rendezvous = Rendezvous(
                    "",
                    0,
                    0,
                    "gloo",
                    one_node=True,
                    timeout_s=20.0,
                    as_default=False,
                    server_address=address,
                )
            world = World(0, ((1,),), "equal")
            try:
                worker._build_operator(torch.device("cpu"))
                world = _watched(worker.operator, modules[rank])
                for _ in range(EPOCHS):
                    worker.train(LoopRequest("train", None, False, {}))
            except Exception as error:
                worker.leave()
                final = [p.detach().clone() for m in modules[rank] for p in m.parameters()]
                return Trace(world.seen, [], final, error)
            finally:
                worker.stop()
            return Trace(world.seen, [], world.weights())

        was = torch.are_deterministic_algorithms_enabled()
        with random_state_by_turns():
            found = side_by_side(one, size, 3 * patience_s)
        torch.use_deterministic_algorithms(was)  # `reproducible` sets it for a worker's process
    return [
        trace
        if isinstance(trace, Trace)
        else Trace([], [], [], trace if isinstance(trace, BaseException) else None, trace is None)
        for trace in found
    ]
