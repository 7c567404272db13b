"""The sweep application: many federations on Ray Tune, compared in one table. Built on fl_lightning's public names."""

from tune.launch import run_sweep

__all__ = ["run_sweep"]
