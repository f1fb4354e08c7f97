# SPDX-License-Identifier: Apache-2.0
"""A parameter server: one process holds the weights and the optimizers, and steps for all ranks."""
