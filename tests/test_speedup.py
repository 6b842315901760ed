"""The papers' formulas against values worked out by hand, and against their own definitions."""

import random
from collections.abc import Callable

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from specdec.speedup import (
    acceptance_for_tau,
    best_n_drafts,
    break_even_draft_seconds,
    eta,
    eta_bounds,
    expected_speedup,
    expected_tau,
    experts_woken,
    moe_verify_cost,
    tau_kept,
)

acceptances = st.floats(0, 1)


@pytest.mark.parametrize(
    ("acceptance", "n_drafts", "tau"),
    [
        (0.5, 2, 1.75),  # 1 + 1/2 + 1/4
        (0.5, 0, 1.0),
        (0.0, 5, 1.0),
        (1.0, 5, 6.0),
        (0.6, 2, 1.96),  # this and the next: 1.96 and 3.69 in Table 1, arXiv:2211.17192
        (0.8, 5, 3.68928),
    ],
)
def test_tau(acceptance: float, n_drafts: int, tau: float) -> None:
    """The exponent K in place of K + 1 (no bonus token); 0/0 at a = 1; the log of 0 at a = 0."""
    assert expected_tau(acceptance, n_drafts) == pytest.approx(tau, rel=1e-14)


def test_tau_next_to_one() -> None:
    """Cancellation: at a = 1 - d tau is K + 1 - K (K+1) d / 2 + ...; 1 - a^(K+1) is 6e-10 off."""
    assert expected_tau(1 - 1e-9, 15) == pytest.approx(16 - 120e-9, rel=1e-14)


@given(acceptances, st.integers(0, 64))
def test_tau_is_the_sum_of_the_survival_probabilities(acceptance: float, n_drafts: int) -> None:
    """A closed form that is not the sum it stands for, somewhere between the literals."""
    survival = sum(acceptance**i for i in range(n_drafts + 1))
    assert expected_tau(acceptance, n_drafts) == pytest.approx(survival, rel=1e-12)


def test_acceptance_for_tau() -> None:
    """A bisection that keeps the wrong half, stops early, or cannot reach the ends of [0, 1]."""
    assert acceptance_for_tau(1.75, 2) == pytest.approx(0.5, abs=1e-15)
    assert acceptance_for_tau(1.0, 3) == pytest.approx(0.0, abs=1e-15)
    assert acceptance_for_tau(4.0, 3) == 1.0


@given(acceptances, st.integers(1, 64))
def test_acceptance_for_tau_inverts(acceptance: float, n_drafts: int) -> None:
    """An inverse for another K, e.g. one that leaves out the bonus token."""
    tau = expected_tau(acceptance, n_drafts)
    assert acceptance_for_tau(tau, n_drafts) == pytest.approx(acceptance, abs=1e-12)


def test_tau_kept() -> None:
    """m taken from tau instead of from acceptance (0.5), or the ratio upside down (1.33)."""
    # a = 1/2 falls to 1/4: (1 + 1/4 + 1/16) / (1 + 1/2 + 1/4) = 1.3125 / 1.75
    assert tau_kept(0.5, 2, 0.5) == pytest.approx(0.75)
    assert tau_kept(0.5, 2, 0.0) == 1.0
    assert tau_kept(0.5, 2, 1.0) == pytest.approx(1 / 1.75)


def test_tau_kept_on_strix_halo() -> None:
    """m taken from tau (3%), or an inverse for K - 1 (9.86%), against the "about 10%" there."""
    acceptance = acceptance_for_tau(4.9, 15)
    assert acceptance == pytest.approx(0.8019, abs=5e-5)
    assert 1 - tau_kept(acceptance, 15, 0.03) == pytest.approx(0.0979, abs=5e-5)


def test_expected_speedup() -> None:
    """A draft pass too many or too few, verify_cost or one_pass ignored, a pass paid at K = 0."""
    assert expected_speedup(0.5, 2, 0.25) == pytest.approx(1.75 / 1.5)
    assert expected_speedup(0.5, 2, 0.25, one_pass=True) == pytest.approx(1.75 / 1.25)
    assert expected_speedup(0.5, 2, 0.25, verify_cost=2.0) == pytest.approx(1.75 / 2.5)
    assert expected_speedup(0.5, 0, 0.25) == 1.0
    assert expected_speedup(0.5, 0, 0.25, one_pass=True) == 1.0


def test_best_n_drafts() -> None:
    """An argmax off by one, a limit left out or off by one, one_pass not passed on."""
    # a = 0.8, c = 0.1: K = 5 gives 3.689/1.5 = 2.460, 6 gives 3.951/1.6 = 2.470, 7 gives 2.448
    assert best_n_drafts(0.8, 0.1) == 6
    assert best_n_drafts(0.8, 0.1, max_drafts=4) == 4
    assert best_n_drafts(0.8, 0.1, max_drafts=0) == 0
    assert best_n_drafts(0.8, 0.1, max_drafts=20, one_pass=True) == 20
    assert best_n_drafts(0.0, 0.0) == 0  # all equal: the smallest


