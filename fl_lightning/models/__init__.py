"""Image classifiers that adapt to the data set's shape. Importing this package does not import torch."""

from fl_lightning.models.build import MODEL_KINDS, build_model, check_fit

__all__ = ["MODEL_KINDS", "build_model", "check_fit"]
