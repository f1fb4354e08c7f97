# SPDX-License-Identifier: Apache-2.0
"""One rank's audit in code, from `start` to `stop`; and how any audit ends."""

from __future__ import annotations

import contextlib
import sys
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from lockstep.audit.judgement import judge
from lockstep.audit.ledger import Ledger
from lockstep.audit.probe import meetings
from lockstep.audit.probe.hooking import hook_in
from lockstep.audit.probe.probe import Probe
from lockstep.errors import WrongUseError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from lockstep.audit.finding import Finding

_EXCHANGE_S = 60.0

_PIECE = 1 << 20

_running: Probe | None = None


def start(*, mode: str = "watch", steps: int | None = None) -> None:
    """Watch this process from here on. Call it on every rank, before the optimizers are made.

    Args:
        mode: ``watch`` looks at few steps in detail, ``full`` at many.
        steps: look at so many optimizer steps only.

    Gradient:
        None: it reads.

    Collective:
        None, here and while it watches.

    Raises:
        WrongUseError: it is watching already.
    """
    global _running
    if _running is not None:
        raise WrongUseError(
            "the audit watches this process already",
            fix="call lockstep.audit.stop() first",
        )
    _running = Probe(mode=mode, steps=steps)
    hook_in(_running)


def stop(
    *,
    only: Collection[str] = (),
    ignore: Collection[str] = (),
    exchange: Callable[[bytes], Sequence[bytes | None]] | None = None,
) -> list[Finding]:
    """Stop watching, lay all ranks' ledgers side by side and judge them.

    Args:
        only: report these codes only.
        ignore: leave these codes out.
        exchange: gives every rank's bytes for this rank's; by default through the store of the
            default process group.

    Returns:
        The findings, the same on every rank. Torch is as it was before `start`.

    Gradient:
        None.

    Collective:
        Every rank of the default process group, each once. Blocks until all ledgers are there, or
        a minute; a rank that does not come counts as one that left no ledger.

    Raises:
        WrongUseError: nothing was started.
    """
    ledger, store = end_watch()
    return judge(ledgers_of_all(ledger, store, exchange), only=only, ignore=ignore)


def end_watch() -> tuple[Ledger, Any]:
    """Take out what `start` hooked in.

    Returns:
        This rank's ledger, and the store of its default process group (None without one).

    Raises:
        WrongUseError: nothing was started.
    """
    global _running
    if _running is None:
        raise WrongUseError("nothing is being watched", fix="call lockstep.audit.start() first")
    probe, _running = _running, None
    probe.note_group()
    return finish(probe), probe.store


def ledgers_of_all(
    ledger: Ledger,
    store: Any,
    exchange: Callable[[bytes], Sequence[bytes | None]] | None = None,
) -> list[Ledger | None]:
    """Every rank's ledger, by rank; None for a rank that left none.

    Args:
        ledger: this rank's.
        store: that of the default process group.
        exchange: see `stop`.

    Collective:
        Every rank, once; see `stop`.
    """
    ledger.stuck_in = None  # it came here
    if exchange is not None:
        everyone = exchange(ledger.to_bytes())
    else:
        everyone = exchange_records([ledger], store, ledger.rank, ledger.world_size)
    return [None if each is None else Ledger.from_bytes(each) for each in everyone]


def finish(probe: Probe) -> Ledger:
    """Take the probe out, and write down what is only known at the end."""
    ledger = probe.ledger
    ledger.facts.lockstep = probe.sync_of_lockstep() or ledger.facts.lockstep
    ledger.facts.joins = any(w.joins for w in probe.wrappers)
    # Accelerate's own count of processes, without which it shares nothing out.
    accelerate = getattr(sys.modules.get("accelerate.state"), "PartialState", None)
    counted = getattr(accelerate, "_shared_state", {}).get("num_processes")
    if isinstance(counted, int):
        ledger.facts.accelerate = counted
    ledger.facts.lightning = any(n in sys.modules for n in ("lightning", "pytorch_lightning"))
    for watched in probe.optimizers.values():
        probe.harmlessly(meetings.before_step, probe, watched)  # averaged when all was done
    probe.stop()
    return ledger


def exchange_records(
    ledgers: Sequence[Ledger], store: Any, rank: int, world_size: int, wait_s: float = _EXCHANGE_S
) -> Sequence[bytes | None]:
    """Every rank's records, one a line; None for a rank that left none.

    If the store fails, only this rank's records are judged, and they say why (LS406): the program
    itself has ended well.

    Args:
        ledgers: this rank's own, and those of processes that it started.
        store: that of the default process group; None without one.

    Collective:
        Every rank, once; see `exchange_by_store`.
    """
    try:
        return exchange_by_store(_lines(ledgers), store, rank, world_size, wait_s)
    except Exception as error:
        facts = ledgers[0].facts
        facts.alone = True
        facts.blind = f"rank {rank} could not tell the others what it saw ({error})"[:300]
        return [_lines(ledgers)]


def _lines(ledgers: Sequence[Ledger]) -> bytes:
    return b"\n".join(ledger.to_bytes() for ledger in ledgers)


def exchange_by_store(
    data: bytes, store: Any, rank: int, world_size: int, wait_s: float = _EXCHANGE_S
) -> list[bytes | None]:
    """Every rank's bytes, through a store; None for one that does not come.

    Collective:
        Every rank, once. Blocks for at most `wait_s` for each that does not come.

    Raises:
        RuntimeError: the store did not take this rank's bytes.
    """
    if store is None or world_size == 1:
        return [data]
    prefix = _next_exchange(store, rank)
    _put(store, f"{prefix}/{rank}", data)
    found: list[bytes | None] = [None] * world_size
    for other in range(world_size):
        with contextlib.suppress(RuntimeError):
            found[other] = _get(store, f"{prefix}/{other}", wait_s) or None
    # The process of rank 0 may hold the store: nobody leaves before all have read.
    with contextlib.suppress(RuntimeError):
        _note_read(store, prefix, world_size)
        store.wait([f"{prefix}/all"], timedelta(seconds=wait_s))
    return found


def leave_exchange(store: Any, rank: int, world_size: int) -> None:
    """Tell the ranks that exchange their ledgers that this one brings none.

    Without it they would wait for this rank, and a later exchange would read this one's ledgers.

    Collective:
        None: it waits for no rank.
    """
    if store is None or world_size == 1:
        return
    with contextlib.suppress(RuntimeError):  # the store may have gone with another rank
        prefix = _next_exchange(store, rank)
        _put(store, f"{prefix}/{rank}", b"")
        _note_read(store, prefix, world_size)


def _next_exchange(store: Any, rank: int) -> str:
    """The key prefix of this exchange: all ranks have taken part in, or left, as many exchanges."""
    return f"lockstep.audit/{store.add(f'lockstep.audit/of_{rank}', 1)}"


def _put(store: Any, key: str, data: bytes) -> None:
    """In pieces: a TCPStore closes the connection on which more than 8 MiB come at once."""
    places = range(0, len(data), _PIECE)
    for number, start in enumerate(places):
        store.set(f"{key}/{number}", data[start : start + _PIECE])
    store.set(key, str(len(places)))  # last: then all are there


def _get(store: Any, key: str, wait_s: float) -> bytes:
    store.wait([key], timedelta(seconds=wait_s))
    return b"".join(store.get(f"{key}/{number}") for number in range(int(store.get(key))))


def _note_read(store: Any, prefix: str, world_size: int) -> None:
    if store.add(f"{prefix}/read", 1) == world_size:
        store.set(f"{prefix}/all", b"1")
