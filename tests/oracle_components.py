"""Clustering by description length, written literally: every pair is tried, every number counted anew."""

from itertools import combinations


def length(groups, on, weights, alpha):
    """Sum over groups of frequency x (1 + alpha x rank); a group is on where any member is."""
    total = 0.0
    for group in groups:
        anywhere = set().union(*(on[member] for member in group))
        frequency = sum(weights[row] for row in anywhere)
        total += frequency * (1 + alpha * len(group))
    return total


def cluster(on, weights, alpha):
    """Join the pair that lowers the description length most, until none does. `on` is a set of datapoints
    for each subcomponent; returns the groups as a set of frozensets."""
    groups = {frozenset([i]) for i in range(len(on))}
    while True:
        now = length(groups, on, weights, alpha)
        best, saved = None, 1e-12
        for a, b in combinations(sorted(groups, key=sorted), 2):
            joined = (groups - {a, b}) | {a | b}
            saving = now - length(joined, on, weights, alpha)
            if saving > saved:
                best, saved = joined, saving
        if best is None:
            return groups
        groups = best


def adjusted_rand(a, b):
    """Over all pairs: together in both, in one, in the other; compared with what chance gives."""
    pairs = list(combinations(range(len(a)), 2))
    both = sum(a[i] == a[j] and b[i] == b[j] for i, j in pairs)
    in_a = sum(a[i] == a[j] for i, j in pairs)
    in_b = sum(b[i] == b[j] for i, j in pairs)
    expected = in_a * in_b / len(pairs)
    return (both - expected) / ((in_a + in_b) / 2 - expected)
