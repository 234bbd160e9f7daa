"""Predict the scores of plans that a table does not hold, from the losses of their layers."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from rankrl.plan_search.space.problem import SearchProblem

# Trees of the ensemble, and plans in a leaf at least.
_TREES, _LEAF = 100, 2
_RIDGE = 1e-2
_FOLDS = 5
# Share of a signal's energy that a layer leaves at least, whatever its error.
_LEAST_LEFT = 1e-3


class Surrogate:
    """A linear model of the layers' losses, and extremely randomised trees (Geurts et al., 2006) on the rest.

    The features of a plan are its layers' losses and their roots, products of neighbours' roots, the sum and
    its logarithm, what is left of the signal behind each layer if errors multiply, and the parameters kept.
    Predictions keep to the range of the scores that are known. Trees alone are flat between the plans that
    they know; a Gaussian process would flatter selectors that are one.
    """

    def __init__(self, problem: SearchProblem, choices: np.ndarray, scores: np.ndarray) -> None:
        self._problem, self._choices, self._scores = problem, choices, scores

    def predict(self, plans: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Predict scores and their standard deviations between trees, each (plans,), of (plans, layers)."""
        return self._fitted.predict(self._features(plans))

    @cached_property
    def correlation(self) -> float:
        """Spearman's rank correlation with the scores of plans that a fit leaves out, in five folds."""
        from scipy.stats import spearmanr

        predicted = np.empty(len(self._scores))
        features = self._features(self._choices)
        folds = np.random.default_rng(0).permutation(len(predicted)) % _FOLDS
        for fold in range(_FOLDS):
            kept = folds != fold
            predicted[~kept], _ = _Fitted(features[kept], self._scores[kept]).predict(features[~kept])
        return float(spearmanr(predicted, self._scores).statistic)

    @cached_property
    def _fitted(self) -> _Fitted:
        return _Fitted(self._features(self._choices), self._scores)

    def _features(self, plans: np.ndarray) -> np.ndarray:
        of_layers = list(zip(self._problem.sites, np.asarray(plans).T, strict=True))
        losses = np.stack([site.losses[plan] for site, plan in of_layers], axis=1)
        errors = np.stack([site.errors[plan] for site, plan in of_layers], axis=1)
        kept = np.stack([site.params[plan] / site.params[-1] for site, plan in of_layers], axis=1)
        roots, total = np.sqrt(losses), losses.sum(1, keepdims=True)
        left = np.cumprod(np.sqrt(np.maximum(1 - errors**2, _LEAST_LEFT)), axis=1)
        pairs = roots[:, 1:] * roots[:, :-1]
        return np.concatenate([losses, roots, pairs, total, np.log(total + 1e-9), left, kept], axis=1)


class _Fitted:
    """Ridge regression and trees on what it leaves, fitted to features (plans, features) and scores."""

    def __init__(self, features: np.ndarray, scores: np.ndarray) -> None:
        from sklearn.ensemble import ExtraTreesRegressor

        self._centre, self._scale = features.mean(0), np.maximum(features.std(0), 1e-12)
        self._mean, self._range = float(scores.mean()), (scores.min(), scores.max())
        scaled = self._scaled(features)
        penalty = _RIDGE * len(scaled) * np.eye(scaled.shape[1])
        self._weights = np.linalg.solve(scaled.T @ scaled + penalty, scaled.T @ (scores - self._mean))
        left = scores - self._linear(scaled)
        self._trees = ExtraTreesRegressor(_TREES, min_samples_leaf=_LEAF, random_state=0).fit(scaled, left)

    def predict(self, features: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Predict means and deviations, each (plans,)."""
        scaled = self._scaled(features)
        inputs = scaled.astype(np.float32)
        # The trees themselves: a forest's own predict takes ten times as long for a single plan.
        each = np.stack([tree.tree_.predict(inputs)[:, 0] for tree in self._trees.estimators_])
        return (self._linear(scaled) + each.mean(0)).clip(*self._range), each.std(0)

    def _scaled(self, features: np.ndarray) -> np.ndarray:
        return (features - self._centre) / self._scale

    def _linear(self, scaled: np.ndarray) -> np.ndarray:
        predicted: np.ndarray = self._mean + scaled @ self._weights
        return predicted
