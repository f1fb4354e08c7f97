# SPDX-License-Identifier: Apache-2.0
"""The ledgers of all ranks side by side: which of their optimizers train replicas of one model."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from lockstep.audit.by_design import (
    apart_by_design,
    are_own_models,
    kept_at_home,
    may_be_own_models,
    meet_again,
    names_in_modules,
    tell_of_own_models,
)
from lockstep.audit.shared_track import SharedTrack

if TYPE_CHECKING:
    from collections.abc import Sequence, Set

    from lockstep.audit.facts import ProcessFacts, Track
    from lockstep.audit.ledger import Ledger
    from lockstep.audit.shared_track import Difference


class World:
    """What all ranks saw.

    Args:
        ledgers: by rank; None for a rank that left none.
    """

    def __init__(self, ledgers: Sequence[Ledger | None]) -> None:
        self.ledgers: dict[int, Ledger] = {
            ledger.rank: ledger for ledger in ledgers if ledger is not None
        }
        sizes = [ledger.world_size for ledger in self.ledgers.values()]
        self.size = max([len(ledgers), *sizes])

    @property
    def ranks(self) -> list[int]:
        return sorted(self.ledgers)

    @property
    def tracks(self) -> list[SharedTrack]:
        """Every optimizer that stepped, with the ranks that had one like it.

        None where several processes never met: they are not replicas of one another.
        """
        return self._tracks_and_guesses[0]

    @property
    def maybe_forgotten(self) -> list[tuple[SharedTrack, list[Difference]]]:
        """Optimizers with layers of each rank's own, or forgotten ones: see `apart_by_design`."""
        return self._tracks_and_guesses[1]

    @cached_property
    def _tracks_and_guesses(
        self,
    ) -> tuple[list[SharedTrack], list[tuple[SharedTrack, list[Difference]]]]:
        if self.size > 1 and not self.started_group:
            return [], []
        found: dict[str, dict[int, Track]] = {}
        for rank, ledger in self.ledgers.items():
            for track in ledger.tracks:
                if track.count and track.parameters:
                    found.setdefault(track.key, {})[rank] = track
        is_cut_off = self.has_failed() and not any(f.joins for f in self.facts)
        whole = [SharedTrack(key, held, self.size, is_cut_off) for key, held in found.items()]
        alike: dict[str, list[SharedTrack]] = {}
        for one in whole:
            alike.setdefault(one.made_as, []).append(one)
        apart = [apart_by_design(together, whole) for together in alike.values()]
        guesses: list[tuple[SharedTrack, list[Difference]]] = []
        for together, (names, is_guess) in zip(alike.values(), apart, strict=True):
            if is_guess and names:
                # At the step that `apart_by_design` has looked at: another one may show none.
                differences = together[0].differences("entry", 0)
                guesses.append((together[0], [d for d in differences if d.name in names]))
            _tell_replicas(together, names)
        return whole, guesses

    @cached_property
    def compared(self) -> list[SharedTrack]:
        """Those of them that several ranks have as replicas of one model."""
        return [track for track in self._alike if track not in self.alone]

    @property
    def in_step(self) -> list[SharedTrack]:
        """Those of them whose replicas are to agree after each step, and not now and then."""
        return [t for t in self.compared if t.held and not t.returns_to_agreement]

    @cached_property
    def alone(self) -> list[SharedTrack]:
        """Those that look like replicas and may be models of each rank's own."""
        if self.sync_of_lockstep():
            return []
        return [track for track in self._alike if may_be_own_models(self.ledgers, track)]

    @cached_property
    def _alike(self) -> list[SharedTrack]:
        shared = [track for track in self.tracks if len(track.ranks) > 1]
        return [
            track
            for track in shared
            if not are_own_models(track)
            and not tell_of_own_models(self.ledgers, self.tracks, track)
        ]

    def trains_own_models(self) -> bool:
        """Does each rank train a model of its own?"""
        return not self.compared and any(len(track.ranks) > 1 for track in self.tracks)

    @property
    def steps(self) -> int:
        """Optimizer steps, of the optimizer and the rank that took most."""
        counts = [t.count for ledger in self.ledgers.values() for t in ledger.tracks]
        return max(counts, default=0)

    @property
    def facts(self) -> list[ProcessFacts]:
        """What is known of each rank's process as a whole."""
        return [ledger.facts for ledger in self.ledgers.values()]

    @property
    def started_group(self) -> bool:
        return any(ledger.started_group for ledger in self.ledgers.values())

    def has_failed(self) -> bool:
        """Did a rank end with an exception or not at all, so that counts prove nothing?"""
        codes = [ledger.exit_code for ledger in self.ledgers.values()]
        failed = any(ledger.failure is not None for ledger in self.ledgers.values())
        stuck = any(ledger.stuck_in is not None for ledger in self.ledgers.values())
        return failed or stuck or any(codes) or bool(self.lost)

    @property
    def unseen(self) -> list[str]:
        """What the audit wanted to look at and could not: nothing is said of that."""
        return list(dict.fromkeys(error for facts in self.facts for error in facts.unseen))

    @property
    def lost(self) -> list[int]:
        """The ranks that left no ledger, though they were asked for it."""
        alone = any(f.alone for f in self.facts)
        return [] if alone else [r for r in range(self.size) if r not in self.ledgers]

    def sync_of_lockstep(self) -> bool:
        """Do lockstep's own GradientSyncs weigh the gradients?"""
        return any(f.lockstep for f in self.facts)

    @property
    def subgroups(self) -> list[list[int]]:
        """The groups of several ranks, and not of all, that the program has made."""
        made = {tuple(ranks) for facts in self.facts for ranks in facts.subgroups if ranks}
        return [list(ranks) for ranks in sorted(made) if 1 < len(ranks) < self.size]

    def is_model_parallel(self) -> bool:
        """Ranks that share one sample's work read the same samples on purpose."""
        held = [p for led in self.ledgers.values() for t in led.tracks for p in t.parameters]
        # Fully sharded within a row of a mesh whose other axis cuts layers up.
        within = any(f.fsdp_ranks is not None and f.fsdp_ranks < self.size for f in self.facts)
        is_cut = within or not any(f.fsdp for f in self.facts)
        sharded = is_cut and any(p.sharded for p in held)
        cut_up = any(track.apart & names_in_modules(track) for track in self.tracks)
        apart = sharded or bool(self.subgroups) or cut_up or any(f.all_to_all for f in self.facts)
        return apart and not any(p.wrapper for p in held)


def _tell_replicas(together: Sequence[SharedTrack], apart: Set[str]) -> None:
    """Let optimizers of one set of parameters know which are replicas, and when they meet."""
    for one in together:
        one.keep_apart(apart)
    at_home = kept_at_home(together)
    for one in together:
        one.at_home = at_home
        one.keep_apart(at_home)
    meets_again = meet_again(together)
    for one in together:
        one.meets_again = meets_again
