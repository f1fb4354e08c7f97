# SPDX-License-Identifier: Apache-2.0
"""The version of lockstep; distributions read it here, too."""

__version__ = "0.1.0.dev0"
