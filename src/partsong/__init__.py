"""partsong: non-negative matrix factorization over data that cannot be pooled, or does not fit one machine.

X ≈ W H; rows are samples; parties own rows; W is private, H is shared.

    private rows ─► local ─► privacy ─► [ engine: Message ] ─► reduction ─► finish ─► model H
                      ▲───────────────────── broadcast ◄──────────────────────┘

    >>> import partsong
    >>> model = partsong.NMF(n_components=20).fit(X)                       # rows you hold
    >>> model = partsong.FederatedNMF(20, method="exact").fit([X_1, X_2])  # rows nobody pools
    >>> row_level = partsong.RowPrivacy(epsilon=3, row_bound=10.0)
    >>> private = partsong.FederatedNMF(20, privacy=row_level, secure_aggregation=True)
    >>> topics = partsong.FederatedTopicModel(50).fit([texts_1, texts_2]).topics()
    >>> print(partsong.compare([X_1, X_2], 20))                            # alone, together, pooled
    >>> fit = partsong.fit_distributed("X.npy", 20)                        # under mpiexec or torchrun
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from partsong.estimators.compare import compare as compare
    from partsong.estimators.distributed import fit_distributed as fit_distributed
    from partsong.estimators.federated_nmf import FederatedNMF as FederatedNMF
    from partsong.estimators.nmf import NMF as NMF
    from partsong.estimators.nmf import non_negative_factorization as non_negative_factorization
    from partsong.estimators.pca_game import PCAGame as PCAGame
    from partsong.io.model_file import Model as Model
    from partsong.io.model_file import load_model as load_model
    from partsong.io.model_file import save_model as save_model
    from partsong.io.read import read as read
    from partsong.methods.privacy_request import PartyPrivacy as PartyPrivacy
    from partsong.methods.privacy_request import RowPrivacy as RowPrivacy
    from partsong.topics.estimators import FederatedTopicModel as FederatedTopicModel
    from partsong.topics.estimators import TopicModel as TopicModel

__version__ = "0.2.0"

_HOMES = {
    "compare": "partsong.estimators.compare",
    "NMF": "partsong.estimators.nmf",
    "fit_distributed": "partsong.estimators.distributed",
    "FederatedNMF": "partsong.estimators.federated_nmf",
    "FederatedTopicModel": "partsong.topics.estimators",
    "Model": "partsong.io.model_file",
    "load_model": "partsong.io.model_file",
    "non_negative_factorization": "partsong.estimators.nmf",
    "save_model": "partsong.io.model_file",
    "read": "partsong.io.read",
    "PCAGame": "partsong.estimators.pca_game",
    "PartyPrivacy": "partsong.methods.privacy_request",
    "RowPrivacy": "partsong.methods.privacy_request",
    "TopicModel": "partsong.topics.estimators",
}

__all__ = [
    "NMF", "FederatedNMF", "FederatedTopicModel", "Model", "PCAGame", "PartyPrivacy", "RowPrivacy", "TopicModel",
    "__version__", "compare", "fit_distributed", "load_model", "non_negative_factorization", "read", "save_model",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Public names are imported when they are first used, so that `import partsong` stays light."""
    if name == "methods":
        return import_module("partsong.methods")
    if name in _HOMES:
        globals()[name] = found = getattr(import_module(_HOMES[name]), name)
        return found
    raise AttributeError(f"module 'partsong' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
