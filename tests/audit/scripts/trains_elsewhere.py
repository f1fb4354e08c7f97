# SPDX-License-Identifier: Apache-2.0
"""Trains in processes that cannot be watched. Argument: which."""

import multiprocessing
import os
import signal
import subprocess
import sys

import torch


def train(_=None):
    net = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        net(torch.ones(1, 2)).sum().backward()
        optimizer.step()


def train_and_die():
    train()
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    match sys.argv[1]:
        case "trains":
            train()
        case "forks":
            train()
            if not os.fork():
                train()
                os._exit(0)
            os.wait()
        case "replaces itself":
            os.execv(sys.executable, [sys.executable, __file__, "trains"])
        case "is killed":
            process = multiprocessing.Process(target=train_and_die)
            process.start()
            process.join()
        case "a pool":
            with multiprocessing.Pool(1) as pool:
                pool.map(train, range(2))
        case "Popen":
            subprocess.run([sys.executable, __file__, "trains"], check=True)
        case "a shell":
            subprocess.run(f"{sys.executable} {__file__} trains", check=True, shell=True)
        case "trains and starts":
            train()
            subprocess.run([sys.executable, "-c", "print(3)"], check=True)
        case "only starts":
            subprocess.run(["true"], check=True)
