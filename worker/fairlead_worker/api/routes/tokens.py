"""vLLM's tokenize and detokenize."""

from fairlead_worker.api import tokenize
from fairlead_worker.api.answers.worker import Prompt, Tokens
from fairlead_worker.api.routes.operation import Operation
from fairlead_worker.api.schema import DetokenizeRequest, TokenizeRequest

TAG = "Tokens"
OPERATIONS = (
    Operation(
        *("POST", "/tokenize", "tokenize", "Convert a prompt or messages to token ids", tokenize.tokenize),
        answer=Tokens,
        body=TokenizeRequest,
    ),
    Operation(
        *("POST", "/detokenize", "detokenize", "Convert token ids to text", tokenize.detokenize), answer=Prompt, body=DetokenizeRequest
    ),
)
