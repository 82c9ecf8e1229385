import itertools
import math
import random
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surgery.errors import InternalError
from surgery.width.axes import (
    Axis,
    ReasonKind,
    Why,
    atoms,
    concatenation,
    cut,
    digits,
    find,
    fix,
    is_fixed,
    lost,
    mark_grouping,
    product,
    regroup,
    role,
    segment,
    split_digit,
    terms,
    unify,
)
from surgery.width.plan import place
from surgery.width.solve import Solver, size_of

many = settings(max_examples=150)
seeds = st.integers(0, 10**6)


WHOLE = role("whole")


def keeper(seed):
    """Any number of positions of each atom, in any order; those that are fixed stay whole."""
    random_number, chosen = random.Random(seed), {}

    def keep(atom):
        assert atom is find(atom)
        assert atom.kind == "atom"
        if atom not in chosen:
            kept = random_number.sample(range(atom.size), random_number.randint(1, atom.size))
            chosen[atom] = range(atom.size) if atom.why else kept
        return chosen[atom]

    return keep


def half(atom):
    return range(atom.size if atom.why else math.ceil(atom.size / 2))


def positions(axis, keep):
    """The positions that stay of an axis, solved as it is now."""
    solver = Solver()
    return place(solver(axis), {solver(atom): keep(atom) for atom in map(find, atoms(axis))}).tolist()


def new_size(axis, keep):
    return len(positions(axis, keep))


def factorisation(generator, size):
    """Random sizes with this product."""
    sizes = []
    while size > 1:
        factor = generator.choice([n for n in range(2, size + 1) if size % n == 0])
        sizes.append(factor)
        size //= factor
    if generator.random() < 0.3:
        sizes.insert(generator.randrange(len(sizes) + 1), 1)
    return sizes or [1]


def random_axis(generator, depth=2, size=None):
    """A product or sum of products or sums of atoms, some of which are fixed."""
    size = size or generator.choice([4, 6, 8, 12, 24])
    kind = generator.choice(["atom", "product", "sum"]) if depth and size > 1 else "atom"
    if kind == "atom":
        return Axis(size, WHOLE if generator.random() < 0.2 else None)
    if kind == "product":
        return product([random_axis(generator, depth - 1, n) for n in factorisation(generator, size)])
    first = generator.randint(1, size - 1)
    return concatenation([random_axis(generator, depth - 1, n) for n in (first, size - first)])


