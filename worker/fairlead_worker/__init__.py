"""One model replica: HTTP API, scheduler, KV cache and model execution.

It imports `fairlead_index` and `fairlead_common` only. `scheduler/` and `cache/` import no torch.
"""

from fairlead_worker.platform.isa import limit_libraries

limit_libraries()
