"""APIs beside OpenAI's completions and chat completions. They show the same events of the same generation in their own formats, except
`invocations`, which hands a body to the API of its fields."""
