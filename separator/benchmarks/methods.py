"""The methods that are compared: mechanisms, and mechanisms trained with other losses."""

from dataclasses import dataclass, field

from separator.attention import MECHANISMS
from separator.benchmarks.losses import LossWeights
from separator.errors import SeparatorError

MATCHING_PURSUIT = "matching_pursuit"
NEEDS_CLAIM = ("evidence_claim",)  # its caller says what a slot takes, and no benchmark does
STRONG_DIVERSITY = 5.0
STRONG_ORTHOGONALITY = 3.0


@dataclass(frozen=True)
class Method:
    """A mechanism of `separator.attention`, None if nothing is learned, and the weights of its loss."""

    mechanism: str | None
    weights: LossWeights = field(default_factory=LossWeights)


def _loss_baselines() -> dict[str, Method]:
    diverse = LossWeights(diversity=STRONG_DIVERSITY)
    orthogonal = LossWeights(orthogonality=STRONG_ORTHOGONALITY)
    both = LossWeights(diversity=STRONG_DIVERSITY, orthogonality=STRONG_ORTHOGONALITY)
    kinds = {"divloss": diverse, "ortho": orthogonal, "divloss_ortho": both}
    return {
        f"{prefix}_{kind}": Method(mechanism, weights)
        for kind, weights in kinds.items()
        for prefix, mechanism in (("vanilla", "vanilla"), ("seq", "sequential"))
    }


METHODS: dict[str, Method] = {
    **{name: Method(name) for name in MECHANISMS if name not in NEEDS_CLAIM},
    "coverage_loss": Method("vanilla", LossWeights(coverage=1.0)),
    **_loss_baselines(),
    MATCHING_PURSUIT: Method(None),
}


def method_of(name: str) -> Method:
    """Return the method of that name.

    Raises:
        SeparatorError: no method has that name.
    """
    if name not in METHODS:
        raise SeparatorError(f"unknown method {name!r}; choose one of {', '.join(METHODS)}")
    return METHODS[name]


def mechanism_of(name: str) -> str:
    """Return the mechanism of a method that learns.

    Raises:
        SeparatorError: no method has that name, or it learns nothing.
    """
    mechanism = method_of(name).mechanism
    if mechanism is None:
        raise SeparatorError(f"method {name!r} has no model: it learns nothing; choose another to train")
    return mechanism
