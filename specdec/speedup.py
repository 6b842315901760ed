"""What a drafter is worth: the papers' formulas for tau and the speed-up, to predict and to plan.

* arXiv:2211.17192 (Leviathan et al.): if those before it were accepted, each draft token is
  accepted with probability a; a draft of K tokens yields tau = 1 + a + ... + a^K per target pass.
* arXiv:2602.06036 (DFlash): whatever made tau what it is, a round emits tau tokens in T_d + T_t
  seconds, where plain decoding would have taken tau L.
* Strix Halo: a target with experts takes longer to verify a block than to take a step, T_t > L.

Leviathan counts time in steps of the target (L = 1), DFlash in seconds; the names of the arguments
say which (`*_cost` or `*_seconds`). Where we differ: Leviathan's verification costs one step, ours
may cost more, and `eta` can include what the loop itself costs. K counts the drafts of a chain.
"""

import math
from collections.abc import Callable
from typing import NamedTuple


def expected_tau(acceptance: float, n_drafts: int) -> float:
    """Tokens per target pass, (1 - a^(K+1)) / (1 - a), and K + 1 where a = 1.

    `acceptance` is a, the probability that a draft token is accepted if those before it were;
    `n_drafts` is K. Exact to rounding next to a = 1 too. Eq. 1, arXiv:2211.17192.
    Raises ValueError for an acceptance outside [0, 1] or a K that is not a whole number >= 0.
    """
    _check_share("acceptance", acceptance)
    _check_count("n_drafts", n_drafts, at_least=0)
    if acceptance == 0 or acceptance == 1:  # the logarithm, or the denominator, has no value there
        return 1.0 + acceptance * n_drafts
    # a^(K+1) - 1 as expm1: next to a = 1 the plain difference loses seven digits
    return -math.expm1((n_drafts + 1) * math.log(acceptance)) / (1 - acceptance)


def acceptance_for_tau(tau: float, n_drafts: int) -> float:
    """The acceptance a at which drafts of K tokens yield `tau`: the inverse of `expected_tau`.

    Turns a measured tau into the a of the formulas, to 1e-15, by bisection: tau grows with a.
    Raises ValueError for K < 1 (tau is 1 whatever a is) or a tau outside [1, K + 1].
    """
    _check_count("n_drafts", n_drafts, at_least=1)
    _check(1 <= tau <= n_drafts + 1, "tau", tau, f"a number in [1, n_drafts + 1 = {n_drafts + 1}]")
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if expected_tau(middle, n_drafts) < tau:
            low = middle
        else:
            high = middle
    return high


def tau_kept(acceptance: float, n_drafts: int, unnameable_share: float) -> float:
    """The share of tau left to a drafter that cannot name a share m of the tokens.

    That is tau(b) / tau(a), b = a (1 - m), as an unnameable token is a certain refusal. It takes
    the unnameable tokens to be as easy to draft as the others; rare tokens seldom are, so the true
    loss should be smaller. Strix Halo has "about 10%" for m = 0.03; this gives 9.8%: its tau of 4.9
    with K = 15 (a block of 16, less the root) is a = 0.802, and at b = 0.778 tau is 4.42.
    `acceptance` and `n_drafts` as in `expected_tau`. From Eq. 1, arXiv:2211.17192.
    Raises ValueError as `expected_tau`, and for a share outside [0, 1].
    """
    _check_share("unnameable_share", unnameable_share)
    full = expected_tau(acceptance, n_drafts)
    return expected_tau(acceptance * (1 - unnameable_share), n_drafts) / full


