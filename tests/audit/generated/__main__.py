# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.audit.generated [COUNT] [SEED]``: what the audit says of random programs.

Each program measures how far what its optimizer uses is from the gradient of one process on the
same global batch (`tests.audit.generated.program`). It is wrong if that is more than rounding.
Printed are which wrong ones were found, by kind, which right ones were called wrong, and how far
the factors that the findings name are from those that were measured.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.audit.generated.judged import judged
from tests.audit.pool import Pool


def main(count: int, seed: int) -> int:
    pool = Pool()
    tally: Counter[str] = Counter()
    missed, alarms, off = [], [], []
    try:
        with tempfile.TemporaryDirectory() as folder:
            for number in range(seed, seed + count):
                one = judged(pool, number, Path(folder) / "measured.json")
                kind = "wrong" if one.is_wrong else "right"
                tally[f"{kind}"] += 1
                if one.is_wrong and not one.is_found:
                    missed.append(one)
                if one.alarms:
                    alarms.append(one)
                if one.factor_is_off:
                    off.append(one)
    finally:
        pool.close()
    print(f"{tally['wrong']} wrong: {tally['wrong'] - len(missed)} found")
    print(f"{tally['right']} right: {len(alarms)} called wrong")
    for name, ones in (("missed", missed), ("alarm", alarms), ("factor off", off)):
        for one in ones:
            print(f"{name}: {one}")
    return 1 if alarms or off else 0


if __name__ == "__main__":
    sys.exit(main(*(int(a) for a in (sys.argv[1:] + ["100", "0"][len(sys.argv) - 1 :]))))
