"""Questions about documents: some documents are asked about far more often than others. Arrivals are a Poisson process."""

import random

from fairlead.simulate.workloads.arrivals import arrive, new_blocks, zipf_weights
from fairlead.simulate.workloads.request import Request

DOCUMENTS = 400
EXPONENT = 0.99
"""YCSB's Zipf constant (Cooper et al., SoCC 2010)."""
DOCUMENT_BLOCKS = (8, 40)
"""4k to 20k tokens. On average all documents fill 9,600 blocks, which is 0.4 of the default fleet's caches."""
QUESTION_BLOCKS = (1, 3)


def zipf_documents(count: int, tokens_per_second: float, draw: random.Random) -> list[Request]:
    documents = [new_blocks(draw, draw.randint(*DOCUMENT_BLOCKS)) for _ in range(DOCUMENTS)]
    asked = draw.choices(documents, cum_weights=zipf_weights(DOCUMENTS, EXPONENT), k=count)
    prompts = [document + new_blocks(draw, draw.randint(*QUESTION_BLOCKS)) for document in asked]
    return arrive(prompts, [draw.expovariate(1) for _ in prompts], tokens_per_second, draw)
