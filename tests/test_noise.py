"""Noise: the generator against plain Python integers, its law, and the independence of its keys."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from specdec.noise import gumbel, key, mix, uniform
from tests.builders import FALSE_ALARM, chi_square, law

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15
Z = 5.8  # a normal variable is beyond this with odds 6.6e-9
N = 200_000

int64s = st.integers(-(2**63), 2**63 - 1)


def signed(x: int) -> int:
    return (x + 2**63) % 2**64 - 2**63


def finalise(z: int) -> int:
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
    return z ^ (z >> 31)


def finalise_inverse(z: int) -> int:
    """The number that `finalise` turns into z."""

    def unfold(x: int, n: int) -> int:
        z = x
        for _ in range(64 // n):
            z = x ^ (z >> n)
        return z

    z = unfold(z, 31) * pow(0x94D049BB133111EB, -1, 2**64) & MASK
    z = unfold(z, 27) * pow(0xBF58476D1CE4E5B9, -1, 2**64) & MASK
    return unfold(z, 30)


def key_of(*parts: int) -> int:
    state = 0
    for part in parts:
        state = finalise((state + (part + 1) * GOLDEN) & MASK)
    return state


def number(bits: int) -> float:
    return ((bits >> 12) + 0.5) * 2.0**-52


def whole(x: int) -> Tensor:
    return torch.tensor(signed(x))


def test_stream_of_a_key_is_splitmix64() -> None:
    """A wrong constant or shift, a signed shift, a counter off by one.

    The five numbers are the published output of SplitMix64 from state 1234567.
    """
    published = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert [finalise((1234567 + i * GOLDEN) & MASK) for i in range(1, 6)] == published
    assert uniform(whole(1234567), 5).tolist() == [number(bits) for bits in published]


@given(int64s)
def test_mix_is_the_finaliser_and_can_be_undone(x: int) -> None:
    """int64 arithmetic that differs from unsigned: shifted-in signs, saturation, a lost carry."""
    mixed = int(mix(torch.tensor(x)))
    assert mixed % 2**64 == finalise(x % 2**64)
    assert signed(finalise_inverse(mixed % 2**64)) == x


@given(int64s, st.lists(st.integers(-(2**70), 2**70), max_size=4))
def test_key_against_plain_integers(first: int, rest: list[int]) -> None:
    """A part that is dropped, reordered or overflows: any whole number is a key, modulo 2^64."""
    expected = signed(key_of(first, *rest))
    assert int(key(torch.tensor(first), *rest)) == expected
    assert int(key(torch.tensor(first), *map(whole, rest))) == expected, "tensor parts differ"


def test_keys_broadcast() -> None:
    """Parts that are zipped instead of broadcast, or broadcast along the wrong dimension."""
    seeds, index = torch.tensor([3, 4]), torch.tensor([[10, 11, 12], [20, 21, 22]])
    keys = key(seeds.unsqueeze(1), index, 1)
    assert keys.tolist() == [
        [signed(key_of(seed, i, 1)) for i in row]
        for seed, row in zip([3, 4], index.tolist(), strict=True)
    ]


def test_numbers_do_not_depend_on_the_batch() -> None:
    """A counter that runs over the batch, or numbers that change with how many are asked for."""
    keys = key(torch.arange(3).unsqueeze(1), torch.arange(4))
    numbers = uniform(keys, 7)
    assert numbers.shape == (3, 4, 7)
    assert uniform(keys).equal(numbers[..., 0])
    for i, j in itertools.product(range(3), range(4)):
        assert uniform(keys[i, j], 5).equal(numbers[i, j, :5])
        assert gumbel(keys[i, j], 7).equal(gumbel(keys, 7)[i, j])


def test_keys_differ_by_every_part() -> None:
    """A part that the hash ignores, or parts that can be swapped: equal noise in two places."""
    parts = list(itertools.product(range(7), repeat=4))
    table = torch.tensor(parts)
    keys = key(table[:, 0], table[:, 1], table[:, 2], table[:, 3]).tolist()
    shorter = key(table[:, 0], table[:, 1], table[:, 2]).unique().tolist()
    assert len(set(keys)) == len(parts)
    assert not set(keys) & set(shorter), "a key equals that of its first parts"


@pytest.mark.parametrize("bits", [0, 1, 2**63 - 1, 2**63, MASK - 2**11, MASK])
def test_numbers_are_inside_the_open_interval(bits: int) -> None:
    """A number of exactly 0 or 1, whose Gumbel noise is infinite: inf - inf is NaN for p = 0.

    The stream of the key is made to start with these very bits.
    """
    start = whole(finalise_inverse(bits) - GOLDEN)
    u = float(uniform(start))
    assert 0.0 < u < 1.0
    assert abs(u - bits / 2**64) < 2.0**-52
    assert gumbel(start, 1).isfinite().all()


def along_stream() -> Tensor:
    return uniform(key(torch.tensor(1), 2), N)


def along_seeds() -> Tensor:
    return uniform(key(torch.arange(N), 7, 3))


def along_lengths() -> Tensor:
    return uniform(key(torch.tensor(5), torch.arange(N), 3))


@pytest.mark.parametrize("draw", [along_stream, along_seeds, along_lengths])
def test_numbers_are_uniform(draw) -> None:
    """Too few bits, a bias, or keys of neighbours that are no fresh draws.

    n = 200,000; mean and variance within 5.8 deviations, Kolmogorov-Smirnov at level 1e-8: odds of
    a false alarm below 3e-8. Power: u^1.03, 0.01 off at its worst, is refused.
    """
    u = draw()
    assert abs(u.mean() - 1 / 2) * (12 * N) ** 0.5 < Z
    assert abs(((u - 1 / 2) ** 2).mean() - 1 / 12) * (180 * N) ** 0.5 < Z
    assert stats.kstest(u.numpy(), "uniform").pvalue > FALSE_ALARM
    assert stats.kstest((u**1.03).numpy(), "uniform").pvalue < FALSE_ALARM


def test_gumbel_has_its_law() -> None:
    """A sign or a logarithm too few. n = 200,000, level 1e-8."""
    noise = gumbel(key(torch.tensor(1), 2), N)
    assert stats.kstest(noise.numpy(), "gumbel_r").pvalue > FALSE_ALARM


def test_gumbel_argmax_draws_from_p() -> None:
    """Noise of another law, or one draw that serves two tokens.

    n = 200,000 draws of 6 tokens, level 1e-8. Power: noise of a tenth more spread is refused.
    """
    p = law(0.4, 0.25, 0.2, 0.1, 0.05, 0.0)
    noise = gumbel(key(torch.tensor(9), torch.arange(N), 3), 6)
    assert chi_square((p.log() + noise).argmax(-1), p) > FALSE_ALARM
    assert chi_square((p.log() + 1.1 * noise).argmax(-1), p) < FALSE_ALARM


def correlation(u: Tensor, w: Tensor) -> float:
    """Correlation of uniform numbers in standard deviations of chance."""
    return float(((u - 0.5) * (w - 0.5)).mean() * 12 * len(u) ** 0.5)


def test_keys_are_independent() -> None:
    """Noise shared or shifted between seeds, lengths, purposes, depths, nodes, places in a stream.

    n = 200,000, 66 pairs within 5.8 deviations: odds of a false alarm below 5e-7.
    """
    t = torch.arange(N)
    seed = torch.tensor(3)
    streams = uniform(key(seed, t, 0), 3)  # row t + 1 is no shifted row t, as in a plain sum
    numbers = {
        "purpose 0, token 0": streams[:, 0],
        "purpose 0, token 1": streams[:, 1],
        "purpose 0, token 2": streams[:, 2],
        "next length, token 0": streams[:, 0].roll(-1),
        "next length, token 1": streams[:, 1].roll(-1),
        "purpose 1": uniform(key(seed, t, 1)),
        "purpose 2": uniform(key(seed, t, 2)),
        "node 0": uniform(key(seed, t, 1, 0)),
        "node 1": uniform(key(seed, t, 1, 1)),
        "depth 1, node 0": uniform(key(seed, t, 0, 1, 0)),
        "depth 0, node 1": uniform(key(seed, t, 0, 0, 1)),
        "next seed": uniform(key(seed + 1, t, 0)),
    }
    for (one, u), (other, w) in itertools.combinations(numbers.items(), 2):
        assert abs(correlation(u, w)) < Z, f"{one} and {other}"


def test_correlation_has_power() -> None:
    """Negative control: keys added up instead of hashed share their streams, shifted by one."""
    t = torch.arange(N) * signed(GOLDEN)
    streams = uniform(t, 2)
    assert abs(correlation(streams[:-1, 1], streams[1:, 0])) > Z
