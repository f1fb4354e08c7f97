# SPDX-License-Identifier: Apache-2.0
"""The clock of `lockstep.recovery.polling_clock`."""

from lockstep.recovery.polling_clock import PollingClock


def test_it_goes_with_the_polls_and_stands_still_without_them():
    times = [7.0, 7.25, 7.75, 5000.0, 5000.5]
    clock = PollingClock(read=iter(times).__next__)
    assert [clock.tick() for _ in times] == [0.0, 0.25, 0.75, 1.75, 2.25]
