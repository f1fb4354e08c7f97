# SPDX-License-Identifier: Apache-2.0
"""Measurements beside what a user would write instead; `make bench` runs them."""