def test_best_n_drafts_with_a_measured_verification() -> None:
    """verify asked for K instead of K + 1 tokens, or a search that stops at the first maximum."""
    assert best_n_drafts(0.8, 0.1, verify=lambda n: 1.0 if n <= 4 else 3.0) == 3
    assert best_n_drafts(0.8, 0.1, verify=lambda n: 5.0 if n == 2 else 1.0) == 6


def test_plain_decoding_never_pays_for_verification() -> None:
    """K = 0 charged verify(1): at a = 1/2 tau < 2, so a verification of two steps never pays."""
    assert best_n_drafts(0.5, 0.0, verify=lambda n: 2.0) == 0


@given(acceptances, acceptances)
def test_drafting_pays_just_when_acceptance_exceeds_draft_cost(a: float, c: float) -> None:
    """An argmin, or a and c swapped. Corollary 3.9, arXiv:2211.17192, with its (1+a)/(1+c)."""
    assume(abs(a - c) > 1e-9)
    best = best_n_drafts(a, c, max_drafts=8)
    assert (best > 0) == (a > c)
    if a > c:
        assert expected_speedup(a, best, c) >= (1 + a) / (1 + c) * (1 - 1e-12)


def test_eta_on_strix_halo() -> None:
    """eta upside down (0.38), or T_t alone below the line (2.99)."""
    assert eta(4.9, 0.125, 0.025, 0.205) == pytest.approx(2.66, abs=0.005)


def test_eta_with_the_loops_own_time() -> None:
    """The overheads swapped (2.86), dropped (2), or o_plain paid once a round, not once a token."""
    assert eta(4.0, 0.1, 0.05, 0.15, loop_seconds=0.05) == pytest.approx(0.4 / 0.25)
    both = eta(4.0, 0.1, 0.05, 0.15, loop_seconds=0.05, plain_loop_seconds=0.01)
    assert both == pytest.approx(0.44 / 0.25)


def test_break_even() -> None:
    """tau - 1 and tau mixed up, or a draft at break-even that does not give eta = 1."""
    assert break_even_draft_seconds(4.9, 0.125, 0.125) == pytest.approx(0.4875)  # 3.9 * 0.125
    assert break_even_draft_seconds(4.9, 0.125, 0.205) == pytest.approx(0.4075)
    assert eta(4.9, 0.125, 0.4075, 0.205) == pytest.approx(1.0)
    assert break_even_draft_seconds(1.5, 0.1, 0.25) == pytest.approx(-0.1)  # no drafter pays


def test_eta_bounds_on_strix_halo() -> None:
    """The two bounds swapped, or T_d dropped from the second (4.9)."""
    bounds = eta_bounds(4.9, 0.125, 0.025, 0.205)
    assert bounds.free_draft == pytest.approx(2.988, abs=5e-4)  # 612.5 / 205
    assert bounds.verify_as_step == pytest.approx(4.083, abs=5e-4)  # 612.5 / 150


def test_experts_woken() -> None:
    """n and k swapped (103), k experts drawn with replacement (101), a first token not waking k."""
    assert experts_woken(16, 256, 8) == pytest.approx(101.96, abs=0.005)  # (31/32)^16 = 0.60171
    assert experts_woken(2, 4, 2) == 3.0  # 2, and half of the other 2
    assert experts_woken(1, 256, 8) == 8.0
    assert experts_woken(0, 256, 8) == 0.0
    assert experts_woken(3, 8, 8) == 8.0


def test_experts_woken_matches_a_simulation() -> None:
    """A formula for another routing law, against the mean over 4,000 simulated blocks.

    A count is a sum of negatively correlated indicators, so its variance is at most E x (1 - x) =
    61.4 with x = 0.398, and the mean's standard deviation at most 0.124. The tolerance of 0.75 is 6
    of those: odds of a false alarm below 1e-8, were the seed not fixed. Negative control: experts
    drawn with replacement, E (1 - (1 - 1/E)^(nk)) = 100.9, lie outside.
    """
    rng = random.Random(0)
    blocks = [[rng.sample(range(256), 8) for _ in range(16)] for _ in range(4000)]
    mean = sum(len(set().union(*block)) for block in blocks) / len(blocks)
    assert experts_woken(16, 256, 8) == pytest.approx(mean, abs=0.75)
    with_replacement = 256 * (1 - (1 - 1 / 256) ** 128)
    assert with_replacement != pytest.approx(mean, abs=0.75)


