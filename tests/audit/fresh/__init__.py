# SPDX-License-Identifier: Apache-2.0
"""A pool of programs that nobody had seen, and its score."""
