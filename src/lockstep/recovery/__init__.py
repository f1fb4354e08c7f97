# SPDX-License-Identifier: Apache-2.0
"""Recovery: the driver forms the process group anew when a worker dies or hangs.

The driver decides, workers report. A worker's death breaks the run's process group; the survivors
leave it, report how far they have come, and form the next generation, with or without a spare that
replaces the lost worker. No committed step is lost.
"""
