"""Privacy accounting: the ledger of releases, the accountants behind it, calibration and the statement of a run."""

from fl_lightning.privacy.accountants import (
    ORDERS,
    compose,
    epsilon,
    gaussian_delta_exact,
    gaussian_epsilon_exact,
    rdp,
)
from fl_lightning.privacy.calibrate import calibrate_many, calibrate_noise
from fl_lightning.privacy.ledger import Ledger
from fl_lightning.privacy.segments import Segment, signature
from fl_lightning.privacy.statement import statement, summary

__all__ = [
    "ORDERS",
    "Ledger",
    "Segment",
    "calibrate_many",
    "calibrate_noise",
    "compose",
    "epsilon",
    "gaussian_delta_exact",
    "gaussian_epsilon_exact",
    "rdp",
    "signature",
    "statement",
    "summary",
]
