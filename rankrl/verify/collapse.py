"""Whether a compressed network still says anything: one that answers no better than a constant does not."""

from __future__ import annotations

from collections.abc import Sequence

from rankrl.training.chance import guessing_noise, near_guessing
from rankrl.verify.agreement import OutputAgreement, UnitAgreement
from rankrl.wording import counted

_HARDLY_VARIES = 1e-3
"""The relative error of a constant below which an output is one, as far as can be told."""
_REMEDY = (
    "Do not use it as it is: ask for a larger budget, leave sensitive layers as they are (skip), give more "
    "inputs, or fine-tune it"
)


def collapse(
    outputs: Sequence[OutputAgreement], constant: Sequence[OutputAgreement], inputs: int
) -> str | None:
    """Return what to tell a reader if a compressed network answers no better than a constant, else None.

    An output of several quantities has collapsed where one of them has a score of 0 or less. Any other output
    without classes has where its squared error is that of the original's mean output or
    more (R^2 <= 0); one with classes where it has the original's class hardly more often than one answer to
    all inputs. Inputs so few that chance decides about that must show both.
    """
    for output, guess in zip(outputs, constant, strict=True):
        shown, name, worst = _no_better(output, guess, inputs), output.name, output.worst
        if worst is not None:
            name, shown = f"{name}[{worst.channels}]", _lost(worst)
        if shown is not None:
            told = f"on {counted(inputs, 'held-out input')} its output {name!r} has {shown}"
            return f"the compressed network has collapsed: {told}. {_REMEDY}"
    return None


def _lost(unit: UnitAgreement) -> str | None:
    """Return what shows that one quantity of an output is no better than its mean, else None."""
    if unit.score > 0:
        return None
    return f"a squared error of {1 - unit.score:.2f} of its variance, more than the original's mean output"


def _no_better(output: OutputAgreement, guess: OutputAgreement, inputs: int) -> str | None:
    """Return what shows that an output is no better than a constant, else None."""
    useless = output.error >= guess.error
    if guess.error <= _HARDLY_VARIES:
        return None
    if output.top1 is None or guess.top1 is None:
        error = f"a relative error of {output.error:.3f}, the original's mean output one of {guess.error:.3f}"
        return error if useless else None
    if output.top1 == 1 or not near_guessing(output.top1, guess.top1, inputs):
        return None
    classes = (
        f"the original's class {output.top1:.1%} of the time, one answer to all of them {guess.top1:.1%}"
    )
    return classes if _tells(guess.top1, inputs) or useless else None


def _tells(share: float, inputs: int) -> bool:
    """Tell whether inputs are so many that what is near guessing is far from anything good."""
    return share < 1 and guessing_noise(share, inputs) <= (1 - share) / 4


def accuracy_collapse(accuracy: float, baseline: float, share: float, images: int) -> str | None:
    """Return what to tell a reader if a network's accuracy has fallen to that of guessing, else None."""
    fallen = near_guessing(accuracy, share, images) if _tells(share, images) else accuracy <= share
    if near_guessing(baseline, share, images) or not fallen:
        return None
    return (
        f"the compressed network has collapsed: it answers {accuracy:.1%} of {counted(images, 'input')} "
        f"right, the original {baseline:.1%}, one answer to all of them {share:.1%}. {_REMEDY}"
    )
