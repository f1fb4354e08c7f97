# SPDX-License-Identifier: Apache-2.0
"""Callbacks that log the results of `train` and `validate`: to files, TensorBoard, MLflow, Ray."""

from lockstep.integrations.loggers.base import Logger, Row
from lockstep.integrations.loggers.files import CSVLogger, JSONLinesLogger
from lockstep.integrations.loggers.mlflow import MLflowLogger
from lockstep.integrations.loggers.ray_metrics import RayMetricsLogger
from lockstep.integrations.loggers.tensorboard import TensorBoardLogger

__all__ = [
    "CSVLogger",
    "JSONLinesLogger",
    "Logger",
    "MLflowLogger",
    "RayMetricsLogger",
    "Row",
    "TensorBoardLogger",
]
