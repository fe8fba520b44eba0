"""Bodies of APIs that are no chat completions but ask for the same: made into a chat's body, in the router and in the worker alike.

Pure functions. A dialect's module has the body's fields (`...Body`), what becomes of them (`chat_body`) and the names that differ.
"""

from typing import Final

COMPLETIONS: Final = "/v1/completions"
CHAT: Final = "/v1/chat/completions"
RESPONSES: Final = "/v1/responses"
MESSAGES: Final = "/v1/messages"
COUNT_TOKENS: Final = "/v1/messages/count_tokens"
