# SPDX-License-Identifier: Apache-2.0
"""Runs on two hosts, of which one falls silent at each place of a step, and comes back.

Run as a program on the near one; see `two_hosts`. Prints what came of it for each place.
"""

import json
import os
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ray
from lockstep import TorchTrainer, TrainingOperator
from two_hosts import set_link

FOLDER = Path(os.environ["FOLDER"])
CUT_AT, STEPS = 6, 14


class Stamped(TrainingOperator):
    """Says when it has stepped; at one place of one step some ranks wait for the cut."""

    def setup(self, config):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=optimizer, criterion=nn.MSELoss()
        )
        x = torch.randn(400, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        data = TensorDataset(x, x.sin().sum(1, keepdim=True))
        self.register_data(
            train_loader=DataLoader(data, batch_size=4),
            validation_loader=DataLoader(data, batch_size=20),
        )
        optimizer.register_step_pre_hook(lambda *_: self._reach("step"))
        optimizer.register_step_post_hook(lambda *_: self._stamp())

    def _stamp(self):
        with open(self.config["stamps"] / str(os.getpid()), "a") as file:
            file.write(f"{time.time()} {self.global_step}\n")

    def _reach(self, place):
        is_time = self.global_step == CUT_AT or place in ("validation", "checkpoint")
        if self.config["place"] == place and self.config["waits"]() and is_time:
            (self.config["stamps"].parent / "reached").touch()
            while not (self.config["stamps"].parent / "cut").exists():
                time.sleep(0.005)

    def compute_loss(self, batch, batch_info):
        self._reach("forward")
        loss = super().compute_loss(batch, batch_info)
        if loss.requires_grad:
            loss.register_hook(lambda _: self._reach("backward"))
            # It waits here, and the far ranks for it in the all-reduce.
            loss.register_hook(lambda _: self._reach("all-reduce"))
        return loss

    def validate_batch(self, batch, batch_info):
        self._reach("validation")
        return super().validate_batch(batch, batch_info)

    def state_dict(self):
        self._reach("checkpoint")
        return {}


def trained(sync, spares, hang_s, place, work):
    """The weights, and what the run told of itself."""
    stamps = work / "stamps"
    stamps.mkdir(parents=True)
    driver = ray.get_runtime_context().get_node_id()

    def waits():
        # A checkpoint is made by rank 0, which is near.
        is_near = ray.get_runtime_context().get_node_id() == driver
        return is_near == (place in ("all-reduce", "checkpoint"))

    config = {"place": place, "stamps": stamps, "waits": waits}
    own = {"reproducible": True} if sync == "replicate" else {}
    with TorchTrainer(
        training_operator_cls=Stamped,
        num_workers=4,
        num_shards=4,
        spare_workers=spares,
        min_workers=1,
        sync=sync,
        config=config,
        hang_timeout_s=hang_s,
        **own,
    ) as trainer:
        members = trainer._workers._engine.workers.members
        far = [member.pid for member in members if member.node != driver]
        nodes = [member.node for member in members]
        trainer.train(num_steps=STEPS // 2)
        trainer.validate(num_steps=2)
        trainer.save(work / "checkpoint")
        trainer.train(num_steps=STEPS - STEPS // 2)
        status = trainer.status()
        weights = {k: v.clone() for k, v in trainer.get_model().state_dict().items()}
        saved = sorted((p.name, p.stat().st_mtime) for p in work.glob("checkpoint*"))
        told = {"workers": status["workers"], "recoveries": status["recoveries"], "far": far,
                "neighbours": nodes == sorted(nodes, key=nodes.index), "saved": saved,
                "first is here": nodes[0] == driver}  # fmt: skip
        if place is not None:
            set_link(is_up=True)
            until(lambda: not any(map(is_alive, far)), 60)
            told["stamped later"] = [
                pid for pid in far if stamps_of(stamps, pid)[-1][1] > told["recoveries"][0]["step"]
            ]
            same = {k: v.equal(weights[k]) for k, v in trainer.get_model().state_dict().items()}
            told["same after"] = all(same.values())
            told["saved after"] = saved == sorted(
                (p.name, p.stat().st_mtime) for p in work.glob("checkpoint*")
            )
        near = next(m.pid for m in members if m.node == driver)
        stamps_near = stamps_of(stamps, near)
        if (work / "dead").exists():
            dead = float((work / "dead").read_text())
            told["after ray_s"] = min(at for at, _ in stamps_near if at > dead) - dead
        at = float((work / "at").read_text()) if place is not None else 0.0
        told["gap_s"] = max(b - max(a, at) for (a, _), (b, _) in pairwise(stamps_near))
    return weights, told


def stamps_of(folder, pid):
    lines = [line.split() for line in (folder / str(pid)).read_text().splitlines()]
    return [(float(at), int(step)) for at, step in lines]


def is_alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def until(condition, at_most_s):
    deadline = time.monotonic() + at_most_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def cut(work):
    until((work / "reached").exists, 60)
    set_link(is_up=False)
    (work / "at").write_text(str(time.time()))
    (work / "cut").touch()


def notice(work, node, over):
    """Until `over` is set: note when Ray has reported that a node is dead."""
    while not over.is_set():
        if not next(n for n in ray.nodes() if n["NodeID"] == node)["Alive"]:
            (work / "dead").write_text(str(time.time()))
            return
        time.sleep(0.02)


def main(sync, spares, hang_s, places):
    ray.init(address=os.environ["NEAR_ADDRESS"], logging_level="ERROR", log_to_driver=False)
    expected, told = trained(sync, spares, hang_s, None, FOLDER / "undisturbed")
    print(json.dumps({"place": None, **told}), flush=True)
    for place in places:
        until(lambda: ray.available_resources().get("CPU", 0) >= 4 + spares, 60)
        work = FOLDER / place
        disturbance = threading.Thread(target=cut, args=(work,), daemon=True)
        disturbance.start()
        far = next(
            n["NodeID"]
            for n in ray.nodes()
            if n["NodeID"] != ray.get_runtime_context().get_node_id()
        )
        over = threading.Event()
        watching = threading.Thread(target=notice, args=(work, far, over), daemon=True)
        watching.start()
        found, told = trained(sync, spares, hang_s, place, work)
        over.set()
        for thread in (disturbance, watching):
            thread.join()
        told["off"] = max(float((found[k] - expected[k]).abs().max()) for k in expected)
        told["bits"] = all(found[k].equal(expected[k]) for k in expected)
        print(json.dumps({"place": place, **told}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4:])
