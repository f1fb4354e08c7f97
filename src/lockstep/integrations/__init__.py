# SPDX-License-Identifier: Apache-2.0
"""lockstep with other libraries: Lightning, transformers, Ray Tune, and loggers.

A program imports an integration, and with it the other library, when it uses it. Inside lockstep
only `TorchTrainer.as_trainable`, `TrainingOperator.from_lightning` and the command line do so.
"""
