"""Every family whose weights can be divided says over two ranks what transformers' `generate` says.

The second rank is one process for all families. What they say is confirmed by one pass of transformers over each prompt and its output,
which takes a tenth of `generate`; `exactness/test_families.py` has the tokens of `generate` itself.
"""

from pathlib import Path

import pytest
import torch
from tests.models import save_model
from tests.worker.exactness.cases import short_prompts
from tests.worker.exactness.harness import confirm_greedy
from tests.worker.model.checkpoints import save_mxfp4
from tests.worker.model.formats.alone import Alone
from tests.worker.parallel.pair import Pair

from fairlead_worker.errors import ModelLoadError
from fairlead_worker.model.catalog import SERVED, UNDIVIDED
from fairlead_worker.model.loader import load_model


@pytest.mark.parametrize("name", [name for name in SERVED if name not in UNDIVIDED])
def test_two_ranks_say_what_generate_says(name: str, pair: Pair, tmp_path: Path) -> None:
    model = save_model(name, tmp_path)
    with pair.engine(tmp_path, chunk=64) as engine:
        assert engine.loaded.ranks == 2
        prompts = short_prompts(engine.loaded)
        cold = engine.serve(prompts)
        confirm_greedy(model, prompts, cold)
        assert engine.serve(prompts) == cold, "from the prefix cache"


def test_gpt_oss_in_mxfp4_whose_groups_two_ranks_share(pair: Pair, tmp_path: Path) -> None:
    model = save_mxfp4(tmp_path, intermediate_size=96)
    with pair.engine(tmp_path, chunk=64) as engine:
        assert engine.loaded.dtype == torch.float32
        prompts = short_prompts(engine.loaded)
        confirm_greedy(model, prompts, engine.serve(prompts))


@pytest.mark.parametrize("name", sorted(UNDIVIDED))
def test_other_families_are_refused(name: str, tmp_path: Path) -> None:
    save_model(name, tmp_path)
    with pytest.raises(ModelLoadError, match="it cannot be divided"):
        load_model(str(tmp_path), group=Alone(0))
