# SPDX-License-Identifier: Apache-2.0
"""What is hooked into torch while a program is watched."""
