# SPDX-License-Identifier: Apache-2.0
"""Random programs whose truth is measured, and what the audit says of them."""