class Program:
    """Operations on arrays, each with the axes of its result; the same can run again on narrower arrays.

    A replay gets for each operation the new sizes that the axes give: no positions but those of the inputs.
    """

    def __init__(self, seed):
        self.generator = random.Random(seed)
        self.found, self.arrays, self.steps = [], [], []

    def add(self, array, axes, run):
        assert array.shape == tuple(axis.size for axis in axes)
        self.arrays.append(array)
        self.found.append(list(axes))
        self.steps.append(run)

    def pick(self):
        return self.generator.randrange(len(self.arrays))

    def input(self, sizes):
        start = 1000 * len(self.arrays)
        array = np.arange(start, start + math.prod(sizes)).reshape(sizes)
        self.add(array, [Axis(n, WHOLE if self.generator.random() < 0.15 else None) for n in sizes], None)

    def reshape(self):
        i = self.pick()
        sizes = factorisation(self.generator, self.arrays[i].size)
        axes = regroup(self.found[i], sizes)
        self.add(
            self.arrays[i].reshape(sizes),
            axes,
            lambda results, keep: results[i].reshape([new_size(axis, keep) for axis in axes]),
        )

    def permute(self):
        i = self.pick()
        order = list(range(self.arrays[i].ndim))
        self.generator.shuffle(order)
        axes = [self.found[i][n] for n in order]
        self.add(self.arrays[i].transpose(order), axes, lambda results, keep: results[i].transpose(order))

    def split(self):
        i = self.pick()
        dim = self.generator.randrange(self.arrays[i].ndim)
        axis = self.found[i][dim]
        ends = sorted({0, axis.size, *(self.generator.randint(0, axis.size) for _ in range(2))})
        parts = [segment(axis, a, b) for a, b in itertools.pairwise(ends)]
        for n, part in enumerate(parts):

            def run(results, keep, n=n):
                stops = np.cumsum([new_size(p, keep) for p in parts])
                return results[i].take(range(0 if n == 0 else stops[n - 1], stops[n]), dim)

            axes = [part if d == dim else x for d, x in enumerate(self.found[i])]
            self.add(self.arrays[i].take(range(ends[n], ends[n + 1]), dim), axes, run)

    def cat(self):
        i = self.pick()
        dim = self.generator.randrange(self.arrays[i].ndim)

        def rest(array):
            return (*array.shape[:dim], *array.shape[dim + 1 :])

        same = [j for j, a in enumerate(self.arrays) if a.ndim > dim and rest(a) == rest(self.arrays[i])]
        members = [i, self.generator.choice(same)]
        self.generator.shuffle(members)
        a, b = (self.found[j] for j in members)
        for d, (x, y) in enumerate(zip(a, b)):
            if d != dim:
                unify(x, y)
        joined = concatenation([a[dim], b[dim]])
        array = np.concatenate([self.arrays[j] for j in members], dim)
        axes = [joined if d == dim else x for d, x in enumerate(a)]
        self.add(array, axes, lambda results, keep: np.concatenate([results[j] for j in members], dim))

    def combine(self):
        """Element by element, so that all axes are the same."""
        i = self.pick()
        j = self.generator.choice([j for j, a in enumerate(self.arrays) if a.shape == self.arrays[i].shape])
        for x, y in zip(self.found[i], self.found[j]):
            unify(x, y)
        self.add(
            self.arrays[i] * 7919 + self.arrays[j] * 104729,
            self.found[i],
            lambda results, keep: results[i] * 7919 + results[j] * 104729,
        )


@st.composite
def programs(draw):
    program = Program(draw(seeds))
    sizes = draw(st.lists(st.sampled_from([1, 2, 3, 4, 6, 8]), min_size=1, max_size=3))
    for _ in range(draw(st.integers(1, 3))):
        program.input(sizes if draw(st.booleans()) else list(reversed(sizes)))
    moves = [Program.reshape, Program.reshape, Program.permute, Program.split, Program.cat, Program.combine]
    for move in draw(st.lists(st.sampled_from(moves), max_size=8)):
        move(program)
        if program.arrays[-1].size > 4000:
            break
    return program


@settings(max_examples=300)
@given(programs(), seeds)
def test_axes__a_narrow_program_computes_the_kept_positions_of_the_full_one(program, seed):
    keep, results = keeper(seed), []
    for array, axes, run in zip(program.arrays, program.found, program.steps):
        expected = array[np.ix_(*(positions(axis, keep) for axis in axes))]
        assert expected.shape == tuple(new_size(axis, keep) for axis in axes)
        results.append(expected if run is None else run(results, keep))
        assert np.array_equal(results[-1], expected)


@many
@given(seeds, seeds)
def test_axes__positions_lie_inside_are_as_many_as_size_of_and_ascend_if_the_choice_does(seed, choice):
    axis, keep = random_axis(random.Random(seed), 3), keeper(choice)
    solver = Solver()
    solved, chosen = solver(axis), {solver(atom): keep(atom) for atom in atoms(axis)}
    found = place(solved, chosen).tolist()
    assert len(set(found)) == len(found) == size_of(solved, chosen)
    assert set(found) <= set(range(axis.size))
    assert sorted(found) == place(solved, {atom: sorted(kept) for atom, kept in chosen.items()}).tolist()
    assert place(solved, {}).tolist() == list(range(axis.size))


@many
@given(seeds, seeds)
def test_axes__fix_keeps_every_position_and_the_first_of_the_firmest_reasons(seed, choice):
    axis = random_axis(random.Random(seed), 3)
    before = {atom: atom.why for atom in atoms(axis)}
    assert is_fixed(axis) == all(before.values())
    for why in (lost("no rule"), role("because"), lost("no rule")):
        fix(axis, why)
        assert positions(axis, keeper(choice)) == list(range(axis.size))
        assert is_fixed(axis)
    assert {atom: atom.why for atom in atoms(axis)} == {atom: why or role("because") for atom, why in before.items()}
    data = Why(ReasonKind.OUTPUT, "an output")
    fix(axis, data)
    assert {atom.why for atom in atoms(axis)} == {data}


