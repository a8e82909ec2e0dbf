"""Recovery checks and similarity measures, on cases whose answer is known."""

import pytest
import torch

from rankone.metrics import dense_check, identity_check, l0, mmcs_ml2r


def permuted_identity(n=4, C=7):
    g = torch.zeros(n, C)
    for i, c in enumerate([5, 0, 3, 6][:n]):
        g[i, c] = 1.0
    return g


class TestIdentity:
    def test_a_permuted_identity_is_recovered(self):
        check = identity_check(permuted_identity())
        assert check.recovered
        assert check.order[:4] == [5, 0, 3, 6]
        assert sorted(check.order) == list(range(7))

    @pytest.mark.parametrize(
        ("place", "value", "errors"),
        [
            ((0, 5), 0.89, 1),
            ((0, 5), 0.91, 0),
            ((1, 5), 0.11, 1),
            ((1, 5), 0.09, 0),
            ((2, 1), 0.5, 1),
            ((0, 5), 0.0, 1),
        ],
        ids=["weak diagonal", "strong diagonal", "stray", "faint stray", "spare column", "missing"],
    )
    def test_errors(self, place, value, errors):
        g = permuted_identity()
        g[place] = value
        assert identity_check(g).errors == errors

    def test_fewer_subcomponents_than_features(self):
        assert identity_check(torch.eye(3)[:, :2]).errors == 1

    def test_two_features_in_one_subcomponent(self):
        g = torch.zeros(2, 3)
        g[:, 0] = 1.0
        assert identity_check(g).errors == 2


class TestDense:
    def test_k_full_columns(self):
        g = torch.zeros(5, 6)
        g[:, [1, 4]] = 0.95
        assert dense_check(g, 2).recovered
        assert dense_check(g, 2).order[:2] == [1, 4]
        assert dense_check(g, 3).errors == 1
        assert dense_check(g, 1).errors == 5

    def test_certain_somewhere_is_enough(self):
        g = torch.full((5, 3), 0.05)
        g[:, 0] = 0.5
        assert dense_check(g, 1).errors == 1
        g[2, 0] = 0.9
        assert dense_check(g, 1).recovered

    def test_more_expected_than_there_are(self):
        assert dense_check(torch.ones(3, 2), 4).errors == 2


class TestSimilarity:
    def test_exact_columns(self):
        torch.manual_seed(0)
        W = torch.randn(3, 4)
        assert mmcs_ml2r(W, W, torch.eye(4)) == pytest.approx((1, 1))

    def test_shrinkage_shows_in_the_ratio_only(self):
        W = torch.randn(3, 4)
        assert mmcs_ml2r(W, 0.9 * W, torch.eye(4)) == pytest.approx((1, 0.9))

    def test_sign_counts(self):
        W = torch.eye(2)
        assert mmcs_ml2r(W, -W, torch.eye(2))[0] == pytest.approx(0, abs=1e-6)

    def test_among(self):
        W = torch.eye(2)
        U, V = torch.cat([W, torch.ones(2, 1)], 1), torch.cat([torch.eye(2), torch.ones(1, 2)])
        assert mmcs_ml2r(W, U, V, torch.tensor([False, False, True]))[0] == pytest.approx(2**-0.5)
        assert mmcs_ml2r(W, U, V, torch.tensor([False, False, False])) == (0, 0)


def test_l0():
    g = torch.tensor([[0.2, 0.0, 1.0], [0.1, 0.05, 0.0]])
    assert l0(g) == 1.0
    assert l0(g, torch.tensor([0.75, 0.25])) == 1.5
    assert l0(g.unsqueeze(1).expand(2, 5, 3), torch.tensor([0.75, 0.25])) == 1.5


def test_wrong_entries_are_the_errors_that_are_counted():
    g = torch.eye(4, 6)
    g[2, 2], g[0, 5], g[3, 1] = 0.8, 0.3, 0.05
    g = g[:, torch.tensor([3, 1, 0, 2, 4, 5])]
    check = identity_check(g)
    assert check.wrong(g[:, check.order]) == [(0, 5), (2, 2)]
    assert len(check.wrong(g[:, check.order])) == check.errors == 2
    dense = torch.tensor([[1.0, 0.5, 0.0, 0.2], [1.0, 1.0, 0.0, 0.0]])
    check = dense_check(dense, 2)
    assert check.wrong(dense[:, check.order]) == [(0, 2)]
    assert check.errors == 1
