"""Tests in pairs, Holm's correction and the seeds needed, by hand, by counting and by simulation."""

import math

import pytest
import torch

from fl_lightning.analysis.paired import CONSTANT, EQUAL, NEEDS_MORE, NOT_FINITE, Paired, holm, paired, seeds_needed


def test_paired_t_by_hand() -> None:
    """Differences 0.01, 0.02, 0.06: mean 0.03, sd 0.026458, t = 1.96396 on 2 degrees of freedom, p = 0.188416."""
    found = paired([0.51, 0.62, 0.76], [0.50, 0.60, 0.70])
    t = 0.03 / (math.sqrt(0.0007) / math.sqrt(3))
    p = 1 - t / math.sqrt(2 + t * t)  # the two-sided tail of Student's t with 2 degrees of freedom
    assert (found.test, found.n) == ("t", 3)
    assert found.p == pytest.approx(p, rel=1e-6) and found.difference == pytest.approx(0.03)
    assert found.effect == pytest.approx(0.03 / math.sqrt(0.0007))


def test_from_ten_pairs_on_signed_ranks_by_counting() -> None:
    """All ten differences positive: two of the 2^10 sign patterns are so extreme."""
    first = [0.5 + 0.001 * i * i for i in range(1, 11)]
    assert paired(first, [0.5] * 10).test == "wilcoxon"
    assert paired(first, [0.5] * 10).p == pytest.approx(2 / 2**10)
    assert paired(first[:9], [0.5] * 9).test == "t"


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ([0.5], [0.4], NEEDS_MORE),
        ([0.5, 0.7], [0.1, 0.2], NEEDS_MORE),
        ([0.5, 0.7, 0.3], [0.5, 0.7, 0.3], EQUAL),
        ([0.3, 0.4, 0.5], [0.2, 0.3, 0.4], CONSTANT),  # 0.3 - 0.2 and 0.4 - 0.3 differ in the last bit only
        ([0.3, math.nan, 0.5], [0.2, 0.3, 0.4], NOT_FINITE),
        ([], [], NEEDS_MORE),
    ],
)
def test_no_p_value_where_there_is_nothing_to_judge_by(first: list[float], second: list[float], words: str) -> None:
    found = holm([paired(first, second)])[0]
    assert (found.p, found.p_holm, found.effect, found.needed, found.words) == (None, None, None, None, words)


def test_holm_steps_down_and_never_falls() -> None:
    ps = [0.04, 0.01, 0.03, 0.5]
    found = holm([Paired(3, 0.1, p=p, effect=1.0) for p in ps] + [Paired(2, 0.1, words=NEEDS_MORE)])
    assert [item.p_holm for item in found] == pytest.approx([0.09, 0.04, 0.09, 0.5, None])
    assert [item.needed for item in found[:4]] == [seeds_needed(1.0, 0.05 / 4)] * 4
    assert holm([Paired(3, 0.1, p=0.9, effect=0.1)] * 3)[0].p_holm == 1.0


def test_seeds_needed_agrees_with_simulated_experiments() -> None:
    """The textbook's 34 pairs for d_z = 0.5, and their power by 20,000 simulated experiments."""
    assert (seeds_needed(0.5), seeds_needed(1.0), seeds_needed(-1.0)) == (34, 10, 10)
    assert seeds_needed(0.0) is None and seeds_needed(0.001) is None and seeds_needed(50.0) == 3
    draws = torch.randn(20_000, 10, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 1.0
    t = draws.mean(dim=1) / draws.std(dim=1) * math.sqrt(10)
    assert float((t.abs() > 2.26216).double().mean()) == pytest.approx(0.803, abs=0.01)
