"""All private parts of Optuna that we use; see train/composer_internals.py for the idea."""

from __future__ import annotations

from collections.abc import Mapping

from optuna import Study
from optuna.distributions import BaseDistribution
from optuna.trial import FrozenTrial, Trial

INTERNALS = {
    "optuna.trial._trial.Trial.__init__": "(self, study: 'Study', trial_id: 'int') -> 'None'",
    "optuna.trial._trial.Trial._suggest": "(self, name: 'str', distribution: 'BaseDistribution') -> 'Any'",
    "optuna.trial._trial.Trial._trial_id": "",
    "optuna.trial._frozen.FrozenTrial._trial_id": "",
}


def id_of(trial: Trial | FrozenTrial) -> int:
    """Return the id of a trial in the storage."""
    return trial._trial_id


def draw(study: Study, attempt: FrozenTrial, distributions: Mapping[str, BaseDistribution]) -> Trial:
    """Draw a value for every key of a stored trial, as Study.ask does; keys that have a value keep it."""
    trial = Trial(study, id_of(attempt))
    for key, distribution in distributions.items():
        trial._suggest(key, distribution)
    return trial
