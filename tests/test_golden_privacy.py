"""Golden dp_sam: a batch-level ascent has no sensitivity to speak of; the ascents that are shipped keep C."""

import torch
from golden_cases import assert_close, cases

from fl_lightning.local.solver import Context
from fl_lightning.local.transforms import clipped_sum, private

(CASE,) = cases("privacy.json", "dp_sam")
GIVEN, EXPECTED = CASE["inputs"], CASE["expected"]
W = torch.tensor([GIVEN["w"]], dtype=torch.float64)
COMMON = [0.1] * 32 + [-0.1] * 31  # GIVEN["common_x"] in words


class Points:
    """f_i(w) = (w - x_i)^2 / 2, whose gradient is w - x_i."""

    def per_sample_gradients(self, w: torch.Tensor, batch: tuple) -> torch.Tensor:
        return w - batch[0].unsqueeze(1)

    def per_sample_ascent_gradients(self, w: torch.Tensor, batch: tuple, rho: float) -> torch.Tensor:
        rows = self.per_sample_gradients(w, batch)
        return rows + rho * torch.sign(rows)


def batch(*extra: float) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.tensor([*COMMON, *extra], dtype=torch.float64)
    return x, torch.zeros(len(x))


def test_batch_level_ascent_moves_every_gradient() -> None:
    sums = []
    for examples in (batch(), batch(GIVEN["extra_x"])):
        rows = Points().per_sample_gradients(W, examples)
        e = GIVEN["rho"] * torch.sign(rows.mean(dim=0))
        sums.append(float(clipped_sum(Points().per_sample_gradients(W + e, examples), GIVEN["C"])))
    assert_close(sums, [EXPECTED["sum_without"], EXPECTED["sum_with"]], CASE["tol"])
    assert_close(sums[1] - sums[0], EXPECTED["change"], CASE["tol"])
    assert sums[1] - sums[0] > 6 * EXPECTED["claimed_sensitivity"]


def test_per_sample_ascent_keeps_the_sensitivity() -> None:
    """One example more, wherever it lies, moves the clipped sum by at most C, and by the golden one as claimed."""
    transform = private(GIVEN["C"], (0.0,), ascent_radius=GIVEN["rho"])
    ctx = Context(0, W, Points(), torch.Generator(), 1.0)
    gradient = transform(Points().per_sample_gradients, ctx)
    before = float(gradient(W, batch()))
    for x in (GIVEN["extra_x"], -0.01, 0.0, 0.01, 0.5, -1e9, 1e9):
        assert abs(float(gradient(W, batch(x))) - before) <= EXPECTED["claimed_sensitivity"] + 1e-12
