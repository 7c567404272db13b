"""The configuration: one schema, composed from presets, files and overrides."""

from fl_lightning.config.axis import Axis
from fl_lightning.config.compose import load_config
from fl_lightning.config.schema import RunConfig
from fl_lightning.config.space import Cell, validate_space
from fl_lightning.config.sweep import Selection, SweepConfig, load_sweep

__all__ = ["Axis", "Cell", "RunConfig", "Selection", "SweepConfig", "load_config", "load_sweep", "validate_space"]
