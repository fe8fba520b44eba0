"""The list of families: each decoder of transformers is served, refused, or named here as one that the project has not looked at."""

from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from fairlead_worker.model.catalog import REFUSED, SERVED
from fairlead_worker.model.wrappers import PLAIN, WRAPPERS

NOT_LOOKED_AT = (
    # Decoders that read an encoder's output.
    *("bert-generation", "moshi", "musicgen", "musicgen_melody", "trocr", "whisper"),
    # Models that read more than text and have no wrapper here. transformers' class of them has all parts.
    *("dots3_note", "emu3", "fuyu", "git", "got_ocr2", "mllama", "phi4_multimodal", "qwen4_exp"),
    # Drafts of another model.
    *("gemma4_assistant", "gemma4_unified_assistant"),
    # Text models that the project has not run.
    *("beam", "blt", "hy_v4", "hyperclovax", "inkling2_text", "inkling_text", "openai-gpt", "qwen4_exp_text", "xlnet", "zamba"),
)


def test_each_decoder_of_transformers_is_listed() -> None:
    """A new release of transformers brings others: look at them, or add them above."""
    known = (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys()
        - MODEL_FOR_MASKED_LM_MAPPING_NAMES.keys()
        - MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.keys()
    )
    listed = {each.model_type for each in SERVED.values()} | {each.model_type for each in REFUSED.values()}
    listed |= PLAIN.keys() | WRAPPERS.keys()
    assert sorted(known - listed) == sorted(NOT_LOOKED_AT)
