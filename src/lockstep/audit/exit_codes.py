# SPDX-License-Identifier: Apache-2.0
"""How `lockstep audit` ends, and the code of the finding that it could not look."""

USAGE = 2
FOUND = 65
NOT_WATCHED = 66
HUNG = 124
"""As timeout(1) of a command that it has ended."""
BLIND = "LS406"
"""The code of a finding that means `NOT_WATCHED`."""
