"""A laboratory for private federated learning.

from fl_lightning import RunConfig, run
result = run(RunConfig(algorithm="dp_fedsam", fl={"rounds": 10}))
print(result.final["test_accuracy"], result.final["epsilon"])
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

try:
    __version__ = version("fl-lightning")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0.0.0"

_HOMES = {
    "Algorithm": "fl_lightning.algorithms.algorithm",
    "ConfigError": "fl_lightning.errors",
    "DataError": "fl_lightning.errors",
    "FLError": "fl_lightning.errors",
    "Ledger": "fl_lightning.privacy",
    "Message": "fl_lightning.records",
    "Observer": "fl_lightning.records",
    "ParamLayout": "fl_lightning.vector",
    "PrivacyError": "fl_lightning.errors",
    "Release": "fl_lightning.records",
    "RoundRecord": "fl_lightning.records",
    "RunConfig": "fl_lightning.config",
    "RunResult": "fl_lightning.records",
    "ServerState": "fl_lightning.records",
    "TrackingError": "fl_lightning.errors",
    "fit": "fl_lightning.federation",
    "generator": "fl_lightning.rng",
    "load_config": "fl_lightning.config",
    "run": "fl_lightning.session",
    "run_round": "fl_lightning.federation",
}
"""Public name -> its module; loaded when first asked for, so that `fl-lightning --help` does not wait for torch."""

__all__ = sorted([*_HOMES, "__version__"])

if TYPE_CHECKING:
    from fl_lightning.config import RunConfig as RunConfig
    from fl_lightning.records import RunResult as RunResult
    from fl_lightning.session import run as run


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'fl_lightning' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
