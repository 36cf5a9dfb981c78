"""One job on many engines, each in an actor of Ray: docs/replicas.md."""

from onestem.replicas.replicas import Replicas

__all__ = ["Replicas"]
