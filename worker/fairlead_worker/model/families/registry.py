"""The encoders that are served, by the `model_type` of their config.json."""

from fairlead_worker.model.families.bert import Bert, Roberta
from fairlead_worker.model.families.modernbert import ModernBert

Encoder = Bert | ModernBert
FAMILIES: dict[str, type[Encoder]] = {
    "bert": Bert,
    "camembert": Roberta,
    "modernbert": ModernBert,
    "roberta": Roberta,
    "xlm-roberta": Roberta,
}