@many
@given(seeds, seeds)
def test_axes__unified_axes_keep_the_same_positions_and_lose_no_constraint(seed, choice):
    generator = random.Random(seed)
    a = random_axis(generator)
    b = random_axis(generator, size=a.size)
    whole = [is_fixed(a), is_fixed(b)]
    unify(a, b)
    keep = keeper(choice)
    assert positions(a, keep) == positions(b, keep)
    assert new_size(a, keep) == new_size(b, keep)
    if any(whole):
        assert is_fixed(a)
        assert is_fixed(b)


def assert_same_either_way(made):
    """Unifying the axes (a, b), then (c, d), of `made()` keeps the same positions whichever of a pair comes first."""
    results = []
    for orders in itertools.product((1, -1), repeat=2):
        a, b, c, d = made()
        for _ in range(2):
            for pair, order in zip([(a, b), (c, d)], orders):
                unify(*pair[::order])
        results.append([positions(axis, half) for axis in (a, b, c, d)])
    assert results == results[:1] * 4
    assert results[0][0] == results[0][1]
    assert results[0][2] == results[0][3]


@many
@given(seeds)
def test_axes__unify_does_the_same_either_way_and_twice(seed):
    def made():
        generator = random.Random(seed)
        a, c = random_axis(generator), random_axis(generator)
        # A part of `c` that a third axis shares shows what unify does to others.
        whole = generator.choice([concatenation, product])([a, c])
        return a, random_axis(generator, size=a.size), whole, random_axis(generator, size=whole.size)

    assert_same_either_way(made)


@pytest.mark.parametrize(
    ("a", "b", "around", "other"),
    [  # digits that do not fit together; what is learned afterwards of an axis that one of them is a part of
        (lambda: product([Axis(2, WHOLE), Axis(3)]), lambda: product([sum_of(1, 2), Axis(2)]),
         lambda a: concatenation([a, Axis(12)]), lambda: concatenation([Axis(2), product_of(8, 2)])),
        (lambda: product([sum_of(1, 1), Axis(3)]), lambda: product([Axis(3, WHOLE), Axis(2)]),
         lambda a: product([a, Axis(2)]), lambda: product_of(3, 4)),
    ],
)  # fmt: skip
def test_axes__that_do_not_fit_together_leave_the_same_to_others_either_way(a, b, around, other):
    def made():
        first = a()
        return first, b(), around(first), other()

    assert_same_either_way(made)


@many
@given(seeds, seeds)
def test_axes__segments_divide_the_positions_of_an_axis(seed, choice):
    generator = random.Random(seed)
    axis = random_axis(generator, 3)
    a, b = sorted(generator.randint(0, axis.size) for _ in range(2))
    ends = sorted({0, a, b, axis.size})
    parts = [segment(axis, start, stop) for start, stop in itertools.pairwise(ends)]
    keep = keeper(choice)
    expected = [start + p for start, part in zip(ends, parts) for p in positions(part, keep)]
    assert positions(axis, keep) == expected
    assert positions(concatenation(parts), keep) == expected


def flat(sizes, axes, keep):
    """The numbers of the kept positions of an array of these sizes, as numpy counts them."""
    return (
        np.arange(math.prod(sizes)).reshape(sizes)[np.ix_(*(positions(axis, keep) for axis in axes))].ravel().tolist()
    )


def layouts(seed, count):
    """Several random shapes of one number of elements."""
    generator = random.Random(seed)
    size = generator.choice([8, 12, 24, 30, 36, 48])
    return [factorisation(generator, size) for _ in range(count)]


