"""Everything private of Optuna that we lean on, and nothing else; see train/composer_internals.py for the idea."""

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
    """The number under which the storage knows a trial."""
    return trial._trial_id


def draw(study: Study, attempt: FrozenTrial, distributions: Mapping[str, BaseDistribution]) -> Trial:
    """Give every key of a trial that is in the storage a value, as Study.ask does; what it had before, stays."""
    trial = Trial(study, id_of(attempt))
    for key, distribution in distributions.items():
        trial._suggest(key, distribution)
    return trial
