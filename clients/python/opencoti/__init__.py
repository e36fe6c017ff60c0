"""Clients of an opencoti server.

`PolykvClient` and `AsyncPolykvClient` drive its pools. `opencoti.chat` has the LangChain model, `opencoti.agents` tools and
LangGraph nodes; they are imported by name, since they need packages that the clients do not.
"""

from .client import AsyncPolykvClient, PolykvClient
from .errors import OpencotiError, PoolSaturatedError
from .types import Capacity, Completion, Pool, PoolList, Rates, SessionRate

__all__ = [
    "AsyncPolykvClient",
    "Capacity",
    "Completion",
    "OpencotiError",
    "Pool",
    "PoolList",
    "PolykvClient",
    "PoolSaturatedError",
    "Rates",
    "SessionRate",
]
