"""Anthropic's Messages API."""

from fairlead_common.protocols.errors import MessagesError
from fairlead_common.protocols.messages import MessagesBody
from fairlead_common.protocols.paths import COUNT_TOKENS, MESSAGES
from fairlead_worker.api.answers.messages import Message, MessageStreamEvent, MessageTokens
from fairlead_worker.api.protocols import anthropic_messages
from fairlead_worker.api.routes.operation import Operation

TAG = "Anthropic"
OPERATIONS = (
    Operation(
        *("POST", MESSAGES, "create_message", "Answer messages", anthropic_messages.messages),
        answer=Message,
        body=MessagesBody,
        required=("messages", "max_tokens"),
        stream=MessageStreamEvent,
        error=MessagesError,
    ),
    Operation(
        *("POST", COUNT_TOKENS, "count_message_tokens", "Count the tokens of messages", anthropic_messages.count_tokens),
        answer=MessageTokens,
        body=MessagesBody,
        required=("messages",),
        error=MessagesError,
    ),
)
