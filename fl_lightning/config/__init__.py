"""The configuration: one schema, composed from presets, files and overrides."""

from fl_lightning.config.axis import Axis
from fl_lightning.config.cluster import RayConfig, needed_paths
from fl_lightning.config.compose import load_config
from fl_lightning.config.schema import RunConfig
from fl_lightning.config.space import Cell, validate_space
from fl_lightning.config.sweep import Selection, SweepConfig
from fl_lightning.config.sweep_file import load_ray, load_sweep

__all__ = [
    "Axis",
    "Cell",
    "RayConfig",
    "RunConfig",
    "Selection",
    "SweepConfig",
    "load_config",
    "load_ray",
    "load_sweep",
    "needed_paths",
    "validate_space",
]
