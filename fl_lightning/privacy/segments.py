"""Releases that cost the same, and what a client's releases look like, so that no resumed run changes them unseen."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fl_lightning.errors import PrivacyError
from fl_lightning.privacy.accountants import Array, curve
from fl_lightning.records import Release


@dataclass(frozen=True)
class Segment:
    """Releases that cost the same.

    `noise_multiplier` is rounded to 12 significant digits, so that 0.9 * C / C is one segment for every clip bound C.
    """

    mechanism: str
    noise_multiplier: float
    sampling: str
    rate: float
    covers: tuple[str, ...]

    def curve(self) -> Array:
        """RDP [A] of one of these releases (read-only)."""
        return curve(self.mechanism, self.noise_multiplier, self.sampling, self.rate)


Signature = tuple[tuple[Any, ...], ...]
"""One row per release: everything of its mechanism but the count, in the order of SIGNATURE_FIELDS."""

SIGNATURE_FIELDS = ("mechanism", "sensitivity", "noise", "sampling", "rate", "covers")


def signature(releases: Sequence[Release]) -> Signature:
    """What must not change unnoticed between a run and its resumption: noise, bound and sampling of every release."""
    return tuple(tuple(getattr(release, name) for name in SIGNATURE_FIELDS) for release in releases)


def check_signature(client: int, before: Signature, now: Signature) -> None:
    """Refuse a change of what `client` releases a round, with a PrivacyError that names the first difference."""
    if len(before) != len(now):
        raise PrivacyError(
            f"client {client} made {len(before)} releases a round before the checkpoint and would make {len(now)} now: "
            "resume with the settings of the checkpoint, or record the change as a new segment"
        )
    for old, new in zip(before, now, strict=True):
        for field, was, is_now in zip(SIGNATURE_FIELDS, old, new, strict=True):
            if was != is_now:
                raise PrivacyError(
                    f"{field} of client {client}'s release: {was} in the checkpoint, {is_now} now; resume with the "
                    "settings of the checkpoint, or record the change as a new segment"
                )
