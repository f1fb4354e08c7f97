# SPDX-License-Identifier: Apache-2.0
"""lockstep beside other libraries: Lightning, Ray Tune, and loggers.

Only a program that uses an integration imports it, and with it the library. Inside lockstep only
`TorchTrainer.as_trainable`, `TrainingOperator.from_lightning` and the command line do.
"""
