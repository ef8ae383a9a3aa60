"""One rollout engine: the sources of mismatch that act on it together."""

import dataclasses

from trm_jax.mismatch import decoding as dc
from trm_jax.mismatch import heavy_tail as ht
from trm_jax.mismatch import precision as pr
from trm_jax.mismatch import reduction as rd
from trm_jax.mismatch import reporting as rp
from trm_jax.mismatch import routing as rt
from trm_jax.mismatch import staleness as st


@dataclasses.dataclass(frozen=True, kw_only=True)
class Engine:
  """Sources of mismatch of one engine; any subset. The default is none at all."""

  precision: pr.Precision = pr.Precision()
  reduction: rd.Reduction = rd.Reduction()
  routing: rt.Routing = rt.Routing()
  staleness: st.Staleness = st.Staleness()
  decoding: dc.Decoding = dc.Decoding()
  heavy_tail: ht.HeavyTail = ht.HeavyTail()
  reporting: rp.Reporting = rp.Reporting()
