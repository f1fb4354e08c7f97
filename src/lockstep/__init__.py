# SPDX-License-Identifier: Apache-2.0
"""N workers train one PyTorch model, and no gradient is ever silently wrong."""

__all__: list[str] = []
