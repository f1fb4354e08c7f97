# SPDX-License-Identifier: Apache-2.0
"""Nothing may be imported for the first time inside a test: torch's compiler sets variables."""

import torch._dynamo
import torch._inductor.runtime.cache_dir_utils

torch._inductor.runtime.cache_dir_utils.cache_dir()