def expected_speedup(
    acceptance: float,
    n_drafts: int,
    draft_cost: float,
    *,
    one_pass: bool = False,
    verify_cost: float = 1.0,
) -> float:
    """Speed-up over plain decoding, (1 - a^(K+1)) / ((1 - a) (cK + 1)).

    `draft_cost` is c, one pass of the drafter in steps of the target. A drafter that fills its
    whole block in one pass (DFlash, Medusa) has `one_pass=True`: c in place of cK, and nothing for
    K = 0. `verify_cost` is T_t / L, the verification of K + 1 tokens in steps of the target, in
    place of the theorem's 1. `acceptance` and `n_drafts` as in `expected_tau`. Theorem 3.8,
    arXiv:2211.17192.
    Raises ValueError as `expected_tau`, for a draft cost < 0 or a verification cost <= 0.
    """
    tau = expected_tau(acceptance, n_drafts)
    _check_cost("draft_cost", draft_cost)
    _check_positive("verify_cost", verify_cost)
    n_passes = min(n_drafts, 1) if one_pass else n_drafts
    return tau / (draft_cost * n_passes + verify_cost)


def best_n_drafts(
    acceptance: float,
    draft_cost: float,
    *,
    max_drafts: int = 64,
    one_pass: bool = False,
    verify: Callable[[int], float] | None = None,
) -> int:
    """The K in 0..max_drafts with the largest `expected_speedup`; 0 means plain decoding.

    `verify(n)` is the measured cost of a target pass over n = K + 1 tokens in steps of the target,
    T_t / L; None stands for one step whatever n is. Every K is tried, since a measured cost may
    jump; of equals the smallest wins; plain decoding counts as 1, without asking `verify`. With
    `verify` None, drafting a token a pass pays just when a > c (Corollary 3.9), and a `one_pass`
    drafter that pays gets `max_drafts`, unless a^K vanishes. Other arguments as in
    `expected_speedup`. Section 3.5, arXiv:2211.17192.
    Raises ValueError as `expected_speedup`, and for a `max_drafts` that is not a whole number >= 0.
    """
    _check_count("max_drafts", max_drafts, at_least=0)

    def speedup(n_drafts: int) -> float:
        verify_cost = 1.0 if verify is None or n_drafts == 0 else verify(n_drafts + 1)
        return expected_speedup(
            acceptance, n_drafts, draft_cost, one_pass=one_pass, verify_cost=verify_cost
        )

    return max(range(max_drafts + 1), key=speedup)


def eta(
    tau: float,
    step_seconds: float,
    draft_seconds: float,
    verify_seconds: float,
    *,
    loop_seconds: float = 0.0,
    plain_loop_seconds: float = 0.0,
) -> float:
    """Speed-up from measured times, tau L / (T_d + T_t). Eq. 1, arXiv:2602.06036.

    `tau` tokens per target pass; `step_seconds` L, one step of plain decoding; `draft_seconds` T_d
    and `verify_seconds` T_t, of one round. What else a loop does (accept, commit, Python) takes
    `loop_seconds` o a round, and `plain_loop_seconds` o_plain a token of plain decoding:
    tau (L + o_plain) / (T_d + T_t + o). Any unit will do if it is the same for all.
    Strix Halo: 4.9 * 125 ms / 230 ms = 2.66, measured 2.15; o = 55 ms would explain the difference.
    Raises ValueError for tau < 1, a step or verification of no time, or any negative time.
    """
    _check_tau(tau)
    _check_positive("step_seconds", step_seconds)
    _check_cost("draft_seconds", draft_seconds)
    _check_positive("verify_seconds", verify_seconds)
    _check_cost("loop_seconds", loop_seconds)
    _check_cost("plain_loop_seconds", plain_loop_seconds)
    plain_seconds = tau * (step_seconds + plain_loop_seconds)
    return plain_seconds / (draft_seconds + verify_seconds + loop_seconds)


def break_even_draft_seconds(tau: float, step_seconds: float, verify_seconds: float) -> float:
    """The draft time T_d at which eta = 1, tau L - T_t: a faster drafter pays, a slower one costs.

    (tau - 1) L where a verification takes one step, T_t = L. Negative where no drafter can pay at
    this tau. In seconds, like its arguments (see `eta`), and without the loops' own time.
    From Eq. 1, arXiv:2602.06036. Raises ValueError as `eta`.
    """
    _check_tau(tau)
    _check_positive("step_seconds", step_seconds)
    _check_positive("verify_seconds", verify_seconds)
    return tau * step_seconds - verify_seconds


