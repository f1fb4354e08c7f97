# SPDX-License-Identifier: Apache-2.0
"""Verdicts on recorded programs of which one thing was changed, and on facts made by hand."""

from tests.audit.traces import TRACES, read_trace

from lockstep.audit.judgement import judge


def _recorded(name):
    return read_trace(TRACES / f"{name}.json.xz")


def _graver(ledgers):
    return [f.code for f in judge(ledgers) if f.severity != "notice"]


def test_losses_that_are_nearly_alike_are_no_shared_loss():
    """Ranks that begin to train a language model all have about the logarithm of its vocabulary."""
    ledgers = _recorded("bugs/f_not_divided")
    for ledger in ledgers:
        for step in ledger.tracks[0].steps:
            step.backwards[0].loss = 10.82 + 0.002 * ledger.rank
    assert _graver(ledgers) == ["LS205"]
    for ledger in ledgers:
        for step in ledger.tracks[0].steps:
            step.backwards[0].loss = 10.82
    assert _graver(ledgers) == []
