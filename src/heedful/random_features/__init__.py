"""Random features: feature maps of `Linear` whose inner products estimate exp(scale · q·k).

    Trig            cosines and sines times e^{‖x‖²/2}: signed, exact at x = y
    FavorPlus       exp(ωᵀx − ‖x‖²/2): positive; with hyperbolic=True also at −ω
    FavorPlusPlus   exp(A‖ω‖² + √(1−4A) ωᵀx − ‖x‖²/2): one parameter, fitted by `calibrate`
    FavorSharp      the same with a diagonal A, in axes fitted to queries and keys by `calibrate`
    ReluFeatures    max(ωᵀx, 0): cheap, but it estimates another kernel than the exponential

Throughout, x = √scale · q and y = √scale · k, with scale = d^-½ by default, so the target is e^{xᵀy}. The vectors
ω ~ N(0, I_d) are drawn once, from a seed; `redraw(generator)` draws new ones.
"""

from heedful.random_features.fits import Fit, Moments, best_A, fit_aderf, fit_gerf, fit_saderf, fit_sderf, objective
from heedful.random_features.maps import RandomFeatures, ReluFeatures, Trig, arc_cosine
from heedful.random_features.positive import FavorPlus, FavorPlusPlus, FavorSharp
from heedful.random_features.projections import Gaussian, Hadamard, Orthogonal, Projection
from heedful.random_features.variances import (
    variance_favor_plus,
    variance_favor_plus_orthogonal,
    variance_gerf,
    variance_hyperbolic,
    variance_sderf,
    variance_trig,
)

__all__ = [
    "FavorPlus",
    "FavorPlusPlus",
    "FavorSharp",
    "Fit",
    "Gaussian",
    "Hadamard",
    "Moments",
    "Orthogonal",
    "Projection",
    "RandomFeatures",
    "ReluFeatures",
    "Trig",
    "arc_cosine",
    "best_A",
    "fit_aderf",
    "fit_gerf",
    "fit_saderf",
    "fit_sderf",
    "objective",
    "variance_favor_plus",
    "variance_favor_plus_orthogonal",
    "variance_gerf",
    "variance_hyperbolic",
    "variance_sderf",
    "variance_trig",
]
