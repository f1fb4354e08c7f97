# SPDX-License-Identifier: Apache-2.0
"""Connects a trainer to a Ray cluster, or starts a private one, unless the user has connected."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import random
import secrets
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ray.util import client

import ray
from lockstep.errors import NotAvailableError

if TYPE_CHECKING:
    from collections.abc import Iterator

_ADDRESS_VARIABLE: Final = "RAY_ADDRESS"
_TOKEN_VARIABLES: Final = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")

# The address of the cluster that this process started, so that a second trainer recognises it.
_own_address: str | None = None


def connect() -> bool:
    """Make sure that Ray runs; True if this process started a cluster for itself alone.

    lockstep joins only a cluster that was offered: the one that RAY_ADDRESS names, or the one
    that ``ray start`` made on this machine. ``address="auto"`` would join any Ray process it
    detects, also the private cluster of another program, take its CPUs and end with it.

    Raises:
        NotAvailableError: the program has connected by Ray Client, from outside of the cluster, or
            Ray cannot start on this machine.
    """
    global _own_address
    if client.ray.is_connected():
        raise _client_error('ray.init("ray://...")')
    if not ray.is_initialized():
        with _restored_process():
            if os.environ.get(_ADDRESS_VARIABLE):
                _join_named_cluster()
            elif not _join_local_cluster():
                with _private_token():
                    _start_private_cluster()
                _own_address = _address()
    return _address() == _own_address


def _client_error(got: str) -> NotAvailableError:
    return NotAvailableError(
        "a trainer cannot train through Ray Client",
        got=got,
        cause="this program is where the workers meet, and has to be one of the cluster's own",
        fix='ray job submit --working-dir . -- python program.py, or ray.init("auto") on one of'
        " its machines",
    )


@contextlib.contextmanager
def _restored_process() -> Iterator[None]:
    """Restore what every ``ray.init`` changes: the SIGTERM handler, and the state of `random`.

    Where SIGTERM had its default action, Ray's handler stays: it also ends a cluster of this
    process's own.
    """
    drawn, handler = random.getstate(), signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        random.setstate(drawn)
        is_in_main_thread = threading.current_thread() is threading.main_thread()
        if is_in_main_thread and handler not in (signal.SIG_DFL, None):
            signal.signal(signal.SIGTERM, handler)


@contextlib.contextmanager
def _private_token() -> Iterator[None]:
    """Give the cluster that starts inside a token which only the cluster and this process know.

    If the user has no token, Ray would write one into the home directory. From then on every other
    cluster of this user would ask for it, and programs that could join one before would fail. A
    token in the environment is inherited by the cluster's processes, and ends with them; this
    process needs the variable only until it is connected. Afterwards this function restores the
    environment, including what Ray sets in it, so that programs which this one starts, and clusters
    that it joins later, do not see the token.
    """
    before = dict(os.environ)
    is_given = any(name in before for name in _TOKEN_VARIABLES)
    if not is_given and not Path.home().joinpath(".ray", "auth_token").exists():
        # Always the same token: Ray keeps the first one that it has read in this process.
        os.environ["RAY_AUTH_TOKEN"] = _own_token()
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


def _start_private_cluster() -> None:
    try:
        ray.init(address="local", logging_level=logging.ERROR, include_dashboard=False)
    except Exception as error:  # Ray has no class of its own for a start that fails
        raise NotAvailableError(
            "Ray did not start on this machine",
            got=str(error),
            cause="Ray gives its first processes 30 s: the machine is too busy, or has no memory or"
            " disk left; or the path of Ray's files is too long for a socket",
            fix="`ray start --head`, then this program again: it joins that Ray; Ray's logs:"
            f" {_folder() / 'session_latest' / 'logs'}",
        ) from error


def _folder() -> Path:
    """Where Ray keeps its sockets, logs and the address of the cluster of this machine."""
    return Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray")


@functools.cache
def _own_token() -> str:
    return secrets.token_hex(32)


def _join_named_cluster() -> None:
    address = os.environ[_ADDRESS_VARIABLE]
    if address.startswith("ray://"):
        raise _client_error(f"{_ADDRESS_VARIABLE}={address}")
    try:
        ray.init(logging_level=logging.ERROR)
    except ConnectionError as error:
        error.add_note(
            f"{_ADDRESS_VARIABLE}={address} names a cluster that does not"
            " answer; if it was started with a token, RAY_AUTH_MODE=token is needed here too"
        )
        raise


def _join_local_cluster() -> bool:
    if not (_folder() / "ray_current_cluster").exists():
        return False
    try:
        ray.init(logging_level=logging.ERROR)
    except ConnectionError:
        return False  # the cluster was killed, and its address file was left behind
    return True


def gpus_of_other_machines() -> float:
    """GPUs that this process cannot see, and that the cluster's nodes say they have.

    0 for a program that itself runs in a placement group, as a trial of Tune does: its own
    reservation decides.
    """
    if ray.util.get_current_placement_group() is not None:
        return 0.0
    others = [node for node in ray.nodes() if node["Alive"] and node["NodeID"] != this_node()]
    return float(sum(node["Resources"].get("GPU", 0) for node in others))


def _address() -> str:
    address: str = ray.get_runtime_context().gcs_address
    return address


def this_node() -> str:
    """The id of the Ray node that this process runs on."""
    node: str = ray.get_runtime_context().get_node_id()
    return node


def session() -> str | None:
    """The id of this driver's connection to a cluster, which ends with `ray.shutdown`."""
    if not ray.is_initialized():
        return None
    driver: str = ray.get_runtime_context().get_worker_id()
    return driver
