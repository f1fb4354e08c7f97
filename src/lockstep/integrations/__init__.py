# SPDX-License-Identifier: Apache-2.0
"""Other people's front doors: each module here is imported only by who asks for it."""
