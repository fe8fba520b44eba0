"""One model replica: HTTP API, scheduler, KV cache and model execution.

Imports `fairlead_index` and no other room. `engine/` and `cache/` import no torch.
"""

from fairlead_worker.isa import limit_libraries

limit_libraries()
