# SPDX-License-Identifier: Apache-2.0
"""Reads the program's own text, to explain a verdict: which line, and why. It makes none."""