@many
@given(seeds, seeds)
def test_axes__a_reshape_keeps_the_elements_that_numpy_finds_there(seed, choice):
    shapes = layouts(seed, 3)
    axes = [[Axis(n, WHOLE if n == seed % 5 else None) for n in shapes[0]]]
    for shape in shapes[1:]:
        axes.append(regroup(axes[-1], shape))
        assert [axis.size for axis in axes[-1]] == shape
    keep = keeper(choice)
    first, *others = (flat(shape, found, keep) for shape, found in zip(shapes, axes))
    assert all(other == first for other in others)
    strides = sorted({math.prod(shape[i:]) for shape in shapes for i in range(len(shape))})
    if all(large % small == 0 for small, large in itertools.pairwise(strides)):  # no reshape mixes axes
        assert {atom.why for axis in axes[0] for atom in atoms(axis)} <= {None, WHOLE}


@many
@given(seeds, seeds, st.booleans())
def test_axes__that_are_unified_and_regrouped_keep_the_same_elements(seed, choice, before):
    one, other = layouts(seed, 2)
    a, b = Axis(math.prod(one)), Axis(math.prod(other))
    if before:
        unify(a, b)
    digits_of_a, digits_of_b = regroup([a], one), regroup([b], other)
    unify(a, b)
    keep = keeper(choice)
    assert flat(one, digits_of_a, keep) == flat(other, digits_of_b, keep) == positions(a, keep) == positions(b, keep)


@many
@given(seeds, seeds)
def test_axes__a_digit_that_two_arrays_share_has_the_same_values_in_both(seed, choice):
    """The kept elements of an array, taken apart by numpy into its digits."""
    (old, new), (other,) = layouts(seed, 2), layouts(seed + 1, 1)
    left, right = [Axis(n) for n in old], [Axis(n) for n in other]
    shared = [(i, j) for i, n in enumerate(new) for j, m in enumerate(other) if n == m > 1]
    reshaped = regroup(left, new)
    for i, j in shared[: 1 + seed % 2]:
        unify(reshaped[i], right[j])
    keep = keeper(choice)
    for i, j in shared[: 1 + seed % 2]:
        in_left = np.unravel_index(flat(old, left, keep), new)[i]
        in_right = np.unravel_index(flat(other, right, keep), other)[j]
        assert set(in_left) == set(in_right)


def product_of(*sizes):
    return product([Axis(size) for size in sizes])


def sum_of(*sizes):
    return concatenation([Axis(size) for size in sizes])


@pytest.mark.parametrize(
    ("axis", "learn", "sizes", "kept", "fixed"),
    [
        (lambda: Axis(12), lambda axis: split_digit(axis, 3), [3, 4], [0, 1, 4, 5], []),
        (lambda: sum_of(4, 4, 4), lambda axis: split_digit(axis, 3), [3, 4], [0, 1, 4, 5, 8, 9], [0]),
        # a cut between positions of the first digit divides that digit, and one inside of the rest fixes it
        (lambda: product_of(6, 4), lambda axis: cut(axis, 8), [8, 16], [0, 1, 8, 9, 12, 13], []),
        (lambda: product_of(3, 4), lambda axis: cut(axis, 6), [2] * 6, [0, 2, 4, 6, 8, 10], []),
        # unify refines both to their common digits and terms
        (lambda: product_of(2, 12), lambda axis: unify(axis, product_of(8, 3)), [2, 4, 3], [0, 1, 3, 4], []),
        (lambda: sum_of(2, 10), lambda axis: unify(axis, sum_of(8, 4)), [2, 6, 4], [0, 2, 3, 4, 8, 9], []),
        # what is fixed stays so, and fixes what is the same
        (lambda: Axis(8, WHOLE), lambda axis: split_digit(axis, 2), [2, 4], [*range(8)], [0, 1]),
        (lambda: Axis(8, WHOLE), lambda axis: cut(axis, 3), [3, 5], [*range(8)], [0, 1]),
        *((make, learn, sizes, [*range(4)], [*range(len(sizes))])
          for make, sizes in (
              (partial(Axis, 4), [4]), (partial(product_of, 2, 2), [2, 2]), (partial(sum_of, 1, 3), [1, 3])
          )
          for learn in (lambda axis: unify(axis, Axis(4, WHOLE)), lambda axis: unify(Axis(4, WHOLE), axis))),
    ],
)  # fmt: skip
def test_axes__what_is_learned_of_an_axis_by_hand(axis, learn, sizes, kept, fixed):
    made = axis()
    learn(made)
    found = terms(made) if len(terms(made)) > 1 else digits(made)
    assert [part.size for part in found] == sizes
    assert positions(made, half) == kept
    assert [n for n, part in enumerate(found) if is_fixed(part)] == fixed
    assert len(fixed) < len(found) or {atom.why for atom in atoms(made)} == {WHOLE}


