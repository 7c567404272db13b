"""Keyed random generators: randomness is an argument, never a global.

A stream is named by (seed, purpose, round, client). Streams with different names are independent, so no result can
depend on the number of workers, on the order in which clients finish, or on what was drawn before.
"""

import hashlib

import numpy as np
import torch
from torch import Tensor


def stream_key(seed: int, purpose: str, round: int = 0, client: int = 0) -> int:
    """The 63-bit seed of the stream (seed, purpose, round, client): the head of a SHA-256 over the four names."""
    name = f"{seed}|{purpose}|{round}|{client}".encode()
    return int.from_bytes(hashlib.sha256(name).digest()[:8], "big") >> 1


def generator(seed: int, purpose: str, round: int = 0, client: int = 0) -> torch.Generator:
    """A CPU generator for one stream, at its start.

    Args:
        seed: the run's seed, 0 <= seed < 2**63.
        purpose: what is drawn, for example "cohort", "batches" or "noise".
        round: the round, from 1; 0 for what happens before the first round.
        client: the client's number.
    """
    return torch.Generator().manual_seed(stream_key(seed, purpose, round, client))


def numpy_generator(seed: int, purpose: str, round: int = 0, client: int = 0) -> np.random.Generator:
    """The same stream names for NumPy: PCG64 seeded by `stream_key`."""
    return np.random.Generator(np.random.PCG64(stream_key(seed, purpose, round, client)))


def gaussian(like: Tensor, std: float, noise: torch.Generator) -> Tensor:
    """N(0, std^2 I) of `like`'s shape, type and device, always drawn on the CPU so that devices agree."""
    return torch.randn(like.shape, generator=noise, dtype=like.dtype).mul_(std).to(like.device)