def test_moe_verify_cost() -> None:
    """The shared expert left out of one side or both (1.65 reads 1.73), or all of T_t scaled."""
    # (47 + 1) / (8 + 1) = 16/3, and 1 + 0.15 * 13/3 = 1.65: Strix Halo's 1.6
    assert moe_verify_cost(47, 8, n_shared=1, expert_share=0.15) == pytest.approx(1.65)
    assert moe_verify_cost(47, 8, expert_share=1.0) == pytest.approx(5.875)  # its naive 47/8
    assert moe_verify_cost(47, 8, expert_share=0.0) == 1.0


def test_a_block_of_one_token_costs_one_step() -> None:
    """experts_woken a rounding below k refused by moe_verify_cost, for any E and k."""
    for n_experts in range(1, 130):
        for n_routed in range(1, n_experts + 1):
            woken = experts_woken(1, n_experts, n_routed)
            assert moe_verify_cost(woken, n_routed, expert_share=0.5) == pytest.approx(1.0)


NAN = float("nan")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: expected_tau(1.5, 2), r"acceptance is 1\.5, expected a number in \[0, 1\]"),
        (lambda: expected_tau(NAN, 2), "acceptance is nan"),
        (lambda: expected_tau(0.5, -1), "n_drafts is -1, expected a whole number of at least 0"),
        (lambda: expected_tau(0.5, 1.5), r"n_drafts is 1\.5"),  # pyright: ignore
        (lambda: acceptance_for_tau(1.0, 0), "n_drafts is 0"),
        (lambda: acceptance_for_tau(4.5, 3), r"tau is 4\.5, .* \[1, n_drafts \+ 1 = 4\]"),
        (lambda: acceptance_for_tau(0.9, 3), r"tau is 0\.9"),
        (lambda: tau_kept(0.5, 2, 3.0), r"unnameable_share is 3\.0"),
        (lambda: expected_speedup(0.5, 2, -0.1), r"draft_cost is -0\.1, .* at least 0"),
        (lambda: expected_speedup(0.5, 2, 0.1, verify_cost=0.0), r"verify_cost is 0\.0, .* above"),
        (lambda: best_n_drafts(0.5, 0.1, max_drafts=-1), "max_drafts is -1"),
        (lambda: best_n_drafts(0.5, 0.1, verify=lambda n: -1.0), r"verify_cost is -1\.0"),
        (lambda: eta(0.5, 1.0, 1.0, 1.0), r"tau is 0\.5"),
        (lambda: eta(2.0, 0.0, 1.0, 1.0), r"step_seconds is 0\.0"),
        (lambda: eta(2.0, 1.0, -1.0, 1.0), r"draft_seconds is -1\.0"),
        (lambda: eta(2.0, 1.0, 1.0, float("inf")), "verify_seconds is inf"),
        (lambda: eta(2.0, 1.0, 1.0, 1.0, loop_seconds=-1.0), r"^loop_seconds is -1\.0"),
        (lambda: eta(2.0, 1.0, 1.0, 1.0, plain_loop_seconds=-1.0), "plain_loop_seconds is"),
        (lambda: break_even_draft_seconds(0.5, 1.0, 1.0), r"tau is 0\.5"),
        (lambda: break_even_draft_seconds(2.0, -1.0, 1.0), r"step_seconds is -1\.0"),
        (lambda: break_even_draft_seconds(2.0, 1.0, 0.0), r"verify_seconds is 0\.0"),
        (lambda: eta_bounds(2.0, 1.0, -1.0, 1.0), r"draft_seconds is -1\.0"),
        (lambda: experts_woken(-1, 8, 2), "n_tokens is -1"),
        (lambda: experts_woken(1, 0, 2), "n_experts is 0"),
        (lambda: experts_woken(1, 8, 0), "n_routed is 0"),
        (lambda: experts_woken(1, 8, 9), "n_routed is 9, expected at most n_experts = 8"),
        (lambda: moe_verify_cost(8, 47, expert_share=0.5), "woken is 8, .* n_routed = 47"),
        (lambda: moe_verify_cost(NAN, 8, expert_share=0.5), "woken is nan"),
        (lambda: moe_verify_cost(47, 0, expert_share=0.5), "n_routed is 0"),
        (lambda: moe_verify_cost(47, 8, expert_share=1.5), r"expert_share is 1\.5"),
        (lambda: moe_verify_cost(47, 8, expert_share=0.5, n_shared=-1), "n_shared is -1"),
    ],
)
def test_wrong_input_is_named(call: Callable[[], object], message: str) -> None:
    """A wrong argument that yields a plausible number, or an error that names another argument."""
    with pytest.raises(ValueError, match=message):
        call()
