"""All closed forms in one namespace.

focus            S(a) = E|a| / √E[a²] of exp, relu², identity, non-negative and decaying weights
random_energy    softmax of N iid Gaussian logits: E Σa², E max, the threshold √(2 ln N) and the limit beyond it
random_matrices  Johnson–Lindenstrauss dimension, Marchenko–Pastur share of energy
variances        of the estimators of e^{xᵀy} by random features (random_features/variances.py)
"""

from heedful.random_features.variances import (
    variance_favor_plus,
    variance_favor_plus_orthogonal,
    variance_gerf,
    variance_hyperbolic,
    variance_sderf,
    variance_trig,
)
from heedful.theory.focus import S_decay, S_exp, S_identity, S_iid, S_nonnegative, S_relu2, log_S_relu2
from heedful.theory.random_energy import (
    expected_largest,
    expected_square_sum,
    freezing_spread,
    poisson_dirichlet_largest,
    poisson_dirichlet_square_sum,
)
from heedful.theory.random_matrices import johnson_lindenstrauss_dimension, marchenko_pastur_share

__all__ = [
    "S_decay",
    "S_exp",
    "S_identity",
    "S_iid",
    "S_nonnegative",
    "S_relu2",
    "expected_largest",
    "expected_square_sum",
    "freezing_spread",
    "johnson_lindenstrauss_dimension",
    "log_S_relu2",
    "marchenko_pastur_share",
    "poisson_dirichlet_largest",
    "poisson_dirichlet_square_sum",
    "variance_favor_plus",
    "variance_favor_plus_orthogonal",
    "variance_gerf",
    "variance_hyperbolic",
    "variance_sderf",
    "variance_trig",
]
