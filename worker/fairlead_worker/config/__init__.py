"""The worker's configuration, from flags and `FAIRLEAD_*` environment variables."""

from fairlead_worker.config.limits import Limits
from fairlead_worker.config.speculative import SpeculativeConfig
from fairlead_worker.config.worker_config import ADAPTER_NAME, WorkerConfig

__all__ = ["ADAPTER_NAME", "Limits", "SpeculativeConfig", "WorkerConfig"]
