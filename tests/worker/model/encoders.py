"""Small random encoders with norms as training leaves them, and their tokenizers with a template for pairs."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, PreTrainedTokenizerFast

ENCODERS: dict[str, dict[str, Any]] = {
    "bert": {},
    "roberta": {"max_position_embeddings": 514, "type_vocab_size": 1, "pad_token_id": 1},
    "xlm-roberta": {"max_position_embeddings": 514, "type_vocab_size": 1, "pad_token_id": 1},
    "modernbert": {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"], "local_attention": 16, "pad_token_id": 0},
}
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
WORDS = tuple(f"w{number}" for number in range(500 - len(SPECIAL)))


def make_encoder(folder: Path, name: str, labels: int = 0, after: dict[str, Any] | None = None, **settings: Any) -> Path:
    """Write a model with three or two layers into `folder` and return it. labels: 0 without a head; after: changes of the config file."""
    standard = {"vocab_size": 500, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    if name == "modernbert":
        standard["num_hidden_layers"] = 3
    config = AutoConfig.for_model(name, **(standard | ENCODERS[name] | settings | ({"num_labels": labels} if labels else {})))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = (AutoModelForSequenceClassification if labels else AutoModel).from_config(config)
        for parameter in model.parameters():
            with torch.no_grad():
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    if after:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | after))
    _tokenizer(name).save_pretrained(folder)
    return folder


def _tokenizer(name: str) -> PreTrainedTokenizerFast:
    vocabulary = {text: number for number, text in enumerate((*SPECIAL, *WORDS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    second = 1 if name == "bert" else 0
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair=f"[CLS] $A [SEP] $B:{second} [SEP]:{second}",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    names = ["input_ids", "attention_mask", *(["token_type_ids"] if name == "bert" else [])]
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_input_names=names, **special)
