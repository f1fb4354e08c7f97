# SPDX-License-Identifier: Apache-2.0
"""The first step through TorchTrainer, with the workers told to start before torch is imported."""

from __future__ import annotations

import lockstep

lockstep.prestart(num_workers=2)

from lockstep_startup import main  # noqa: E402  torch is imported below, while they start

if __name__ == "__main__":
    main()