def test_axes__a_reshape_that_mixes_axes_fixes_them():
    old = [Axis(4), Axis(6)]
    new = regroup(old, [6, 4])
    assert all(map(is_fixed, (*old, *new)))
    assert [axis.size for axis in new] == [6, 4]
    assert next(atoms(old[0])).why.text.startswith("cannot")


def test_axes__a_reshape_that_only_joins_and_divides_fixes_nothing():
    old = [Axis(4), Axis(6), Axis(1)]
    joined, last, one = regroup(old, [8, 3, 1])
    assert not any(map(is_fixed, (*old[:2], joined, last)))
    assert one.size == 1
    assert digits(joined) == [find(old[0]), digits(old[1])[0]]
    assert digits(old[1])[1] is last
    assert regroup([Axis(0), Axis(3)], [0])[0].why.text == "an empty tensor"
    first, second = Axis(2), Axis(3)
    empty, rest = regroup([Axis(0), first, second], [0, 6])
    assert digits(rest) == [first, second]
    assert empty.why.text == "an empty tensor"


def test_axes__whole_neighbours_become_one_digit_only_where_a_reshape_mixes_them():
    whole = [Axis(2, role("a")), Axis(3, role("b"))]
    axis = regroup([*whole, Axis(4)], [24])[0]
    assert digits(axis)[:2] == whole
    assert positions(axis, half) == [4 * i + j for i in range(6) for j in range(2)]
    first, rest = regroup([*whole, Axis(4)], [3, 8])
    assert is_fixed(first)
    assert [digit.size for digit in digits(rest)] == [2, 4]
    assert positions(rest, half) == [0, 1, 4, 5]


def test_axes__units_of_halving_and_shuffling_one_after_the_other_stay_free():
    """ShuffleNetV2's: half of the channels passes, and is interleaved with new ones as wide."""
    channels = concatenation([Axis(16), Axis(16)])
    for _ in range(3):
        group, within = regroup([channels], [2, 16])
        channels = product([within, group])
        passed, _ = segment(channels, 0, 16), segment(channels, 16, 32)
        channels = concatenation([passed, Axis(16)])
    assert len(positions(channels, half)) == 16
    assert not any(atom.why for atom in atoms(channels) if atom.size > 2)


def test_axes__sizes_of_one_and_nothing_are_no_digits_and_no_terms():
    atom = Axis(5)
    assert product([Axis(1), atom, Axis(1)]) is atom
    assert concatenation([Axis(0), atom]) is atom
    assert product([Axis(1)]).size == 1
    assert product([]).size == 1
    assert digits(Axis(1)) == []


def test_axes__that_do_not_align_are_fixed_and_wrong_sizes_are_an_error():
    a, b = product([Axis(4), Axis(6)]), product([Axis(6), Axis(4)])
    unify(a, b)
    assert is_fixed(a)
    assert is_fixed(b)
    with pytest.raises(InternalError, match="axes of 2 and 3"):
        unify(Axis(2), Axis(3))


def test_axes__grouping_is_kept_by_split_and_unify():
    axis = Axis(8)
    mark_grouping(axis, "heads")
    assert all(digit.grouping for digit in split_digit(axis, 2))
    for flipped in (False, True):
        marked = Axis(6)
        mark_grouping(marked, "heads")
        other = product([Axis(2), Axis(3)])
        unify(*((other, marked) if flipped else (marked, other)))
        assert all(digit.grouping for digit in digits(other))
    a, b = Axis(6), Axis(6)
    mark_grouping(a, "heads")
    unify(a, b)
    assert find(b).grouping


def test_axes__printing_shows_digits_terms_and_what_is_fixed():
    assert repr(product([Axis(2), concatenation([Axis(3, WHOLE), Axis(1)])])) == "(2*(3!+1))"
