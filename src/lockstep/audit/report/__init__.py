# SPDX-License-Identifier: Apache-2.0
"""How findings are shown: in a terminal, as a page."""
