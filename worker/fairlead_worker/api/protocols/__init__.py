"""The answers of APIs beside OpenAI's chats and completions: the same events of the same generation, told in their words."""