class EtaBounds(NamedTuple):
    """Where eta tends as one of its two costs is taken away, all else equal."""

    free_draft: float  # T_d -> 0: tau L / T_t
    verify_as_step: float  # T_t -> L: tau L / (T_d + L)


def eta_bounds(
    tau: float, step_seconds: float, draft_seconds: float, verify_seconds: float
) -> EtaBounds:
    """What is to be gained from a faster drafter, and from a verification that costs one step.

    Arguments, units and errors as in `eta`, without the loops' own time. From Eq. 1,
    arXiv:2602.06036. Strix Halo, with T_d = 25 ms and T_t = 205 ms, could go from 2.7 to 3.0 and to
    4.1: its verification is the one to work on.
    """
    return EtaBounds(
        free_draft=eta(tau, step_seconds, 0.0, verify_seconds),
        verify_as_step=eta(tau, step_seconds, draft_seconds, step_seconds),
    )


def experts_woken(n_tokens: int, n_experts: int, n_routed: int) -> float:
    """Expected distinct experts of a layer that a block of n tokens wakes, E (1 - (1 - k/E)^n).

    `n_experts` is E, `n_routed` is k: each token is routed to k different experts, every set of k
    equally likely, independently of the other tokens (as in MoESD, arXiv:2505.19645). Shared
    experts are not counted. Real routers favour some experts, and tokens of a block are alike:
    Strix Halo counts 47 of 256 for n = 16 and k = 8, where this gives 102.
    Raises ValueError for counts that are not whole, n < 0, E < 1, or k outside [1, E].
    """
    _check_count("n_tokens", n_tokens, at_least=0)
    _check_count("n_experts", n_experts, at_least=1)
    _check_count("n_routed", n_routed, at_least=1)
    _check(n_routed <= n_experts, "n_routed", n_routed, f"at most n_experts = {n_experts}")
    return n_experts * (1 - (1 - n_routed / n_experts) ** n_tokens)


def moe_verify_cost(
    woken: float, n_routed: int, *, expert_share: float, n_shared: int = 0
) -> float:
    """Verification of a block by a MoE in steps of the target, T_t / L.

    1 + s ((woken + shared) / (k + shared) - 1): a step is the time to read weights, and a block
    reads all but the experts once, as a step does, and `woken` experts (measured, or
    `experts_woken`) in place of k = `n_routed`; `n_shared` experts are read by both. `expert_share`
    is s, the share of a step's time that its k + shared experts take. Our formula for Strix Halo's
    remark that "only the expert share grows"; its 47 woken (k = 8, one shared) and 1.6 steps make s
    about 0.15.
    Raises ValueError for s outside [0, 1], k < 1, shared < 0, or fewer woken than one token wakes.
    """
    _check_count("n_routed", n_routed, at_least=1)
    _check_count("n_shared", n_shared, at_least=0)
    _check_share("expert_share", expert_share)
    least = n_routed * (1 - 1e-9)  # experts_woken(1, E, k) may be a rounding below k
    _check(least <= woken < math.inf, "woken", woken, f"at least n_routed = {n_routed}, finite")
    return 1 + expert_share * ((woken + n_shared) / (n_routed + n_shared) - 1)


def _check(holds: bool, name: str, value: float, expected: str) -> None:
    if not holds:  # false for a NaN in every comparison below
        raise ValueError(f"{name} is {value!r}, expected {expected}")


def _check_share(name: str, value: float) -> None:
    _check(0 <= value <= 1, name, value, "a number in [0, 1]")


def _check_cost(name: str, value: float) -> None:
    _check(0 <= value < math.inf, name, value, "a finite number of at least 0")


def _check_positive(name: str, value: float) -> None:
    _check(0 < value < math.inf, name, value, "a finite number above 0")


def _check_tau(tau: float) -> None:
    _check(1 <= tau < math.inf, "tau", tau, "a finite number of at least 1")


def _check_count(name: str, value: int, at_least: int) -> None:
    whole = value >= at_least and value % 1 == 0
    _check(whole, name, value, f"a whole number of at least {at_least}")
