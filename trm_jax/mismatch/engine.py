"""One rollout engine: the sources of mismatch that act on it together."""

import dataclasses

from trm_jax.mismatch.decoding import Decoding
from trm_jax.mismatch.heavy_tail import HeavyTail
from trm_jax.mismatch.precision import Precision
from trm_jax.mismatch.reduction import Reduction
from trm_jax.mismatch.reporting import Reporting
from trm_jax.mismatch.routing import Routing
from trm_jax.mismatch.staleness import Staleness


@dataclasses.dataclass(frozen=True, kw_only=True)
class Engine:
  """Sources of mismatch of one engine; any subset. The default is none at all."""

  precision: Precision = Precision()
  reduction: Reduction = Reduction()
  routing: Routing = Routing()
  staleness: Staleness = Staleness()
  decoding: Decoding = Decoding()
  heavy_tail: HeavyTail = HeavyTail()
  reporting: Reporting = Reporting()
