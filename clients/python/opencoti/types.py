"""What the server answers, field by field. Fields that a newer server adds are left out."""

from dataclasses import dataclass, field, fields
from typing import Any, Optional


class FromJson:
    """Makes a dataclass of a JSON object."""

    @classmethod
    def of(cls, body):
        known = {f.name for f in fields(cls)}
        return cls(**{name: value for name, value in body.items() if name in known})


@dataclass
class Pool(FromJson):
    pool_id: int
    parent: Optional[int]
    branch_pos: int
    prefix_len: int
    prefix_hash: str
    pinned: bool
    children: list
    orphaned_pin: bool
    admission: dict
    released: bool = False
    ephemeral: bool = False
    n_sessions: int = 0
    hits: int = 0
    sampling: dict = field(default_factory=dict)


@dataclass
class PoolList(FromJson):
    pools: list
    pools_max: int
    seq_ids_used: int
    tree_depth: int

    def __post_init__(self):
        self.pools = [Pool.of(pool) for pool in self.pools]


@dataclass
class Capacity(FromJson):
    can_admit: bool
    reason: str
    headroom_sessions: int
    mean_active_tps: float
    compaction_pressure: float
    free_cells: int
    settling: bool
    settle_remaining_ms: int
    n_warming: int
    n_pool_sessions: int
    guaranteed: bool
    projected_mean_tps_model: float
    projected_mean_tps_if_admitted: float
    projected_idle_estimate: bool
    projected_mean_tps_measured: Optional[float] = None
    drop_per_admit_ewma: Optional[float] = None


@dataclass
class SessionRate(FromJson):
    session_id: Optional[str]
    tps_ewma: float
    active: bool
    ctx_used: int
    ctx_total: int
    ctx_headroom_tokens: int
    pool_id: Optional[int] = None
    id_slot: Optional[int] = None


@dataclass
class Rates(FromJson):
    aggregate: float
    n_warming: int
    sessions: list

    def __post_init__(self):
        self.sessions = [SessionRate.of(session) for session in self.sessions]


@dataclass
class Completion:
    """An answer's body, and what its headers say of session and pool."""

    body: dict
    session_tps: Optional[float] = None
    sessions_remaining: Optional[int] = None
    saturated: Optional[str] = None

    @property
    def timings(self) -> dict[str, Any]:
        return self.body.get("timings") or {}

    @property
    def cache_n(self) -> Optional[int]:
        """Prompt tokens that were shared."""
        return self.timings.get("cache_n")

    @classmethod
    def of(cls, body, headers):
        def number(name, kind):
            return kind(headers[name]) if name in headers else None

        return cls(
            body,
            number("x-session-tps", float),
            number("x-sessions-remaining", int),
            headers.get("x-kv-pool-saturated"),
        )
